"""Progressive penalties: violations, cooldowns and expiry."""

from __future__ import annotations

import pytest

from ratelimit_rls.core.model import Algorithm, Charge, Penalty, Plan, StoreResult, Unit
from tests.support.stores import MonitoredDescriptor, StoreUnderTest, monitored_call, step

SECOND_US = 1_000_000
AT_ONCE = Penalty(within_us=3600 * SECOND_US, after=1, multipliers=(1, 2, 4, 8))
AFTER_THREE = Penalty(within_us=3600 * SECOND_US, after=3, multipliers=(1, 2, 4, 8))


def one_a_second(penalty: Penalty, key: str = "client", cost: int = 1, charge: Charge = Charge.ADMITTED) -> Plan:
    limit = step(key, 1, unit=Unit.SECOND, algorithm=Algorithm.GCRA, cost=cost, charge=charge)
    return monitored_call(MonitoredDescriptor((limit,), (penalty,)))


def summary(answer: StoreResult) -> tuple[bool, int, int]:
    """Return whether the call was denied, the number of violations, and the cooldown."""
    violations, cooldown_us, _ = answer.readings[-1]
    return answer.denied, violations, cooldown_us


def offend(store: StoreUnderTest, plan: Plan) -> int:
    """Call twice at once, then wait as long as required; return that time."""
    (admitted,) = store.spend(plan)
    assert not admitted.denied
    (denied,) = store.spend(plan)
    assert denied.denied
    waited_us = max(reading.retry_us for reading in denied.readings)
    store.now_us += waited_us
    return waited_us


@pytest.mark.parametrize("charge", list(Charge))
def test_cooldowns_grow_by_multipliers_up_to_the_last(store: StoreUnderTest, charge: Charge) -> None:
    plan = one_a_second(AT_ONCE, charge=charge)
    unit = SECOND_US if charge is Charge.ADMITTED else 2 * SECOND_US  # with `always` the denial is charged too

    waited = [offend(store, plan) for _ in range(7)]

    assert waited == [unit * multiplier for multiplier in (1, 2, 4, 8, 8, 8, 8)]


def test_first_multiplier_applies_after_threshold(store: StoreUnderTest) -> None:
    plan = one_a_second(AFTER_THREE)
    waited = [offend(store, plan) // SECOND_US for _ in range(8)]
    assert waited == [1, 1, 1, 2, 4, 8, 8, 8]


def test_client_within_limit_has_no_penalty_state(store: StoreUnderTest) -> None:
    plan = one_a_second(AT_ONCE)
    for _ in range(50):
        (answer,) = store.spend(plan)
        assert summary(answer) == (False, 0, 0)
        store.now_us += SECOND_US


def test_denials_during_cooldown_are_not_violations(store: StoreUnderTest) -> None:
    plan = one_a_second(AT_ONCE)
    store.spend(plan)
    store.spend(plan)
    for _ in range(9):
        store.now_us += SECOND_US // 10
        (answer,) = store.spend(plan)
        assert summary(answer)[:2] == (True, 1)
    store.now_us += SECOND_US // 10
    assert summary(store.spend(plan)[0]) == (False, 1, 0)


def test_cooldown_denies_to_its_last_microsecond(
    store: StoreUnderTest,
) -> None:
    plan = one_a_second(AT_ONCE)
    offend(store, plan)
    store.spend(plan)
    assert summary(store.spend(plan)[0]) == (True, 2, 2 * SECOND_US)

    store.now_us += 2 * SECOND_US - 1
    (answer,) = store.spend(plan)
    assert answer.readings[0].allowed
    assert summary(answer) == (True, 2, 1)

    store.now_us += 1
    assert summary(store.spend(plan)[0]) == (False, 2, 0)


def test_below_threshold_only_the_limit_denies(
    store: StoreUnderTest,
) -> None:
    def plan(cost: int) -> Plan:
        limit = step("client", 10, algorithm=Algorithm.TOKEN_BUCKET, cost=cost)
        return monitored_call(MonitoredDescriptor((limit,), (AFTER_THREE,)))

    store.spend(plan(8))
    assert summary(store.spend(plan(5))[0])[:2] == (True, 1)
    assert summary(store.spend(plan(5))[0])[:2] == (True, 1)
    assert summary(store.spend(plan(1))[0]) == (False, 1, 0)
    assert summary(store.spend(plan(5))[0])[:2] == (True, 2)


def test_denial_after_cooldown_is_a_violation(store: StoreUnderTest) -> None:
    plan = one_a_second(AFTER_THREE)
    store.spend(plan)
    assert summary(store.spend(plan)[0])[1] == 1
    store.now_us += SECOND_US
    other_client = step("client", 1, unit=Unit.SECOND, algorithm=Algorithm.GCRA)
    store.ask(other_client)
    assert summary(store.spend(plan)[0])[1] == 2


@pytest.mark.parametrize("late_us", [0, 1])
def test_violation_expires_after_period(store: StoreUnderTest, late_us: int) -> None:
    plan = one_a_second(Penalty(within_us=60 * SECOND_US, after=1, multipliers=(1, 2)))
    began_us = store.now_us
    offend(store, plan)
    store.now_us = began_us + 60 * SECOND_US - 1 + late_us
    store.spend(plan)
    (denied,) = store.spend(plan)
    assert summary(denied) == (True, 1 if late_us else 2, SECOND_US if late_us else 2 * SECOND_US)


def test_cost_above_limit_is_not_a_violation(store: StoreUnderTest) -> None:
    (answer,) = store.spend(one_a_second(AT_ONCE, cost=2))
    assert answer.readings[0].retry_us == -1
    assert summary(answer) == (True, 0, 0)


def test_look_sees_cooldown_and_is_not_a_violation(store: StoreUnderTest) -> None:
    plan, look = one_a_second(AT_ONCE), one_a_second(AT_ONCE, cost=0)
    store.spend(plan)
    assert summary(store.spend(look)[0]) == (True, 0, 0)
    store.spend(plan)
    assert summary(store.spend(look)[0]) == (True, 1, SECOND_US)


def test_refund_is_accepted_during_cooldown(store: StoreUnderTest) -> None:
    plan = one_a_second(AT_ONCE)
    store.spend(plan)
    store.spend(plan)
    assert not store.spend(one_a_second(AT_ONCE, cost=-1))[0].denied


def test_denial_by_another_descriptor_is_not_a_violation(store: StoreUnderTest) -> None:
    own = step("mine", 5, unit=Unit.SECOND)
    full = step("theirs", 1, unit=Unit.SECOND)
    plan = monitored_call(MonitoredDescriptor((own,), (AT_ONCE,)), MonitoredDescriptor((full,)))
    store.spend(plan)
    (answer,) = store.spend(plan)
    assert answer.denied
    assert answer.readings[1] == (0, 0, 0)


def test_violations_are_visible_within_a_batch(store: StoreUnderTest) -> None:
    plan = one_a_second(AT_ONCE)
    answers = store.spend(plan, plan, plan)
    assert [summary(answer) for answer in answers] == [(False, 0, 0), (True, 1, SECOND_US), (True, 1, SECOND_US)]


def test_huge_cooldown_is_bounded(store: StoreUnderTest) -> None:
    yearly = step("client", 1, unit=Unit.YEAR)
    plan = monitored_call(MonitoredDescriptor((yearly,), (Penalty(3600 * SECOND_US, 1, (10_000,)),)))
    store.spend(plan)
    assert summary(store.spend(plan)[0]) == (True, 1, 2**51)
