"""Leases on real servers: saved calls, refunds, and invalidation of denials in other processes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from ratelimit_rls.core.model import (
    Algorithm,
    Charge,
    DescriptorPlan,
    LeasePolicy,
    Limit,
    Plan,
    PlanTemplate,
    Rule,
    Step,
    StoreResult,
    Unit,
)
from ratelimit_rls.errors import StoreError
from ratelimit_rls.settings.redis_address import RedisAddress, RedisServers
from ratelimit_rls.store.denial_cache import DenialCache
from ratelimit_rls.store.leases import LeasingStore
from ratelimit_rls.store.redis.factory import redis_store
from ratelimit_rls.store.redis.pubsub import InvalidationListener
from ratelimit_rls.store.redis.script_node import RedisOptions
from tests.support.redis_servers import RedisCluster
from tests.support.servers import RedisServer

SOON_S = 5.0
"""Timeout for events that take milliseconds, on a busy machine."""

LEASE_US = 100_000


@dataclass(frozen=True)
class Replica:
    leases: LeasingStore
    denials: DenialCache

    async def ask(self, plan: Plan, calls: int = 1) -> list[StoreResult]:
        answers = await self.leases.spend([self.leases.prepare(plan)] * calls)
        assert not any(isinstance(answer, StoreError) for answer in answers), answers
        return answers  # type: ignore[return-value]

    async def left(self, plan: Plan) -> list[int]:
        """Return what is left of each limit, as the store reports it."""
        (answer,) = await self.denials.spend([self.denials.prepare(look(plan))])
        assert isinstance(answer, StoreResult), answer
        return [reading.left for reading in answer.readings]

    async def warm(self, plan: Plan, admitted: int, calls: int = 5) -> None:
        """Make `admitted` calls, so that the counter is leased and has hits available."""
        for _ in range(admitted // calls):
            assert not any(answer.denied for answer in await self.ask(plan, calls))
            await asyncio.sleep(0.001)
        assert self.available > 0

    @property
    def available(self) -> int:
        return dict(self.leases.gauges())["ratelimit.leases.available_hits"]


@asynccontextmanager
async def replica(servers: RedisServers) -> AsyncIterator[Replica]:
    options = RedisOptions(timeout_s=5)
    store = redis_store(servers, None, options)
    denials = DenialCache(store, 2**20, skip_over_limit_charges=False)
    listener = InvalidationListener(str(servers), store.realms[0].pubsub_connect(), options.channel, denials)
    leases = LeasingStore(denials)
    await store.start()
    listener.start()
    try:
        async with asyncio.timeout(SOON_S):
            while not listener.connected:
                await asyncio.sleep(0.001)
        yield Replica(leases, denials)
    finally:
        await listener.close()
        await leases.close()


def plan_of(*limits: tuple[bytes, Limit, bool], cost: int = 1, lease_us: int = LEASE_US) -> Plan:
    """Return a call with a descriptor for each of these keys, hot or not."""
    descriptor_plans = []
    for _, limit, hot in limits:
        rule = Rule("path", (limit,), charge=Charge.ADMITTED, hot=LeasePolicy(lease_us) if hot else None)
        descriptor_plans.append(DescriptorPlan(rule, (Step(limit, cost, Charge.ADMITTED),), cost))
    steps = tuple(step for descriptor_plan in descriptor_plans for step in descriptor_plan.steps)
    return Plan(PlanTemplate("domain", True, steps, tuple(descriptor_plans)), tuple(key for key, _, _ in limits))


def look(plan: Plan) -> Plan:
    keyed = zip(plan.keys, plan.template.steps, strict=True)
    return plan_of(*((key, step.limit, False) for key, step in keyed), cost=0)


def yearly(requests: int, algorithm: Algorithm = Algorithm.FIXED_WINDOW) -> Limit:
    return Limit(requests, Unit.YEAR, algorithm, requests if algorithm.has_burst else 0)


def at(server: RedisServer) -> RedisServers:
    return RedisServers("single", (RedisAddress("127.0.0.1", server.port),))


async def test_a_hot_key_is_leased_and_unused_hits_are_refunded_at_the_end(
    redis_server: RedisServer,
) -> None:
    plan = plan_of((b"{hot}", yearly(10_000), True))
    async with replica(at(redis_server)) as other:
        async with replica(at(redis_server)) as one:
            before = redis_server.script_runs()
            await one.warm(plan, admitted=500)
            assert redis_server.script_runs() - before < 25
            assert (await other.left(plan))[0] < 9_500
        assert await other.left(plan) == [9_500]


async def test_an_idle_lease_expires_by_itself(any_redis: RedisServer) -> None:
    plan = plan_of((b"{hot}", yearly(10_000, Algorithm.TOKEN_BUCKET), True))
    async with replica(at(any_redis)) as one:
        await one.warm(plan, admitted=500)
        begun_s = time.monotonic()
        while (await one.left(plan))[0] < 9_500:
            assert time.monotonic() < begun_s + SOON_S
            await asyncio.sleep(0.005)
        assert one.available == 0


async def test_a_refund_by_one_process_ends_denials_in_another(any_redis: RedisServer) -> None:
    # The other process has to be denied before the lease ends: a tenth of a second was too short on a busy machine.
    plan = plan_of((b"{hot}", yearly(600), True), lease_us=10 * LEASE_US)
    async with replica(at(any_redis)) as one, replica(at(any_redis)) as other:
        await one.warm(plan, admitted=200)
        in_hand = one.available
        admitted = 0
        while not (answers := await other.ask(plan))[0].denied:
            admitted += 1
        while one.available and not answers[0].remembered:
            answers = await other.ask(plan)  # until the denial is cached here
        async with asyncio.timeout(SOON_S):
            while (await other.ask(plan))[0].denied:
                await asyncio.sleep(0.001)
        admitted += 1
        while not (await other.ask(plan))[0].denied:
            admitted += 1
        assert in_hand > 0
        assert 200 + admitted == 600


@pytest.mark.slow
async def test_the_remainder_of_a_call_goes_to_its_cluster_node() -> None:
    wide, narrow = yearly(10_000), yearly(100)
    both = plan_of((b"{all}", wide, True), (b"{user}", narrow, False))
    with RedisCluster() as cluster:
        addresses = tuple(RedisAddress("127.0.0.1", node.port) for node in cluster.nodes)
        async with replica(RedisServers("cluster", addresses)) as one:
            admitted = denied = 0
            for _ in range(100):
                answers = await one.ask(both, 3)
                admitted += sum(not answer.denied for answer in answers)
                denied += sum(answer.denied for answer in answers)
                await asyncio.sleep(0.001)
            assert (admitted, denied) == (100, 200)
            async with asyncio.timeout(SOON_S):
                while await one.left(both) != [9_900, 0]:
                    await asyncio.sleep(0.01)
