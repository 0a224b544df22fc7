"""Leases on real servers: what they spare, what they give back, and who hears of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from ratelimit_rls.core.model import Algorithm, Answer, Charge, Hot, Limit, Outline, Plan, Rule, Slot, Step, Unit
from ratelimit_rls.errors import StoreError
from ratelimit_rls.settings.redis_address import RedisAddress, RedisServers
from ratelimit_rls.store.denials import Denials
from ratelimit_rls.store.leases import Leases
from ratelimit_rls.store.redis.new import redis_store
from ratelimit_rls.store.redis.news import News
from ratelimit_rls.store.redis.node import Terms
from tests.redis_servers import RedisCluster
from tests.servers import RedisServer

SOON_S = 5.0
"""For what takes milliseconds, on a busy machine."""

LEASE_US = 100_000


@dataclass(frozen=True)
class Replica:
    leases: Leases
    denials: Denials

    async def ask(self, plan: Plan, calls: int = 1) -> list[Answer]:
        answers = await self.leases.spend([self.leases.prepare(plan)] * calls)
        assert not any(isinstance(answer, StoreError) for answer in answers), answers
        return answers  # type: ignore[return-value]

    async def left(self, plan: Plan) -> list[int]:
        """By the servers' account."""
        (answer,) = await self.denials.spend([self.denials.prepare(look(plan))])
        assert isinstance(answer, Answer), answer
        return [reading.left for reading in answer.readings]

    async def warm(self, plan: Plan, admitted: int, calls: int = 5) -> None:
        """Until it is served from hand, and some is left there; `admitted` of them in all."""
        for _ in range(admitted // calls):
            assert not any(answer.refused for answer in await self.ask(plan, calls))
            await asyncio.sleep(0.001)
        assert self.in_hand > 0

    @property
    def in_hand(self) -> int:
        return dict(self.leases.gauges())["ratelimit.leases.hits_in_hand"]


@asynccontextmanager
async def replica(servers: RedisServers) -> AsyncIterator[Replica]:
    terms = Terms(timeout_s=5)
    store = redis_store(servers, None, terms)
    denials = Denials(store, 2**20, as_the_reference=False)
    news = News(str(servers), store.realms[0].connect_to_listen(), terms.channel, denials)
    leases = Leases(denials)
    await store.start()
    news.start()
    try:
        async with asyncio.timeout(SOON_S):
            while not news.connected:
                await asyncio.sleep(0.001)
        yield Replica(leases, denials)
    finally:
        await news.close()
        await leases.close()


def plan_of(*limits: tuple[bytes, Limit, bool], cost: int = 1) -> Plan:
    """A call with a descriptor for each of these keys, hot or not."""
    slots = []
    for _, limit, hot in limits:
        rule = Rule("path", (limit,), charge=Charge.ADMITTED, hot=Hot(LEASE_US) if hot else None)
        slots.append(Slot(rule, (Step(limit, cost, Charge.ADMITTED),), cost))
    steps = tuple(step for slot in slots for step in slot.steps)
    return Plan(Outline("domain", True, steps, tuple(slots)), tuple(key for key, _, _ in limits))


def look(plan: Plan) -> Plan:
    keyed = zip(plan.keys, plan.outline.steps, strict=True)
    return plan_of(*((key, step.limit, False) for key, step in keyed), cost=0)


def hourly(requests: int, algorithm: Algorithm = Algorithm.FIXED_WINDOW) -> Limit:
    return Limit(requests, Unit.HOUR, algorithm, requests if algorithm.has_burst else 0)


def at(server: RedisServer) -> RedisServers:
    return RedisServers("single", (RedisAddress("127.0.0.1", server.port),))


def scripts_run(server: RedisServer) -> int:
    return int(server.cli("INFO", "commandstats").get("cmdstat_evalsha", {"calls": 0})["calls"])


async def test_a_hot_key_is_moved_now_and_then_and_what_is_unused_comes_back_at_the_end(
    redis_server: RedisServer,
) -> None:
    plan = plan_of((b"{hot}", hourly(10_000), True))
    async with replica(at(redis_server)) as other:
        async with replica(at(redis_server)) as one:
            before = scripts_run(redis_server)
            await one.warm(plan, admitted=500)
            assert scripts_run(redis_server) - before < 25
            assert (await other.left(plan))[0] < 9_500
        assert await other.left(plan) == [9_500]


async def test_a_lease_that_nobody_asks_for_ends_by_itself(any_redis: RedisServer) -> None:
    plan = plan_of((b"{hot}", hourly(10_000, Algorithm.TOKEN_BUCKET), True))
    async with replica(at(any_redis)) as one:
        await one.warm(plan, admitted=500)
        begun_s = time.monotonic()
        while (await one.left(plan))[0] < 9_500:
            assert time.monotonic() < begun_s + SOON_S
            await asyncio.sleep(0.005)
        assert one.in_hand == 0


async def test_who_was_refused_hears_of_what_another_process_gives_back(any_redis: RedisServer) -> None:
    plan = plan_of((b"{hot}", hourly(600), True))
    async with replica(at(any_redis)) as one, replica(at(any_redis)) as other:
        await one.warm(plan, admitted=200)
        in_hand = one.in_hand
        admitted = 0
        while not (answers := await other.ask(plan))[0].refused:
            admitted += 1
        while one.in_hand and not answers[0].remembered:
            answers = await other.ask(plan)  # until the refusal is known here
        async with asyncio.timeout(SOON_S):
            while (await other.ask(plan))[0].refused:
                await asyncio.sleep(0.001)
        admitted += 1
        while not (await other.ask(plan))[0].refused:
            admitted += 1
        assert in_hand > 0
        assert 200 + admitted == 600


@pytest.mark.slow
async def test_on_a_cluster_the_rest_of_a_call_is_asked_where_it_lives() -> None:
    wide, narrow = hourly(10_000), hourly(100)
    both = plan_of((b"{all}", wide, True), (b"{user}", narrow, False))
    with RedisCluster() as cluster:
        addresses = tuple(RedisAddress("127.0.0.1", node.port) for node in cluster.nodes)
        async with replica(RedisServers("cluster", addresses)) as one:
            admitted = refused = 0
            for _ in range(100):
                answers = await one.ask(both, 3)
                admitted += sum(not answer.refused for answer in answers)
                refused += sum(answer.refused for answer in answers)
                await asyncio.sleep(0.001)
            assert (admitted, refused) == (100, 200)
            async with asyncio.timeout(SOON_S):
                while await one.left(both) != [9_900, 0]:
                    await asyncio.sleep(0.01)
