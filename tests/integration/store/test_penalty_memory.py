"""Memory of penalties: bounded per attacker, whatever attackers do."""

from __future__ import annotations

import re
import sys

import pytest

from ratelimit_rls.core.model import Algorithm, Penalty, Plan, Unit
from ratelimit_rls.store.embedded import EmbeddedStore
from tests.support.redis_servers import wait_until
from tests.support.servers import RedisServer
from tests.support.stores import MonitoredDescriptor, StoreUnderTest, embedded_store, monitored_call, redis_store, step

ATTACKERS = 10_000
MAX_BYTES_EACH = {"redis": 500, "embedded": 1600}
"""Bytes of a limit and a penalty with `after: 3` and four multipliers, as documented in docs/descriptors.md."""

POINTER_BYTES = 8

PENALTY = Penalty(within_us=3_600_000_000, after=3, multipliers=(1, 2, 4, 8))


def attack(store: StoreUnderTest, attackers: int) -> None:
    """Each attacker is admitted, denied, and returns after the wait, until the maximum of violations is stored."""
    plans = [_plan(number) for number in range(attackers)]
    for _ in range(PENALTY.after + len(PENALTY.multipliers) + 1):
        for first in range(0, attackers, 1000):
            store.spend(*plans[first : first + 1000])
            store.spend(*plans[first : first + 1000])
        store.now_us += 8_000_000
    last = store.spend(plans[0])[0]
    assert last.readings[-1].left == PENALTY.after + len(PENALTY.multipliers) - 1


def _plan(number: int) -> Plan:
    key = f"rl:{{edge/remote_address=10.{number >> 16}.{number >> 8 & 255}.{number & 255}}}"
    return monitored_call(MonitoredDescriptor((step(key, 1, unit=Unit.SECOND, algorithm=Algorithm.GCRA),), (PENALTY,)))


def _used_bytes(server: RedisServer) -> int:
    """Return the memory in use when no client is connected: connection buffers are not state of attackers.

    Redis's tables are powers of two, and sometimes twice as large as their keys need: they are counted as if full.
    """
    wait_until(lambda: server.cli("INFO", "clients")["connected_clients"] == 1, "no other client is connected")
    # A table that is being resized exists twice for a short time.
    wait_until(lambda: b"rehashing" not in server.cli("DEBUG", "HTSTATS", 0), "its tables are as large as they will be")
    tables = server.cli("DEBUG", "HTSTATS", 0)
    buckets, elements = (sum(map(int, re.findall(rb"%s: (\d+)" % word, tables))) for word in (b"size", b"elements"))
    return int(server.cli("INFO", "memory")["used_memory"]) - POINTER_BYTES * (buckets - elements)


def _report(name: str, bytes_each: float) -> None:
    print(f"\n{name}: {bytes_each:.0f} bytes for each of {ATTACKERS:,} attackers", file=sys.stderr)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_memory_of_many_attackers_in_redis_is_bounded(any_redis: RedisServer) -> None:
    with redis_store(any_redis) as store:
        attack(store, 1)  # the script is loaded from now on
    before = _used_bytes(any_redis)
    with redis_store(any_redis) as store:
        attack(store, ATTACKERS)
    bytes_each = (_used_bytes(any_redis) - before) / ATTACKERS
    _report("Redis", bytes_each)
    assert bytes_each <= MAX_BYTES_EACH["redis"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_memory_of_many_attackers_in_the_embedded_store_is_bounded() -> None:
    with embedded_store(budget_bytes=2**28) as store:
        attack(store, ATTACKERS)
        assert isinstance(store.store, EmbeddedStore)
        size = store.store.size()
    assert size.evicted == 0
    _report("embedded", size.bytes / ATTACKERS)
    assert size.bytes / ATTACKERS <= MAX_BYTES_EACH["embedded"]
