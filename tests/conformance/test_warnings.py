"""`warn_at`: the states normal, warning and throttled, with hysteresis."""

from __future__ import annotations

from ratelimit_rls.core.model import Algorithm, Charge, Penalty, Plan, Unit, WarnAt, WarningState
from tests.support.stores import MonitoredDescriptor, StoreUnderTest, monitored_call, step

SECOND_US = 1_000_000
WARN_AT_80 = WarnAt(800)


def ten_a_second(cost: int = 1, charge: Charge = Charge.ADMITTED) -> Plan:
    limit = step("k", 10, unit=Unit.SECOND, algorithm=Algorithm.TOKEN_BUCKET, cost=cost, charge=charge)
    return monitored_call(MonitoredDescriptor((limit,), (WARN_AT_80,)))


def state(store: StoreUnderTest, plan: Plan) -> WarningState:
    (answer,) = store.spend(plan)
    return WarningState(answer.readings[-1].left)


def test_warning_above_threshold_and_throttled_if_denied(store: StoreUnderTest) -> None:
    states = [state(store, ten_a_second()) for _ in range(11)]
    assert states == [WarningState.NORMAL] * 8 + [WarningState.WARNING] * 2 + [WarningState.THROTTLED]


def test_warning_ends_a_tenth_below_its_threshold(store: StoreUnderTest) -> None:
    look = ten_a_second(cost=0)
    assert state(store, ten_a_second(cost=9)) is WarningState.WARNING
    store.now_us += 2 * SECOND_US // 10  # 70 % used, exactly
    assert state(store, look) is WarningState.WARNING
    store.now_us += 1 * SECOND_US // 10
    assert state(store, look) is WarningState.NORMAL
    assert state(store, ten_a_second(cost=2)) is WarningState.NORMAL  # 80 %, which is not above
    assert state(store, ten_a_second()) is WarningState.WARNING


def test_warning_lasts_between_thresholds(store: StoreUnderTest) -> None:
    """The stored state is renewed before it expires, so this can last for any time."""
    state(store, ten_a_second(cost=9))
    store.now_us += SECOND_US // 10
    for _ in range(100):
        assert state(store, ten_a_second()) is WarningState.WARNING
        store.now_us += SECOND_US // 10


def test_warning_ends_without_calls_at_low_usage(store: StoreUnderTest) -> None:
    state(store, ten_a_second(cost=9))
    store.now_us += 4 * SECOND_US // 10
    assert state(store, ten_a_second(cost=3)) is WarningState.NORMAL


def test_most_used_limit_decides(store: StoreUnderTest) -> None:
    wide, narrow = step(limit=100), step(limit=3, unit=Unit.HOUR)
    plan = monitored_call(MonitoredDescriptor((wide, narrow), (WARN_AT_80,)))
    assert [state(store, plan) for _ in range(4)] == [
        WarningState.NORMAL,
        WarningState.NORMAL,
        WarningState.WARNING,
        WarningState.THROTTLED,
    ]


def test_state_after_throttling_depends_on_usage(store: StoreUnderTest) -> None:
    state(store, ten_a_second(cost=10))
    assert state(store, ten_a_second()) is WarningState.THROTTLED
    store.now_us += SECOND_US // 10
    assert state(store, ten_a_second()) is WarningState.WARNING
    store.now_us += SECOND_US
    assert state(store, ten_a_second()) is WarningState.NORMAL


def test_limit_in_debt_stays_in_warning(store: StoreUnderTest) -> None:
    look = ten_a_second(cost=0, charge=Charge.ALWAYS)
    assert state(store, ten_a_second(cost=30, charge=Charge.ALWAYS)) is WarningState.THROTTLED
    store.now_us += 2 * SECOND_US
    assert state(store, look) is WarningState.WARNING
    store.now_us += 4 * SECOND_US // 10
    assert state(store, look) is WarningState.NORMAL


def test_cooldown_is_throttled(store: StoreUnderTest) -> None:
    limit = step("k", 10, unit=Unit.SECOND)
    plan = monitored_call(MonitoredDescriptor((limit,), (Penalty(60 * SECOND_US, 1, (5,)), WARN_AT_80)))
    assert [state(store, plan) for _ in range(11)][-1] is WarningState.THROTTLED
    store.now_us += 2 * SECOND_US
    assert state(store, plan) is WarningState.THROTTLED
