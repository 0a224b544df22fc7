"""What a crowd of attackers can make a store keep: bounded for each of them, whatever they do."""

from __future__ import annotations

import re
import sys

import pytest

from ratelimit_rls.core.model import Algorithm, Penalty, Plan, Unit
from ratelimit_rls.store.embedded import EmbeddedStore
from tests.redis_servers import until
from tests.servers import RedisServer
from tests.stores import StoreUnderTest, Watched, embedded_store, redis_store, step, watched_call

ATTACKERS = 10_000
MOST_BYTES_EACH = {"redis": 500, "embedded": 1600}
"""Of a limit and a penalty with `after: 3` and four multipliers: docs/descriptors.md says so."""

POINTER_BYTES = 8

PENALTY = Penalty(within_us=3_600_000_000, after=3, multipliers=(1, 2, 4, 8))


def attack(store: StoreUnderTest, attackers: int) -> None:
    """Everybody is admitted, refused, and comes back after the wait, until as many violations are kept as can be."""
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
    return watched_call(Watched((step(key, 1, unit=Unit.SECOND, algorithm=Algorithm.GCRA),), (PENALTY,)))


def _used_bytes(server: RedisServer) -> int:
    """When nobody is connected any more: buffers of connections are not what is kept of attackers.

    Redis's tables are powers of two, and now and then twice as large as their keys need: they are taken as if full.
    """
    until(lambda: server.cli("INFO", "clients")["connected_clients"] == 1, "nobody else is connected")
    # A table that is being resized exists twice for a moment.
    until(lambda: b"rehashing" not in server.cli("DEBUG", "HTSTATS", 0), "its tables are as large as they will be")
    tables = server.cli("DEBUG", "HTSTATS", 0)
    slots, elements = (sum(map(int, re.findall(rb"%s: (\d+)" % word, tables))) for word in (b"size", b"elements"))
    return int(server.cli("INFO", "memory")["used_memory"]) - POINTER_BYTES * (slots - elements)


def _tell(name: str, bytes_each: float) -> None:
    print(f"\n{name}: {bytes_each:.0f} bytes for each of {ATTACKERS:,} attackers", file=sys.stderr)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_a_crowd_of_attackers_costs_in_redis(any_redis: RedisServer) -> None:
    with redis_store(any_redis) as store:
        attack(store, 1)  # the script is there from now on
    before = _used_bytes(any_redis)
    with redis_store(any_redis) as store:
        attack(store, ATTACKERS)
    bytes_each = (_used_bytes(any_redis) - before) / ATTACKERS
    _tell("Redis", bytes_each)
    assert bytes_each <= MOST_BYTES_EACH["redis"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_a_crowd_of_attackers_costs_in_this_process() -> None:
    with embedded_store(budget_bytes=2**28) as store:
        attack(store, ATTACKERS)
        assert isinstance(store.store, EmbeddedStore)
        size = store.store.size()
    assert size.evicted == 0
    _tell("embedded", size.bytes / ATTACKERS)
    assert size.bytes / ATTACKERS <= MOST_BYTES_EACH["embedded"]
