"""The embedded store's own affairs: memory, and whom it forgets first."""

from __future__ import annotations

import pytest

from ratelimit_rls.core.model import Algorithm, Answer, Plan, Unit
from ratelimit_rls.store.embedded import EmbeddedStore
from tests.stores import START_US, call, step

MINUTE_US = 60_000_000


class Clocked:
    """An embedded store at a moment that tests choose."""

    def __init__(self, budget_bytes: int) -> None:
        self.now_us = START_US
        self.store = EmbeddedStore(budget_bytes, clock=lambda: self.now_us)

    def ask(self, plan: Plan) -> Answer:
        (answer,) = self.store.decide([self.store.prepare(plan)])  # type: ignore[list-item]
        assert isinstance(answer, Answer)
        return answer


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


@pytest.mark.slow
def test_state_stays_within_the_budget_whatever_clients_send() -> None:
    kept = Clocked(2**20)

    for i in range(20_000):
        kept.ask(call(step(f"user {i}", algorithm=Algorithm.TOKEN_BUCKET)))

    size = kept.store.size()
    assert size.bytes <= 2**20
    assert 1_000 < size.keys < 2_000
    assert size.evicted == 20_000 - size.keys


@pytest.mark.slow
def test_the_estimate_of_memory_is_not_below_the_truth() -> None:
    kept = Clocked(2**30)
    kept.ask(call(step("first")))
    before = resident_bytes()

    for i in range(30_000):
        kept.ask(call(step(f"a user with an address like {i}@example.com")))

    assert resident_bytes() - before < 1.3 * kept.store.size().bytes


def test_what_was_used_last_is_forgotten_last() -> None:
    kept = Clocked(100 * 700)
    kept.ask(call(step("precious", 1)))

    for i in range(1_000):
        kept.ask(call(step(f"passing {i}")))
        assert not kept.ask(call(step("precious", 1))).readings[0].allowed


def test_what_has_expired_makes_room_without_counting_as_evicted() -> None:
    kept = Clocked(2**20)
    for i in range(1_000):
        kept.ask(call(step(f"old {i}")))
    kept.now_us += 10 * MINUTE_US

    for i in range(1_000):
        kept.ask(call(step(f"new {i}")))

    assert kept.store.size().keys == 1_000
    assert kept.store.size().evicted == 0


@pytest.mark.slow
def test_the_list_of_a_sliding_log_counts_towards_the_budget() -> None:
    kept = Clocked(2**18)
    for _ in range(10_000):
        kept.now_us += 1
        kept.ask(call(step("log", 10_000, algorithm=Algorithm.SLIDING_LOG)))

    assert kept.store.size().bytes <= 2**18


def test_a_quota_outlives_any_number_of_keys_that_are_dead() -> None:
    kept = Clocked(2**20)
    daily = call(step("quota", 1, unit=Unit.DAY))
    assert kept.ask(daily).readings[0].allowed

    for i in range(4_000):
        kept.now_us += 10_000_000
        kept.ask(call(step(f"passing {i}", unit=Unit.SECOND)))

    assert not kept.ask(daily).readings[0].allowed
    assert kept.store.size().evicted == 0


def test_a_run_larger_than_the_budget_is_decided_whole_and_leaves_nothing_that_never_ends() -> None:
    kept = Clocked(10 * 700)
    logs = [call(step(f"log {i}", 9, algorithm=Algorithm.SLIDING_LOG, cost=3)) for i in range(40)]
    refunds = [call(step(f"log {i}", 9, algorithm=Algorithm.SLIDING_LOG, cost=-2)) for i in range(40)]
    windows = [call(step(f"window {i}", unit=Unit.SECOND)) for i in range(40)]

    for batch in (windows, windows, logs, logs + refunds):
        answers = kept.store.decide([kept.store.prepare(plan) for plan in batch])  # type: ignore[misc]
        assert all(isinstance(answer, Answer) for answer in answers)
    kept.now_us += 10 * MINUTE_US
    kept.ask(call(step("later", unit=Unit.SECOND)))
    kept.ask(call(step("later", unit=Unit.SECOND)))

    assert kept.store.size().keys <= 10
    assert kept.store.size().bytes <= 10 * 700


async def test_what_is_forgotten_begins_anew_and_what_is_over_was_nothing_to_forget() -> None:
    kept = Clocked(2**20)
    plans = [call(step(name, algorithm=Algorithm.SLIDING_LOG)) for name in ("log", "other")]
    plans.append(call(step("window")))
    before = [kept.ask(plan).readings[0].left for plan in plans]
    log, other, window = (plan.keys[0] for plan in plans)

    assert await kept.store.forget([log, window, b"unheard of"]) == [log, window]

    assert kept.store.size().keys == 1
    assert [kept.ask(plan).readings[0].left for plan in plans] == [before[0], before[1] - 1, before[2]]
    kept.now_us += 10 * MINUTE_US
    assert await kept.store.forget([log, other, window]) == []
