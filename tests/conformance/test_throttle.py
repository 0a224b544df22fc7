"""`action: throttle`: a call that does not fit now is charged now, for the next slot that is free."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ratelimit_rls.core.model import Algorithm, Charge, Penalty, Plan, Unit
from tests.stores import Asked, StoreUnderTest, Watched, step, watched_call

MS = 1000
BUCKETS = (Algorithm.TOKEN_BUCKET, Algorithm.LEAKY_BUCKET, Algorithm.GCRA)


@pytest.fixture(params=BUCKETS, ids=lambda algorithm: algorithm.value)
def algorithm(request: pytest.FixtureRequest) -> Algorithm:
    found: Algorithm = request.param
    return found


def queue(
    algorithm: Algorithm,
    *beside: Asked,
    burst: int = 1,
    cost: int = 1,
    max_delay_us: int = 200 * MS,
    beside_cost: int = 1,
) -> Plan:
    """A hundred a second, evenly."""
    limit = step("q", 100, unit=Unit.SECOND, algorithm=algorithm, burst=burst, cost=cost, max_delay_us=max_delay_us)
    others = [one._replace(step=replace(one.step, cost=beside_cost)) for one in beside]
    return watched_call(Watched((limit,)), *(Watched((one,)) for one in others))


def waits_ms(store: StoreUnderTest, plan: Plan, times: int) -> list[int | None]:
    """How long each of the calls that come at once is held; None: refused."""
    answers = store.spend(*[plan] * times)
    return [None if answer.refused else answer.readings[0].wait_us // MS for answer in answers]


def test_a_burst_is_given_one_slot_after_the_other_up_to_the_longest_wait(
    store: StoreUnderTest, algorithm: Algorithm
) -> None:
    assert waits_ms(store, queue(algorithm), 25) == [*range(0, 201, 10), None, None, None, None]


def test_what_was_refused_has_taken_no_slot(store: StoreUnderTest, algorithm: Algorithm) -> None:
    waits_ms(store, queue(algorithm), 30)
    store.now_us += 10 * MS
    assert waits_ms(store, queue(algorithm), 2) == [200, None]


def test_a_refusal_tells_when_there_is_room_in_the_queue_again(store: StoreUnderTest, algorithm: Algorithm) -> None:
    plan = queue(algorithm)
    waits_ms(store, plan, 25)
    (refused,) = store.spend(plan)
    assert refused.readings[0].retry_us == 10 * MS
    store.now_us += 10 * MS - 1
    assert store.spend(plan)[0].readings[0].retry_us == 1
    store.now_us += 1
    assert waits_ms(store, plan, 1) == [200]


def test_a_burst_may_leave_at_once_and_the_rest_in_line(store: StoreUnderTest, algorithm: Algorithm) -> None:
    assert waits_ms(store, queue(algorithm, burst=3), 6) == [0, 0, 0, 10, 20, 30]


def test_a_caller_that_cannot_wait_so_long_is_refused_and_told_when_to_come_back(
    store: StoreUnderTest, algorithm: Algorithm
) -> None:
    plan = queue(algorithm)
    waits_ms(store, plan, 5)
    (refused,) = store.spend(plan, patience_us=50 * MS - 1)
    assert refused.refused
    assert refused.readings[0].retry_us == 1

    (refused,) = store.spend(plan, patience_us=0)
    assert refused.readings[0].retry_us == 50 * MS

    (held,) = store.spend(plan, patience_us=50 * MS)
    assert (held.refused, held.readings[0].wait_us) == (False, 50 * MS)


def test_a_slot_given_back_is_the_next_callers(store: StoreUnderTest, algorithm: Algorithm) -> None:
    plan = queue(algorithm)
    answers = store.spend(plan, plan, plan)
    store.give_back(plan, answers[-1])
    assert waits_ms(store, plan, 2) == [20, 30]


def left_beside(store: StoreUnderTest, beside: Asked, later_us: int) -> int:
    """What is left of a limit beside a queue when a held caller, charged to both, left after somebody else came."""
    plan = queue(Algorithm.GCRA, beside)
    _, held = store.spend(plan, plan)
    assert held.readings[0].wait_us
    store.now_us += later_us
    store.ask(beside)
    store.give_back(plan, held)
    return store.spend(queue(Algorithm.GCRA, beside, cost=0, beside_cost=0))[0].readings[1].left


@pytest.mark.parametrize("windowed", [Algorithm.FIXED_WINDOW, Algorithm.SLIDING_WINDOW], ids=lambda one: one.value)
def test_what_was_charged_to_a_window_is_given_back_while_the_window_lasts(
    store: StoreUnderTest, windowed: Algorithm
) -> None:
    beside = step("w", 10, unit=Unit.SECOND, algorithm=windowed)
    assert left_beside(store, beside, later_us=999 * MS) == 8
    store.now_us += 10_000 * MS - 999 * MS
    after = left_beside(store, beside, later_us=1000 * MS)
    assert after == (9 if windowed is Algorithm.FIXED_WINDOW else 7)  # of three, two have not slid out


def test_what_was_charged_to_a_log_is_taken_out_of_it(store: StoreUnderTest) -> None:
    assert left_beside(store, step("log", 10, algorithm=Algorithm.SLIDING_LOG), later_us=0) == 8


def test_a_limit_that_gives_nothing_back_does_not_stand_in_the_way_of_one_that_does(store: StoreUnderTest) -> None:
    full = step("log", 2, algorithm=Algorithm.SLIDING_LOG)
    plan = queue(Algorithm.GCRA, full)
    _, held = store.spend(plan, plan)
    store.give_back(plan, held)
    assert waits_ms(store, queue(Algorithm.GCRA), 1) == [10]


def test_what_was_not_charged_is_not_given_back(store: StoreUnderTest) -> None:
    full = step("full", 1, shadow=True)
    store.ask(full)
    assert left_beside(store, full, later_us=0) == 0


def test_what_is_charged_whatever_happens_stays_charged_and_does_not_stand_in_the_way(store: StoreUnderTest) -> None:
    always = step("always", 2, charge=Charge.ALWAYS)
    plan = queue(Algorithm.GCRA, always)
    _, held = store.spend(plan, plan)
    store.ask(always)  # over its limit by now
    store.give_back(plan, held)
    assert waits_ms(store, queue(Algorithm.GCRA), 1) == [10]
    assert store.ask(step("always", 2, cost=0, charge=Charge.ALWAYS)).readings[0].left == -1


def test_a_call_that_another_limit_refuses_takes_no_slot(store: StoreUnderTest, algorithm: Algorithm) -> None:
    waits_ms(store, queue(algorithm), 2)
    full = step("full", 1)
    store.ask(full)
    (answer,) = store.spend(queue(algorithm, full))
    assert answer.refused
    assert answer.readings[0].retry_us == 0
    assert waits_ms(store, queue(algorithm), 1) == [20]


def test_a_look_is_told_whether_it_would_be_let_in_and_waits_for_nothing(
    store: StoreUnderTest, algorithm: Algorithm
) -> None:
    look = queue(algorithm, cost=0)
    waits_ms(store, queue(algorithm), 20)
    (answer,) = store.spend(look)
    assert (answer.refused, answer.readings[0].wait_us) == (False, 0)
    waits_ms(store, queue(algorithm), 1)
    assert store.spend(look)[0].refused


def test_a_call_that_needs_more_than_the_burst_never_has_a_slot(store: StoreUnderTest, algorithm: Algorithm) -> None:
    (answer,) = store.spend(queue(algorithm, cost=2))
    assert (answer.refused, answer.readings[0].retry_us) == (True, -1)


def test_who_is_refused_for_want_of_patience_has_violated_nothing(store: StoreUnderTest, algorithm: Algorithm) -> None:
    """Be it a short deadline, or a waiting room that others have filled."""
    limit = step("q", 100, unit=Unit.SECOND, algorithm=algorithm, burst=1, max_delay_us=200 * MS)
    plan = watched_call(Watched((limit,), (Penalty(3_600_000 * MS, 1, (60,)),)))
    store.spend(plan)
    (hasty,) = store.spend(plan, patience_us=0)
    assert hasty.refused
    assert hasty.readings[1] == (0, 0, 0)
    assert store.spend(plan)[0].readings[0].wait_us == 10 * MS

    assert store.spend(*[plan] * 20, patience_us=250 * MS)[-1].readings[1].left == 1, "too many for the rules as well"
