"""Calls with several limits: one verdict, and charging."""

from __future__ import annotations

from ratelimit_rls.core.model import Charge
from tests.support.stores import StoreUnderTest, call, step


def left(store: StoreUnderTest, key: str, limit: int) -> int:
    return store.ask(step(key, limit, cost=0)).readings[0].left


def test_denied_call_does_not_charge_admitted_limits(store: StoreUnderTest) -> None:
    store.ask(step("c", 1))

    answer = store.ask(step("a", 5), step("b", 5), step("c", 1))

    assert answer.denied
    assert [reading.allowed for reading in answer.readings] == [True, True, False]
    assert [reading.left for reading in answer.readings] == [5, 5, 0]
    assert (left(store, "a", 5), left(store, "b", 5)) == (5, 5)


def test_denied_call_charges_always_limits(store: StoreUnderTest) -> None:
    store.ask(step("c", 1))

    answer = store.ask(step("a", 5), step("b", 5, charge=Charge.ALWAYS), step("c", 1, charge=Charge.ALWAYS))

    assert answer.denied
    assert [reading.left for reading in answer.readings] == [5, 4, -1]
    assert (left(store, "a", 5), left(store, "b", 5), left(store, "c", 1)) == (5, 4, -1)


def test_repeated_limit_in_a_call_sees_its_first_hit(store: StoreUnderTest) -> None:
    always = step("a", 1, charge=Charge.ALWAYS)
    answer = store.ask(always, always)
    assert [reading.allowed for reading in answer.readings] == [True, False]
    assert answer.readings[1].left == -1

    admitted = step("b", 1)
    answer = store.ask(admitted, admitted)
    assert [reading.allowed for reading in answer.readings] == [True, False]
    assert left(store, "b", 1) == 1


def test_mixed_charge_on_one_limit_starts_from_state_before_call(store: StoreUnderTest) -> None:
    store.ask(step("full", 1))

    answer = store.ask(step("a", 5, cost=2), step("a", 5, cost=1, charge=Charge.ALWAYS), step("full", 1))

    assert answer.denied
    assert left(store, "a", 5) == 4


def test_shadow_limit_never_denies_and_charges_only_what_fits(store: StoreUnderTest) -> None:
    shadow = step("a", 1, shadow=True)

    answers = [store.ask(shadow, step("b", 9)) for _ in range(3)]

    assert [answer.denied for answer in answers] == [False] * 3
    assert [answer.readings[0].allowed for answer in answers] == [True, False, False]
    assert (left(store, "a", 1), left(store, "b", 9)) == (0, 6)


def test_quotas_deny_only_together(store: StoreUnderTest) -> None:
    one, two = step("a", 1, quota=True), step("b", 2, quota=True)

    assert [store.ask(one, two).denied for _ in range(3)] == [False, False, True]


def test_quota_and_plain_limit_deny_independently(
    store: StoreUnderTest,
) -> None:
    assert [store.ask(step("a", 1, quota=True), step("b", 9)).denied for _ in range(2)] == [False, True]
    assert [store.ask(step("c", 9, quota=True), step("d", 1)).denied for _ in range(2)] == [False, True]


def test_quota_without_limit_passes_for_all_quotas(store: StoreUnderTest) -> None:
    quota = call(step("a", 1, quota=True), quota_passes=True)

    assert [answer.denied for answer in store.spend(quota, quota)] == [False, False]


def test_global_shadow_mode_reports_verdict_and_charges(store: StoreUnderTest) -> None:
    shadowed = call(step("a", 1), step("b", 9), shadow_mode=True)

    answers = store.spend(shadowed, shadowed)

    assert [answer.denied for answer in answers] == [False, True]
    assert (left(store, "a", 1), left(store, "b", 9)) == (0, 7)


def test_batch_is_decided_in_order(store: StoreUnderTest) -> None:
    answers = store.spend(*(call(step("a", 3), step(f"own {i}", 1)) for i in range(5)))

    assert [answer.denied for answer in answers] == [False, False, False, True, True]
    assert left(store, "own 4", 1) == 1


def test_batch_larger_than_one_script_run(store: StoreUnderTest) -> None:
    answers = store.spend(*(call(*(step(f"{i} {j}", 2) for j in range(3))) for i in range(200)))

    assert [reading.left for answer in answers for reading in answer.readings] == [1] * 600


def test_call_with_a_thousand_limits(store: StoreUnderTest) -> None:
    store.ask(step("key 999", 1))

    answer = store.ask(*(step(f"key {i}", 1) for i in range(1000)))

    assert answer.denied
    assert left(store, "key 0", 1) == 1


def test_refund_in_denied_call_is_not_applied(store: StoreUnderTest) -> None:
    store.ask(step("a", 5, cost=5), step("full", 1))

    answer = store.ask(step("a", 5, cost=-3), step("full", 1))

    assert answer.denied
    assert answer.readings[0].left == 0
    assert left(store, "a", 5) == 0
