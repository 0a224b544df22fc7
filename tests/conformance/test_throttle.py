"""`action: throttle`: a call that does not fit now is charged for the next free slot."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ratelimit_rls.core.model import Algorithm, Charge, Penalty, Plan, Unit
from tests.support.stores import KeyedOp, MonitoredDescriptor, StoreUnderTest, monitored_call, step

MS = 1000
BUCKETS = (Algorithm.TOKEN_BUCKET, Algorithm.LEAKY_BUCKET, Algorithm.GCRA)


@pytest.fixture(params=BUCKETS, ids=lambda algorithm: algorithm.value)
def algorithm(request: pytest.FixtureRequest) -> Algorithm:
    found: Algorithm = request.param
    return found


def queue(
    algorithm: Algorithm,
    *beside: KeyedOp,
    burst: int = 1,
    cost: int = 1,
    max_delay_us: int = 200 * MS,
    beside_cost: int = 1,
) -> Plan:
    """Return a plan with a hundred hits per second, evenly spaced."""
    limit = step("q", 100, unit=Unit.SECOND, algorithm=algorithm, burst=burst, cost=cost, max_delay_us=max_delay_us)
    others = [one._replace(step=replace(one.step, cost=beside_cost)) for one in beside]
    return monitored_call(MonitoredDescriptor((limit,)), *(MonitoredDescriptor((one,)) for one in others))


def waits_ms(store: StoreUnderTest, plan: Plan, times: int) -> list[int | None]:
    """Return the delays of calls that arrive at once; None: denied."""
    answers = store.spend(*[plan] * times)
    return [None if answer.denied else answer.readings[0].wait_us // MS for answer in answers]


def test_burst_gets_consecutive_slots_up_to_max_delay(store: StoreUnderTest, algorithm: Algorithm) -> None:
    assert waits_ms(store, queue(algorithm), 25) == [*range(0, 201, 10), None, None, None, None]


def test_denied_call_takes_no_slot(store: StoreUnderTest, algorithm: Algorithm) -> None:
    waits_ms(store, queue(algorithm), 30)
    store.now_us += 10 * MS
    assert waits_ms(store, queue(algorithm), 2) == [200, None]


def test_denial_has_time_until_the_queue_has_a_free_slot(store: StoreUnderTest, algorithm: Algorithm) -> None:
    plan = queue(algorithm)
    waits_ms(store, plan, 25)
    (denied,) = store.spend(plan)
    assert denied.readings[0].retry_us == 10 * MS
    store.now_us += 10 * MS - 1
    assert store.spend(plan)[0].readings[0].retry_us == 1
    store.now_us += 1
    assert waits_ms(store, plan, 1) == [200]


def test_burst_passes_at_once_and_rest_is_delayed(store: StoreUnderTest, algorithm: Algorithm) -> None:
    assert waits_ms(store, queue(algorithm, burst=3), 6) == [0, 0, 0, 10, 20, 30]


def test_caller_with_short_deadline_is_denied_with_retry(store: StoreUnderTest, algorithm: Algorithm) -> None:
    plan = queue(algorithm)
    waits_ms(store, plan, 5)
    (denied,) = store.spend(plan, max_wait_us=50 * MS - 1)
    assert denied.denied
    assert denied.readings[0].retry_us == 1

    (denied,) = store.spend(plan, max_wait_us=0)
    assert denied.readings[0].retry_us == 50 * MS

    (delayed,) = store.spend(plan, max_wait_us=50 * MS)
    assert (delayed.denied, delayed.readings[0].wait_us) == (False, 50 * MS)


def test_refunded_slot_goes_to_next_caller(store: StoreUnderTest, algorithm: Algorithm) -> None:
    plan = queue(algorithm)
    answers = store.spend(plan, plan, plan)
    store.give_back(plan, answers[-1])
    assert waits_ms(store, plan, 2) == [20, 30]


def left_beside(store: StoreUnderTest, beside: KeyedOp, later_us: int) -> int:
    """Return what is left of a limit next to a queue after a delayed call, charged to both, was cancelled.

    Another call arrived in between.
    """
    plan = queue(Algorithm.GCRA, beside)
    _, delayed = store.spend(plan, plan)
    assert delayed.readings[0].wait_us
    store.now_us += later_us
    store.ask(beside)
    store.give_back(plan, delayed)
    return store.spend(queue(Algorithm.GCRA, beside, cost=0, beside_cost=0))[0].readings[1].left


@pytest.mark.parametrize("windowed", [Algorithm.FIXED_WINDOW, Algorithm.SLIDING_WINDOW], ids=lambda one: one.value)
def test_window_refunds_until_it_ends(store: StoreUnderTest, windowed: Algorithm) -> None:
    beside = step("w", 10, unit=Unit.SECOND, algorithm=windowed)
    assert left_beside(store, beside, later_us=999 * MS) == 8
    store.now_us += 10_000 * MS - 999 * MS
    after = left_beside(store, beside, later_us=1000 * MS)
    assert after == (9 if windowed is Algorithm.FIXED_WINDOW else 7)  # two of three are still in the window


def test_sliding_log_refunds_delayed_call(store: StoreUnderTest) -> None:
    assert left_beside(store, step("log", 10, algorithm=Algorithm.SLIDING_LOG), later_us=0) == 8


def test_limit_without_refund_does_not_block_others(store: StoreUnderTest) -> None:
    full = step("log", 2, algorithm=Algorithm.SLIDING_LOG)
    plan = queue(Algorithm.GCRA, full)
    _, delayed = store.spend(plan, plan)
    store.give_back(plan, delayed)
    assert waits_ms(store, queue(Algorithm.GCRA), 1) == [10]


def test_uncharged_limit_is_not_refunded(store: StoreUnderTest) -> None:
    full = step("full", 1, shadow=True)
    store.ask(full)
    assert left_beside(store, full, later_us=0) == 0


def test_charge_always_is_not_refunded(store: StoreUnderTest) -> None:
    always = step("always", 2, charge=Charge.ALWAYS)
    plan = queue(Algorithm.GCRA, always)
    _, delayed = store.spend(plan, plan)
    store.ask(always)  # now over its limit
    store.give_back(plan, delayed)
    assert waits_ms(store, queue(Algorithm.GCRA), 1) == [10]
    assert store.ask(step("always", 2, cost=0, charge=Charge.ALWAYS)).readings[0].left == -1


def test_call_denied_by_another_limit_takes_no_slot(store: StoreUnderTest, algorithm: Algorithm) -> None:
    waits_ms(store, queue(algorithm), 2)
    full = step("full", 1)
    store.ask(full)
    (answer,) = store.spend(queue(algorithm, full))
    assert answer.denied
    assert answer.readings[0].retry_us == 0
    assert waits_ms(store, queue(algorithm), 1) == [20]


def test_look_is_not_delayed(store: StoreUnderTest, algorithm: Algorithm) -> None:
    look = queue(algorithm, cost=0)
    waits_ms(store, queue(algorithm), 20)
    (answer,) = store.spend(look)
    assert (answer.denied, answer.readings[0].wait_us) == (False, 0)
    waits_ms(store, queue(algorithm), 1)
    assert store.spend(look)[0].denied


def test_cost_above_burst_never_gets_a_slot(store: StoreUnderTest, algorithm: Algorithm) -> None:
    (answer,) = store.spend(queue(algorithm, cost=2))
    assert (answer.denied, answer.readings[0].retry_us) == (True, -1)


def test_denial_for_short_deadline_is_not_a_violation(store: StoreUnderTest, algorithm: Algorithm) -> None:
    """The same applies to a short deadline and to a full throttle queue."""
    limit = step("q", 100, unit=Unit.SECOND, algorithm=algorithm, burst=1, max_delay_us=200 * MS)
    plan = monitored_call(MonitoredDescriptor((limit,), (Penalty(3_600_000 * MS, 1, (60,)),)))
    store.spend(plan)
    (impatient,) = store.spend(plan, max_wait_us=0)
    assert impatient.denied
    assert impatient.readings[1] == (0, 0, 0)
    assert store.spend(plan)[0].readings[0].wait_us == 10 * MS

    assert store.spend(*[plan] * 20, max_wait_us=250 * MS)[-1].readings[1].left == 1, "too many for the rules as well"
