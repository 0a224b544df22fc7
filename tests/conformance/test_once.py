"""Idempotent calls: a request id is counted once, and retries get the first result."""

from __future__ import annotations

import pytest

from ratelimit_rls.core.decision import decision_of
from ratelimit_rls.core.model import Algorithm, Charge, Plan, StoreResult
from ratelimit_rls.core.refund import refund
from ratelimit_rls.store.script_codec import DEFAULT_IDEMPOTENCY_S
from tests.support.stores import StoreUnderTest, call, step

ALGORITHMS = pytest.mark.parametrize("algorithm", list(Algorithm), ids=lambda algorithm: algorithm.value)


def ask(store: StoreUnderTest, plan: Plan, *ids: bytes) -> list[StoreResult]:
    """Spend a batch of the plan, once for each id; an empty id means none."""
    prepared = store.store.prepare(plan)
    return store.answered(*(prepared.idempotent(name) if name else prepared for name in ids))


def left(store: StoreUnderTest, algorithm: Algorithm = Algorithm.FIXED_WINDOW, limit: int = 10) -> int:
    return store.ask(step(limit=limit, algorithm=algorithm, cost=0)).readings[0].left


@ALGORITHMS
def test_retry_gets_first_result_and_is_not_counted(store: StoreUnderTest, algorithm: Algorithm) -> None:
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


def test_uncounted_denial_is_decided_again(store: StoreUnderTest) -> None:
    """A client that retries at the right time with the same id is admitted."""
    plan = call(step(limit=1))
    (_, denied) = ask(store, plan, b"", b"late")
    assert denied.denied
    store.now_us += 60_000_000
    (again,) = ask(store, plan, b"late")

    assert (again.denied, again.replayed) == (False, False)
    assert left(store, limit=1) == 0


def test_counted_denial_is_replayed(store: StoreUnderTest) -> None:
    plan = call(step(limit=1, charge=Charge.ALWAYS))
    (_, denied) = ask(store, plan, b"", b"late")
    store.now_us += 60_000_000
    (again,) = ask(store, plan, b"late")

    assert (again.denied, again.replayed) == (True, True)
    assert again.readings == denied.readings


def test_replayed_delay_is_reduced_by_elapsed_time(store: StoreUnderTest) -> None:
    queue = call(step(limit=60, algorithm=Algorithm.GCRA, burst=1, max_delay_us=10_000_000))
    (_, delayed) = ask(store, queue, b"", b"mine")
    assert delayed.readings[0].wait_us == 1_000_000
    store.now_us += 400_000
    (sooner,) = ask(store, queue, b"mine")
    store.now_us += 600_000
    (then,) = ask(store, queue, b"mine")

    assert [sooner.readings[0].wait_us, then.readings[0].wait_us] == [600_000, 0]


def test_admission_is_replayed_after_limit_is_used_up(store: StoreUnderTest) -> None:
    plan = call(step(limit=2))
    ask(store, plan, b"mine", b"", b"")
    (again,) = ask(store, plan, b"mine")

    assert not again.denied


def test_charge_always_is_charged_once(store: StoreUnderTest) -> None:
    plan = call(step(limit=1, charge=Charge.ALWAYS))
    ask(store, plan, *[b"same"] * 5)

    assert left(store, limit=1) == 0


def test_request_id_is_scoped_to_its_counters(store: StoreUnderTest) -> None:
    ask(store, call(step("alice", 10)), b"id")
    (bob,) = ask(store, call(step("bob", 10)), b"id")
    (both,) = ask(store, call(step("alice", 10), step("bob", 10)), b"id")

    assert bob.readings[0].left == 9
    assert [reading.left for reading in both.readings] == [8, 8]


def test_request_id_expires_after_five_minutes(store: StoreUnderTest) -> None:
    plan = call(step(limit=10, algorithm=Algorithm.TOKEN_BUCKET))
    ask(store, plan, b"id")
    store.now_us += (DEFAULT_IDEMPOTENCY_S - 1) * 1_000_000
    ask(store, plan, b"id")

    assert left(store, Algorithm.TOKEN_BUCKET) == 10


def test_request_id_is_scoped_to_its_operation(store: StoreUnderTest) -> None:
    """The same id is sent with the call and, when its stream is done, with the report of its cost."""
    ask(store, call(step(limit=10)), b"id")
    ask(store, call(step(limit=10, cost=4)), b"id")
    ask(store, call(step(limit=10, cost=-1)), b"id")

    assert left(store) == 6


def test_refunded_request_id_is_charged_again(store: StoreUnderTest) -> None:
    plan = call(step(limit=10))
    prepared = store.store.prepare(plan).idempotent(b"id")
    (first,) = store.answered(prepared)
    due = refund(decision_of(plan.template, first))
    assert due is not None
    store.answered(store.store.refund_of(prepared, due))
    assert left(store) == 10
    (again,) = store.answered(prepared)

    assert not again.replayed
    assert left(store) == 9
