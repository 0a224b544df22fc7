"""Capacity of one Redis core: calls per second by batch size and limits, and bytes per key by algorithm.

The store of the service spends plans directly: several connections, each with one batch in flight, like the processes
of a fleet. Only the CPU of Redis is measured, so that the speed of this process does not matter.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from statistics import median

from redis import Redis

from bench import cpu
from bench.connection import LoadError
from bench.servers import StartedRedis
from bench.spread import spread
from bench.workload import BUCKET_AND_DAY
from ratelimit_rls.core.model import Descriptor, Entry, Plan, Request
from ratelimit_rls.core.plan import Planner, Policy
from ratelimit_rls.rules.compile import compile_documents
from ratelimit_rls.settings.redis_address import RedisAddress, RedisServers
from ratelimit_rls.store.base import PreparedPlan
from ratelimit_rls.store.redis.factory import AnyRedisStore, redis_store
from ratelimit_rls.store.redis.script_node import RedisOptions

BATCHES, LIMITS = (1, 4, 16, 64), (1, 2, 5)
CONNECTIONS = 8
CALLERS = 10_000
ENDPOINTS = 5
DOMAIN = "capacity"
HIGH = 1_000_000_000
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class CapacityCase:
    """Batches of one size on one set of rules."""

    limits: int  # fixed windows, each of its own descriptor; 0: a token bucket and a daily limit on one
    batch: int

    @property
    def name(self) -> str:
        rules = f"{self.limits}-fixed_window" if self.limits else "token_bucket-and-day"
        return f"capacity-{rules}-{self.batch}-in-batch"


@dataclass(frozen=True, slots=True)
class MemoryCase:
    """Keys of one kind of state, and the size that they were expected to have."""

    kind: str
    rule: str
    callers: int = CALLERS
    keys_each: int = 1
    endpoints: int = ENDPOINTS
    passes: int = 1  # over all callers
    calls: int = 1  # of every caller in a pass, one after the other
    only: bytes = b""  # end of the keys that are measured; empty: all
    expected_bytes: int = 150

    @property
    def name(self) -> str:
        return f"capacity-memory-{self.kind}"


def _of(algorithm: str) -> MemoryCase:
    # A bucket that is full again has no key.
    return MemoryCase(algorithm, f"rate_limit: {{unit: hour, requests_per_unit: 10, algorithm: {algorithm}}}")


CASES = [CapacityCase(limits, batch) for limits in (*LIMITS, 0) for batch in BATCHES]
ALGORITHMS = ("fixed_window", "sliding_window", "sliding_log", "token_bucket", "leaky_bucket", "gcra")
DAY = f"{{unit: day, requests_per_unit: {HIGH}, calendar: true}}"
VIOLATIONS = 5
ORGANISATIONS = MemoryCase(
    "organisations",
    f"limits: [{{unit: minute, requests_per_unit: {HIGH}}}, {DAY}]",
    endpoints=1,
    keys_each=2,
    expected_bytes=100,
)
PENALTIES = MemoryCase(
    "violations",
    "rate_limit: {unit: second, requests_per_unit: 1000, algorithm: gcra, burst: 1},"
    f" penalty: {{within: 1h, after: {VIOLATIONS + 1}, multipliers: [1]}}",
    callers=1_000,
    endpoints=1,
    passes=VIOLATIONS,
    calls=2,
    only=b":penalty",
    expected_bytes=90 * VIOLATIONS,
)
"""In each pass the first call is admitted, and the second one is denied and a violation: both have the same time."""

MEMORY = [*map(_of, ALGORITHMS), ORGANISATIONS, PENALTIES]
EXPECTED_CLIENTS_BYTES, EXPECTED_ORGANISATIONS_BYTES = 8_000_000, 2_000_000


def offered() -> list[CapacityCase | MemoryCase]:
    return [*CASES, *MEMORY]


@dataclass(frozen=True, slots=True)
class KeyMemory:
    """Memory of the keys of one case."""

    keys: int
    usage_bytes: float  # MEMORY USAGE per key
    grown_bytes: int  # growth of used_memory, which includes hash tables and expiries

    @property
    def grown_each(self) -> float:
        return self.grown_bytes / self.keys


def _planner(rules: Sequence[str]) -> Planner:
    text = "\n".join([f"domain: {DOMAIN}", "descriptors:", *rules, ""])
    return Planner(compile_documents({"capacity.yaml": text.encode()}).tree, Policy())


def _request(*entries: Entry) -> Request:
    return Request(DOMAIN, (Descriptor(entries),), 1)


def _plans(limits: int) -> list[Plan]:
    """Return a plan for each caller."""
    rule = f"rate_limit: {{unit: hour, requests_per_unit: {HIGH}}}" if limits else BUCKET_AND_DAY
    keys = [f"level-{number}" for number in range(max(1, limits))]
    planner = _planner([f"  - {{key: {key}, {rule}}}" for key in keys])
    return [
        planner.plan(Request(DOMAIN, tuple(Descriptor((Entry(key, f"caller-{number:06}"),)) for key in keys), 1))
        for number in range(CALLERS)
    ]


def _store(redis: StartedRedis) -> AnyRedisStore:
    host, _, port = redis.url.partition(":")
    address = RedisServers("single", (RedisAddress(host, int(port)),))
    return redis_store(address, None, RedisOptions(timeout_s=TIMEOUT_S))


class CapacityMeasurement:
    """Measures the Redis CPU of batches, and keeps the plans of each set of rules."""

    def __init__(self, redis: StartedRedis) -> None:
        self._redis = redis
        self._plans: dict[int, list[Plan]] = {}

    def redis_us(self, case: CapacityCase, seconds: float) -> float:
        """Return the microseconds of Redis per call."""
        if case.limits not in self._plans:
            self._plans[case.limits] = _plans(case.limits)
            asyncio.run(self._spend_for(case, 0))  # every counter exists before the first measurement
        return asyncio.run(self._spend_for(case, seconds))

    async def _spend_for(self, case: CapacityCase, seconds: float) -> float:
        stores = [_store(self._redis) for _ in range(CONNECTIONS)]
        await asyncio.gather(*(store.start() for store in stores))
        try:
            plans = [stores[0].prepare(plan) for plan in self._plans[case.limits]]
            if not seconds:
                await _spend_all(stores[0], plans)
                return 0.0
            batches = [plans[first : first + case.batch] for first in range(0, len(plans) - case.batch + 1, case.batch)]
            following = cycle(batches)
            until_s, before_s = time.monotonic() + seconds, cpu.process_s(self._redis.pids[0])
            calls = sum(await asyncio.gather(*(_spend_until(store, following, until_s) for store in stores)))
            return (cpu.process_s(self._redis.pids[0]) - before_s) / calls * 1e6
        finally:
            await asyncio.gather(*(store.close() for store in stores))


async def _spend_until(store: AnyRedisStore, batches: Iterator[Sequence[PreparedPlan]], until_s: float) -> int:
    """Spend batches one after the other; return the number of calls."""
    calls = 0
    while time.monotonic() < until_s:
        batch = next(batches)
        _check(await store.spend(batch))
        calls += len(batch)
    return calls


async def _spend_all(store: AnyRedisStore, plans: Sequence[PreparedPlan]) -> None:
    numbers = iter(plans)
    while some := list(islice(numbers, max(BATCHES))):
        _check(await store.spend(some))


def _check(results: Sequence[object]) -> None:
    for result in results:
        if isinstance(result, Exception):
            raise LoadError(f"Redis did not decide a call: {result}")


def measure_memory(case: MemoryCase, redis: StartedRedis) -> KeyMemory:
    """Fill an empty Redis with the keys of a case and measure them. Another process must not use it."""
    address = f"redis://{redis.url}"
    with Redis.from_url(address, socket_timeout=TIMEOUT_S) as client:
        asyncio.run(_fill(case, redis, 1))  # loads the script
        client.execute_command("FLUSHALL", "SYNC")
        _wait_until_alone(client)
        before = int(client.info("memory")["used_memory"])
        asyncio.run(_fill(case, redis, case.callers))
        _wait_until_alone(client)
        grown_bytes = int(client.info("memory")["used_memory"]) - before
        keys = [key for key in client.scan_iter(count=1000) if key.endswith(case.only)]
        with client.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.memory_usage(key, samples=0)
            usage = pipeline.execute()
        violations = [len(state.split()) - 2 for state in client.mget(keys)] if case is PENALTIES else []
        client.execute_command("FLUSHALL", "SYNC")
    expected = case.callers * case.endpoints * case.keys_each
    if violations and set(violations) != {VIOLATIONS}:
        raise LoadError(f"{case.name}: {min(violations)} to {max(violations)} violations a key instead of {VIOLATIONS}")
    if len(keys) != expected:
        raise LoadError(f"{case.name}: {len(keys)} keys instead of {expected}")
    return KeyMemory(len(keys), sum(usage) / len(keys), grown_bytes)


async def _fill(case: MemoryCase, redis: StartedRedis, callers: int) -> None:
    """Make the calls of every caller on a connection that is closed afterwards, so that it is not measured."""
    key = "organisation" if case is ORGANISATIONS else "client"
    planner = _planner([f"  - key: {key}", "    descriptors:", f"      - {{key: endpoint, {case.rule}}}"])
    store = _store(redis)
    await store.start()
    try:
        plans = [
            store.prepare(planner.plan(_request(Entry(key, caller), Entry("endpoint", path))))
            for caller in (f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}" for number in range(callers))
            for path in (f"/api/v{number}" for number in range(case.endpoints))
            for _ in range(case.calls)
        ]
        for _ in range(case.passes):
            await _spend_all(store, plans)
    finally:
        await store.close()


def _wait_until_alone(client: Redis) -> None:
    while int(client.info("clients")["connected_clients"]) > 1:
        time.sleep(0.01)


def cpu_table(measured: Mapping[CapacityCase, Sequence[float]]) -> list[str]:
    """Return one line per case with the microseconds of Redis per call in each round."""
    return [
        f"{case.name}: {spread(us, '.1f')} µs of Redis a call, {1e6 / median(us):,.0f} calls/s a core"
        for case, us in measured.items()
    ]


def memory_table(measured: Mapping[MemoryCase, KeyMemory]) -> list[str]:
    """Return one line per case, with the size that was expected."""
    lines = []
    for case, one in measured.items():
        grown = "" if case.only else f", {one.grown_each:.0f} with its share of the tables"
        expected = f"(at most {case.expected_bytes}: {_judged(one.usage_bytes, case.expected_bytes)})"
        lines.append(f"{case.name}: {one.keys:,} keys, MEMORY USAGE {one.usage_bytes:.0f} bytes each{grown} {expected}")
    if ORGANISATIONS in measured:
        grown_bytes = measured[ORGANISATIONS].grown_bytes
        lines.append(_total(f"{ORGANISATIONS.callers:,} organisations", grown_bytes, EXPECTED_ORGANISATIONS_BYTES))
    for case, one in measured.items():
        if case.kind in ALGORITHMS and PENALTIES in measured:
            grown_bytes = one.grown_bytes + round(measured[PENALTIES].usage_bytes * measured[PENALTIES].keys)
            what = f"{case.callers:,} clients × {case.endpoints} endpoints, {PENALTIES.callers:,} with penalties"
            lines.append(_total(f"{what}, {case.kind}", grown_bytes, EXPECTED_CLIENTS_BYTES))
    return lines


def _total(what: str, used: float, most: float) -> str:
    return f"{what}: {used / 1e6:.1f} MB (at most {most / 1e6:.0f} MB: {_judged(used, most)})"


def _judged(measured: float, most: float) -> str:
    return "met" if measured <= most else "MISSED"
