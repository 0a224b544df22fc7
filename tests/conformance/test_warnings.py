"""`warn_at`: normal, warning and throttled, without flickering between them."""

from __future__ import annotations

from ratelimit_rls.core.model import Algorithm, Charge, Penalty, Plan, State, Unit, WarnAt
from tests.stores import StoreUnderTest, Watched, step, watched_call

SECOND_US = 1_000_000
WARN_AT_80 = WarnAt(800)


def ten_a_second(cost: int = 1, charge: Charge = Charge.ADMITTED) -> Plan:
    limit = step("k", 10, unit=Unit.SECOND, algorithm=Algorithm.TOKEN_BUCKET, cost=cost, charge=charge)
    return watched_call(Watched((limit,), (WARN_AT_80,)))


def state(store: StoreUnderTest, plan: Plan) -> State:
    (answer,) = store.spend(plan)
    return State(answer.readings[-1].left)


def test_a_warning_begins_above_its_mark_and_refusals_are_throttled(store: StoreUnderTest) -> None:
    states = [state(store, ten_a_second()) for _ in range(11)]
    assert states == [State.NORMAL] * 8 + [State.WARNING] * 2 + [State.THROTTLED]


def test_a_warning_ends_only_a_tenth_below_where_it_began(store: StoreUnderTest) -> None:
    look = ten_a_second(cost=0)
    assert state(store, ten_a_second(cost=9)) is State.WARNING
    store.now_us += 2 * SECOND_US // 10  # 70 % used, exactly
    assert state(store, look) is State.WARNING
    store.now_us += 1 * SECOND_US // 10
    assert state(store, look) is State.NORMAL
    assert state(store, ten_a_second(cost=2)) is State.NORMAL  # 80 %, which is not above
    assert state(store, ten_a_second()) is State.WARNING


def test_a_warning_lasts_while_use_stays_between_the_marks(store: StoreUnderTest) -> None:
    """However long: what the store keeps of it is renewed in time."""
    state(store, ten_a_second(cost=9))
    store.now_us += SECOND_US // 10
    for _ in range(100):
        assert state(store, ten_a_second()) is State.WARNING
        store.now_us += SECOND_US // 10


def test_a_warning_ends_though_nobody_asked_while_use_was_low(store: StoreUnderTest) -> None:
    state(store, ten_a_second(cost=9))
    store.now_us += 4 * SECOND_US // 10
    assert state(store, ten_a_second(cost=3)) is State.NORMAL


def test_the_limit_that_is_used_most_decides(store: StoreUnderTest) -> None:
    wide, narrow = step(limit=100), step(limit=3, unit=Unit.HOUR)
    plan = watched_call(Watched((wide, narrow), (WARN_AT_80,)))
    assert [state(store, plan) for _ in range(4)] == [State.NORMAL, State.NORMAL, State.WARNING, State.THROTTLED]


def test_after_being_throttled_a_client_is_warned_or_not_by_its_use(store: StoreUnderTest) -> None:
    state(store, ten_a_second(cost=10))
    assert state(store, ten_a_second()) is State.THROTTLED
    store.now_us += SECOND_US // 10
    assert state(store, ten_a_second()) is State.WARNING
    store.now_us += SECOND_US
    assert state(store, ten_a_second()) is State.NORMAL


def test_a_limit_in_debt_is_in_the_warning_state_for_as_long_as_it_takes(store: StoreUnderTest) -> None:
    look = ten_a_second(cost=0, charge=Charge.ALWAYS)
    assert state(store, ten_a_second(cost=30, charge=Charge.ALWAYS)) is State.THROTTLED
    store.now_us += 2 * SECOND_US
    assert state(store, look) is State.WARNING
    store.now_us += 4 * SECOND_US // 10
    assert state(store, look) is State.NORMAL


def test_a_cooldown_is_throttled_too(store: StoreUnderTest) -> None:
    limit = step("k", 10, unit=Unit.SECOND)
    plan = watched_call(Watched((limit,), (Penalty(60 * SECOND_US, 1, (5,)), WARN_AT_80)))
    assert [state(store, plan) for _ in range(11)][-1] is State.THROTTLED
    store.now_us += 2 * SECOND_US
    assert state(store, plan) is State.THROTTLED
