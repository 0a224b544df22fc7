"""A single plan gets the same result as in a batch; an unconditional admission has no details."""

from __future__ import annotations

import random
import re

import pytest

from ratelimit_rls.core.model import Algorithm, Charge, Limit, Penalty, Plan, Step, StoreResult, Unit, WarnAt
from ratelimit_rls.store.embedded import EmbeddedStore
from ratelimit_rls.store.lua_script import read_source
from tests.support.stores import START_US, KeyedOp, MonitoredDescriptor, call, monitored_call, step

TWICE = step("twice", 2)
BY_CALENDAR = KeyedOp(b"month", Step(Limit(3, Unit.DAY, timezone="Europe/Berlin"), 1, Charge.ADMITTED))
PLANS = [
    *(call(step(algorithm.value, algorithm=algorithm)) for algorithm in Algorithm),
    call(step("a", 9, charge=Charge.ALWAYS), step("b", 4, unit=Unit.SECOND), step("c", 2, shadow=True)),
    call(TWICE, TWICE),
    call(BY_CALENDAR, step("a", 9)),
    call(step("slot", 2, unit=Unit.SECOND, algorithm=Algorithm.GCRA, burst=1, max_delay_us=700_000)),
    monitored_call(MonitoredDescriptor((step("w", 3),), (Penalty(60_000_000, 1, (2, 4)), WarnAt(500)))),
]

CACHED_SPECS = int(re.findall(r"MAX_SPECS = (\d+)", read_source("lib/read_spec"))[0])


def test_arbitrary_costs_from_clients_are_never_mixed_up() -> None:
    store = EmbeddedStore(clock=lambda: START_US)
    for cost in range(2 * CACHED_SPECS + 50):
        plan = call(step(f"{cost}", 2**31, cost=cost))
        (answer,) = store.spend_now([store.prepare(plan)])
        assert isinstance(answer, StoreResult)
        assert answer.readings[0].left == 2**31 - cost


@pytest.mark.slow
def test_single_results_equal_batch_results() -> None:
    drawn = random.Random(5)
    now_us = START_US
    batches, alone = (EmbeddedStore(clock=lambda: now_us) for _ in range(2))
    plain = 0
    for _ in range(3_000):
        now_us += drawn.choice((0, 1_000, 300_000, 5_000_000))
        plan: Plan = drawn.choice(PLANS)
        (expected,) = batches.spend_now([batches.prepare(plan)])
        assert isinstance(expected, StoreResult)

        answer = alone.spend_single(alone.prepare_single(plan))

        if answer is None:
            assert not expected.denied
            assert not any(reading.retry_us for reading in expected.readings)
            plain += 1
        else:
            assert answer == expected
    assert 500 < plain < 2_500
