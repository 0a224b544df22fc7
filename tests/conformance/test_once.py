"""A call that carries a request id is counted once, however often it comes, and answered as the first time."""

from __future__ import annotations

import pytest

from ratelimit_rls.core.decide import decide
from ratelimit_rls.core.model import Algorithm, Answer, Charge, Plan
from ratelimit_rls.core.refund import refund
from ratelimit_rls.store.batch import COUNTED_ONCE_S
from tests.stores import StoreUnderTest, call, step

ALGORITHMS = pytest.mark.parametrize("algorithm", list(Algorithm), ids=lambda algorithm: algorithm.value)


def ask(store: StoreUnderTest, plan: Plan, *ids: bytes) -> list[Answer]:
    """A batch of the plan under each of the ids; an empty one is none."""
    prepared = store.store.prepare(plan)
    return store.answered(*(prepared.once(name) if name else prepared for name in ids))


def left(store: StoreUnderTest, algorithm: Algorithm = Algorithm.FIXED_WINDOW, limit: int = 10) -> int:
    return store.ask(step(limit=limit, algorithm=algorithm, cost=0)).readings[0].left


@ALGORITHMS
def test_a_retry_is_answered_as_the_first_time_and_not_counted(store: StoreUnderTest, algorithm: Algorithm) -> None:
    plan = call(step(limit=10, algorithm=algorithm))
    (first,) = ask(store, plan, b"id-1")
    ask(store, plan, b"", b"")
    store.now_us += 1_000
    (again,) = ask(store, plan, b"id-1")

    assert again.readings == first.readings
    assert left(store, algorithm) == 7


def test_retries_within_one_batch_are_counted_once(store: StoreUnderTest) -> None:
    answers = ask(store, call(step(limit=10)), b"a", b"a", b"b", b"a")

    assert [answer.readings[0].left for answer in answers] == [9, 9, 8, 9]
    assert left(store) == 8


def test_a_refusal_that_counted_nothing_is_decided_anew(store: StoreUnderTest) -> None:
    """Whoever comes back when it was told to, under its id, is let in."""
    plan = call(step(limit=1))
    (_, refused) = ask(store, plan, b"", b"late")
    assert refused.refused
    store.now_us += 60_000_000
    (again,) = ask(store, plan, b"late")

    assert (again.refused, again.again) == (False, False)
    assert left(store, limit=1) == 0


def test_a_refusal_that_was_counted_is_told_again(store: StoreUnderTest) -> None:
    plan = call(step(limit=1, charge=Charge.ALWAYS))
    (_, refused) = ask(store, plan, b"", b"late")
    store.now_us += 60_000_000
    (again,) = ask(store, plan, b"late")

    assert (again.refused, again.again) == (True, True)
    assert again.readings == refused.readings


def test_a_slot_that_has_come_meanwhile_is_not_waited_for_again(store: StoreUnderTest) -> None:
    queue = call(step(limit=60, algorithm=Algorithm.GCRA, burst=1, max_delay_us=10_000_000))
    (_, held) = ask(store, queue, b"", b"mine")
    assert held.readings[0].wait_us == 1_000_000
    store.now_us += 400_000
    (sooner,) = ask(store, queue, b"mine")
    store.now_us += 600_000
    (then,) = ask(store, queue, b"mine")

    assert [sooner.readings[0].wait_us, then.readings[0].wait_us] == [600_000, 0]


def test_an_admission_is_remembered_although_the_limit_is_used_up_since(store: StoreUnderTest) -> None:
    plan = call(step(limit=2))
    ask(store, plan, b"mine", b"", b"")
    (again,) = ask(store, plan, b"mine")

    assert not again.refused


def test_what_is_charged_always_is_charged_once(store: StoreUnderTest) -> None:
    plan = call(step(limit=1, charge=Charge.ALWAYS))
    ask(store, plan, *[b"same"] * 5)

    assert left(store, limit=1) == 0


def test_an_id_belongs_to_the_counters_it_came_with(store: StoreUnderTest) -> None:
    ask(store, call(step("alice", 10)), b"id")
    (bob,) = ask(store, call(step("bob", 10)), b"id")
    (both,) = ask(store, call(step("alice", 10), step("bob", 10)), b"id")

    assert bob.readings[0].left == 9
    assert [reading.left for reading in both.readings] == [8, 8]


def test_an_id_is_known_for_five_minutes(store: StoreUnderTest) -> None:
    plan = call(step(limit=10, algorithm=Algorithm.TOKEN_BUCKET))
    ask(store, plan, b"id")
    store.now_us += (COUNTED_ONCE_S - 1) * 1_000_000
    ask(store, plan, b"id")

    assert left(store, Algorithm.TOKEN_BUCKET) == 10


def test_another_question_about_the_same_counters_is_not_answered_with_the_first(store: StoreUnderTest) -> None:
    """The same id comes with the call and, when its stream is done, with what it has cost."""
    ask(store, call(step(limit=10)), b"id")
    ask(store, call(step(limit=10, cost=4)), b"id")
    ask(store, call(step(limit=10, cost=-1)), b"id")

    assert left(store) == 6


def test_who_is_given_back_its_charge_is_charged_when_it_comes_again(store: StoreUnderTest) -> None:
    plan = call(step(limit=10))
    prepared = store.store.prepare(plan).once(b"id")
    (first,) = store.answered(prepared)
    owed = refund(decide(plan.outline, first))
    assert owed is not None
    store.answered(store.store.opposite(prepared, owed))
    assert left(store) == 10
    (again,) = store.answered(prepared)

    assert not again.again
    assert left(store) == 9
