"""The embedded store: memory budget and eviction order."""

from __future__ import annotations

import pytest

from ratelimit_rls.core.model import Algorithm, Plan, StoreResult, Unit
from ratelimit_rls.store.embedded import EmbeddedStore
from tests.support.stores import START_US, call, step

MINUTE_US = 60_000_000


class ClockedStore:
    """An embedded store with a clock that tests control."""

    def __init__(self, budget_bytes: int) -> None:
        self.now_us = START_US
        self.store = EmbeddedStore(budget_bytes, clock=lambda: self.now_us)

    def ask(self, plan: Plan) -> StoreResult:
        (answer,) = self.store.spend_now([self.store.prepare(plan)])
        assert isinstance(answer, StoreResult)
        return answer


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


@pytest.mark.slow
def test_memory_stays_within_the_budget() -> None:
    kept = ClockedStore(2**20)

    for i in range(20_000):
        kept.ask(call(step(f"user {i}", algorithm=Algorithm.TOKEN_BUCKET)))

    size = kept.store.size()
    assert size.bytes <= 2**20
    assert 1_000 < size.keys < 2_000
    assert size.evicted == 20_000 - size.keys


@pytest.mark.slow
def test_the_estimated_size_is_not_below_resident_memory() -> None:
    kept = ClockedStore(2**30)
    kept.ask(call(step("first")))
    before = resident_bytes()

    for i in range(30_000):
        kept.ask(call(step(f"a user with an address like {i}@example.com")))

    assert resident_bytes() - before < 1.3 * kept.store.size().bytes


def test_the_least_recently_used_key_is_evicted_first() -> None:
    kept = ClockedStore(100 * 700)
    kept.ask(call(step("precious", 1)))

    for i in range(1_000):
        kept.ask(call(step(f"passing {i}")))
        assert not kept.ask(call(step("precious", 1))).readings[0].allowed


def test_expired_keys_do_not_count_as_evicted() -> None:
    kept = ClockedStore(2**20)
    for i in range(1_000):
        kept.ask(call(step(f"old {i}")))
    kept.now_us += 10 * MINUTE_US

    for i in range(1_000):
        kept.ask(call(step(f"new {i}")))

    assert kept.store.size().keys == 1_000
    assert kept.store.size().evicted == 0


@pytest.mark.slow
def test_the_list_of_a_sliding_log_counts_towards_the_budget() -> None:
    kept = ClockedStore(2**18)
    for _ in range(10_000):
        kept.now_us += 1
        kept.ask(call(step("log", 10_000, algorithm=Algorithm.SLIDING_LOG)))

    assert kept.store.size().bytes <= 2**18


def test_a_quota_survives_any_number_of_expired_keys() -> None:
    kept = ClockedStore(2**20)
    daily = call(step("quota", 1, unit=Unit.DAY))
    assert kept.ask(daily).readings[0].allowed

    for i in range(4_000):
        kept.now_us += 10_000_000
        kept.ask(call(step(f"passing {i}", unit=Unit.SECOND)))

    assert not kept.ask(daily).readings[0].allowed
    assert kept.store.size().evicted == 0


def test_a_run_larger_than_the_budget_is_decided_and_evicted() -> None:
    kept = ClockedStore(10 * 700)
    logs = [call(step(f"log {i}", 9, algorithm=Algorithm.SLIDING_LOG, cost=3)) for i in range(40)]
    refunds = [call(step(f"log {i}", 9, algorithm=Algorithm.SLIDING_LOG, cost=-2)) for i in range(40)]
    windows = [call(step(f"window {i}", unit=Unit.SECOND)) for i in range(40)]

    for batch in (windows, windows, logs, logs + refunds):
        answers = kept.store.spend_now([kept.store.prepare(plan) for plan in batch])
        assert all(isinstance(answer, StoreResult) for answer in answers)
    kept.now_us += 10 * MINUTE_US
    kept.ask(call(step("later", unit=Unit.SECOND)))
    kept.ask(call(step("later", unit=Unit.SECOND)))

    assert kept.store.size().keys <= 10
    assert kept.store.size().bytes <= 10 * 700


async def test_deleted_keys_start_over_and_expired_keys_are_not_reported() -> None:
    kept = ClockedStore(2**20)
    plans = [call(step(name, algorithm=Algorithm.SLIDING_LOG)) for name in ("log", "other")]
    plans.append(call(step("window")))
    before = [kept.ask(plan).readings[0].left for plan in plans]
    log, other, window = (plan.keys[0] for plan in plans)

    assert await kept.store.forget([log, window, b"unheard of"]) == [log, window]

    assert kept.store.size().keys == 1
    assert [kept.ask(plan).readings[0].left for plan in plans] == [before[0], before[1] - 1, before[2]]
    kept.now_us += 10 * MINUTE_US
    assert await kept.store.forget([log, other, window]) == []
