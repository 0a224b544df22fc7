"""`python -m bench.leases`: capacity of one Redis core for hot counters.

Each script run updates one counter, like a lease request. The CPU of Redis is measured, so that the speed of this
process does not matter.
"""

from __future__ import annotations

import asyncio
import time

from ratelimit_rls.core.model import Algorithm, Charge, DescriptorPlan, Limit, Plan, PlanTemplate, Step, Unit
from ratelimit_rls.settings.redis_address import RedisAddress, RedisServers
from ratelimit_rls.store.redis.factory import redis_store
from ratelimit_rls.store.redis.script_node import RedisOptions
from tests.support.servers import RedisServer, redis_binaries

SECONDS = 3.0
AT_ONCE = 64
LEASE_S = 0.1


def plan(algorithm: Algorithm) -> Plan:
    limit = Limit(10_000, Unit.SECOND, algorithm, 10_000 if algorithm.has_burst else 0)
    step = Step(limit, 1, Charge.ADMITTED)
    return Plan(
        PlanTemplate("bench", True, (step,), (DescriptorPlan(None, (step,), 1),)),
        (b"rl:{hot}:%s" % algorithm.value.encode(),),
    )


def cpu_s(server: RedisServer) -> float:
    result = server.cli("INFO", "cpu")
    return float(result["used_cpu_user"]) + float(result["used_cpu_sys"])


async def measure(server: RedisServer, algorithm: Algorithm) -> float:
    """Return the microseconds of Redis per script run."""
    store = redis_store(
        RedisServers("single", (RedisAddress("127.0.0.1", server.port),)), None, RedisOptions(timeout_s=10)
    )
    await store.start()
    prepared = store.prepare(plan(algorithm)).take_up_to(5)
    runs = 0
    begun_s, before_s = time.monotonic(), cpu_s(server)
    while time.monotonic() - begun_s < SECONDS:
        await asyncio.gather(*(store.spend([prepared]) for _ in range(AT_ONCE)))
        runs += AT_ONCE
    spent_s = cpu_s(server) - before_s
    await store.close()
    return spent_s / runs * 1e6


def main() -> None:
    for name, binary in redis_binaries().items():
        with RedisServer(binary) as server:
            for algorithm in Algorithm:
                us = asyncio.run(measure(server, algorithm))
                per_core = 1e6 / us
                print(
                    f"{name:14} {algorithm.value:15} {us:5.1f} µs of Redis a run, {per_core:8,.0f} runs/s a core: "
                    f"one counter leased by {per_core * LEASE_S:6,.0f} processes for {LEASE_S * 1000:.0f} ms each"
                )


if __name__ == "__main__":
    main()
