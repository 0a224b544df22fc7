"""`action: throttle`: a call that does not fit now is charged now, for the next slot that is free."""

from __future__ import annotations

import pytest

from ratelimit_rls.core.model import Algorithm, Plan, Unit
from tests.stores import Asked, StoreUnderTest, Watched, step, watched_call

MS = 1000
BUCKETS = (Algorithm.TOKEN_BUCKET, Algorithm.LEAKY_BUCKET, Algorithm.GCRA)


@pytest.fixture(params=BUCKETS, ids=lambda algorithm: algorithm.value)
def algorithm(request: pytest.FixtureRequest) -> Algorithm:
    found: Algorithm = request.param
    return found


def queue(algorithm: Algorithm, *beside: Asked, burst: int = 1, cost: int = 1, max_delay_us: int = 200 * MS) -> Plan:
    """A hundred a second, evenly."""
    limit = step("q", 100, unit=Unit.SECOND, algorithm=algorithm, burst=burst, cost=cost, max_delay_us=max_delay_us)
    return watched_call(Watched((limit,)), *(Watched((one,)) for one in beside))


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
    assert waits_ms(store, plan, 3) == [0, 10, 20]
    store.give_back(plan)
    assert waits_ms(store, plan, 2) == [20, 30]


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
