"""Refusals remembered in one process while others give back, against real servers."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from pydantic import SecretStr

from ratelimit_rls.core.model import Algorithm, Answer, Plan, Unit
from ratelimit_rls.settings.redis_address import RedisAddress, RedisServers
from ratelimit_rls.store.denials import Denials
from ratelimit_rls.store.redis import listener as listener_module
from ratelimit_rls.store.redis.new import InRedis, redis_store
from ratelimit_rls.store.redis.news import News
from ratelimit_rls.store.redis.node import Terms
from tests.redis_servers import RedisCluster, RedisSentinels
from tests.servers import RedisServer
from tests.stores import Asked, call, step

SOON_S = 5.0
"""For what takes milliseconds, on a busy machine."""


@dataclass(frozen=True)
class Replica:
    """What one process of the service has of this: all of them on the same servers."""

    store: InRedis
    denials: Denials
    news: News

    async def ask(self, plan: Plan) -> Answer:
        (answer,) = await self.denials.spend([self.denials.prepare(plan)])
        assert isinstance(answer, Answer), answer
        return answer

    async def refused(self, plan: Plan) -> Answer:
        """Until that is remembered; returns what is told then."""
        for _ in range(100):
            answer = await self.ask(plan)
            if answer.remembered:
                return answer
        raise AssertionError("no refusal was remembered")

    def gauge(self, name: str) -> int:
        return dict(self.denials.gauges())[f"ratelimit.denials.{name}"]


@asynccontextmanager
async def replica(servers: RedisServers, timeout_s: float = 5.0) -> AsyncIterator[Replica]:
    told: list[Callable[[bool], None]] = []
    terms = Terms(timeout_s=timeout_s, key_prefix=b"edge:", on_connection=lambda up: [tell(up) for tell in told])
    store = redis_store(servers, None, terms)
    denials = Denials(store, 2**20, as_the_reference=False)
    news = News(str(servers), store.realms[0].connect_to_listen(), terms.channel, denials, timeout_s=timeout_s)
    await store.start()
    told.append(news.store_connection)
    news.start()
    try:
        await until(lambda: news.connected)
        yield Replica(store, denials, news)
    finally:
        await news.close()
        await denials.close()


async def until(holds: Callable[[], bool], timeout_s: float = SOON_S) -> float:
    """How long it took."""
    begun = time.monotonic()
    while not holds():
        assert time.monotonic() < begun + timeout_s, "it did not come to pass"
        await asyncio.sleep(0.001)
    return time.monotonic() - begun


def single(server: RedisServer, **more: object) -> RedisServers:
    return RedisServers("single", (RedisAddress("127.0.0.1", server.port, **more),))  # type: ignore[arg-type]


def evalshas(*servers: RedisServer) -> int:
    stats = [server.cli("INFO", "commandstats").get("cmdstat_evalsha", {"calls": 0}) for server in servers]
    return sum(int(stat["calls"]) for stat in stats)


def tell(line: str) -> None:
    print(f"\n{line}", file=sys.stderr)


async def hammer(one: Replica, plan: Plan, *servers: RedisServer) -> None:
    """A refused client asks without a pause until just before its time, and then once more when it has come."""
    answer, sent_s = None, 0.0
    while answer is None or not answer.refused:
        sent_s = time.monotonic()
        answer = await one.ask(plan)
    holds_s = answer.readings[0].retry_us / 1e6
    safe_s = sent_s + holds_s * 0.9995  # the store decided after it was sent
    before, calls, asked = evalshas(*servers), 0, 0
    while time.monotonic() < safe_s - 0.002 and not asked:
        answer = await one.ask(plan)
        calls, asked = calls + answer.remembered, int(not answer.remembered)
    assert not asked or time.monotonic() >= safe_s, answer  # the machine may have been busy before it was asked
    assert evalshas(*servers) == before + asked
    tell(f"{calls:,} refused calls in {holds_s:.3f} s: no call of Redis")
    if answer.refused:
        await asyncio.sleep(answer.readings[0].retry_us / 1e6)
        answer = await one.ask(plan)
        asked += 1
    assert not answer.refused, answer
    assert evalshas(*servers) == before + asked


async def test_who_is_refused_and_hammers_costs_nothing_and_is_admitted_on_the_first_try(
    redis_server: RedisServer,
) -> None:
    async with replica(single(redis_server)) as one:
        await hammer(one, call(step(limit=5, unit=Unit.SECOND, algorithm=Algorithm.GCRA, burst=1)), redis_server)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", list(Algorithm), ids=lambda algorithm: algorithm.value)
async def test_with_every_algorithm_again_and_again(redis_server: RedisServer, algorithm: Algorithm) -> None:
    async with replica(single(redis_server)) as one:
        for key in "ab":
            await hammer(one, call(step(key, 2, unit=Unit.SECOND, algorithm=algorithm, burst=2)), redis_server)


@pytest.mark.parametrize("how", ["reset", "refund"])
async def test_what_another_process_gives_back_ends_it_everywhere(redis_server: RedisServer, how: str) -> None:
    plan = call(step(limit=1, unit=Unit.HOUR))
    async with (
        replica(single(redis_server)) as one,
        replica(single(redis_server)) as two,
        replica(single(redis_server)) as third,
    ):
        await one.refused(plan)
        await two.refused(plan)
        if how == "reset":
            assert await third.store.forget([plan.keys[0]]) == [plan.keys[0]]
        else:
            await third.ask(call(step(limit=1, unit=Unit.HOUR, cost=-1)))
        took_s = await until(lambda: one.gauge("remembered") == two.gauge("remembered") == 0)
        tell(f"a {how} elsewhere was heard of within {took_s * 1000:.1f} ms of its answer")
        assert not (await one.ask(plan)).refused
        assert not (await two.ask(plan)).remembered  # it is another's again


async def test_a_process_that_does_not_hear_remembers_nothing(redis_server: RedisServer) -> None:
    plan = call(step(limit=1, unit=Unit.HOUR))
    async with replica(single(redis_server)) as one:
        await one.refused(plan)
        redis_server.cli("CLIENT", "KILL", "TYPE", "pubsub")
        await until(lambda: one.gauge("remembered") == 0)
        assert one.gauge("forgotten") == 1
        await until(lambda: one.news.connected)
        assert not (await one.ask(plan)).remembered
        assert (await one.ask(plan)).remembered


async def test_while_it_cannot_listen_it_remembers_nothing(any_redis: RedisServer) -> None:
    plan = call(step(limit=1, unit=Unit.HOUR))
    async with replica(single(any_redis)) as one:
        await one.refused(plan)
        try:
            any_redis.cli("ACL", "SETUSER", "default", "resetchannels")
            any_redis.cli("CLIENT", "KILL", "TYPE", "pubsub")
            await until(lambda: not one.news.connected and one.gauge("remembered") == 0)
            for _ in range(20):
                assert not (await one.ask(plan)).remembered
        finally:
            any_redis.cli("ACL", "SETUSER", "default", "allchannels")
        await until(lambda: one.news.connected)
        await one.refused(plan)


async def test_nothing_is_remembered_after_the_news_is_closed(any_redis: RedisServer) -> None:
    plan = call(step(limit=1, unit=Unit.HOUR))
    async with replica(single(any_redis)) as one:
        await one.refused(plan)
        await one.news.close()
        assert one.gauge("remembered") == 0
        for _ in range(2):
            assert not (await one.ask(plan)).remembered


async def test_a_connection_on_which_nothing_can_come_any_more_is_noticed(
    any_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener_module, "PING_EVERY_S", 0.02)
    plan = call(step(limit=1, unit=Unit.HOUR))
    async with replica(single(any_redis), timeout_s=0.1) as one:
        await one.refused(plan)
        await asyncio.sleep(0.06)  # signs are asked for and given meanwhile
        assert (await one.ask(plan)).remembered
        any_redis.pause()
        await until(lambda: one.gauge("remembered") == 0)
        any_redis.resume()
        await until(lambda: one.news.connected and one.store.connected)
        await one.refused(plan)


async def test_when_the_store_loses_its_connection_all_is_forgotten(any_redis: RedisServer) -> None:
    """It may be connected to another server next, whose news the listener of the old one would not hear."""
    plan = call(step(limit=1, unit=Unit.HOUR))
    async with replica(single(any_redis)) as one:
        await one.refused(plan)
        any_redis.cli("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        await until(lambda: one.gauge("remembered") == 0)
        await until(lambda: one.news.connected and one.store.connected)
        await one.refused(plan)


@pytest.mark.parametrize("may_not", ["resetchannels", "-publish"])
async def test_a_user_that_may_not_use_the_channel_remembers_nothing(any_redis: RedisServer, may_not: str) -> None:
    rights = ["on", ">hush", "~*", "&*", "+@all", may_not]
    any_redis.cli("ACL", "SETUSER", "limiter", *rights)
    servers = single(any_redis, username="limiter", password=SecretStr("hush"))
    plan = call(step(limit=1, unit=Unit.HOUR))
    store = redis_store(servers, None, Terms())
    denials = Denials(store, 2**20, as_the_reference=False)
    news = News(str(servers), store.realms[0].connect_to_listen(), Terms().channel, denials)
    await store.start()
    news.start()
    try:
        one = Replica(store, denials, news)
        for _ in range(50):
            assert not (await one.ask(plan)).remembered
            await asyncio.sleep(0.002)
        assert not news.connected
    finally:
        await news.close()
        await denials.close()
        any_redis.cli("ACL", "DELUSER", "limiter")


async def test_news_of_other_prefixes_and_odd_messages_mean_nothing(any_redis: RedisServer) -> None:
    plan = call(step(limit=1, unit=Unit.HOUR))
    async with replica(single(any_redis)) as one:
        await one.refused(plan)
        for channel, message in [("rl:freed", plan.keys[0]), ("edge:rl:freed", b""), ("edge:rl:freed", b"\n\xff\n")]:
            any_redis.cli("PUBLISH", channel, message)
        any_redis.cli("PUBLISH", "edge:rl:freed", b"last")
        await asyncio.sleep(0.01)
        assert (await one.ask(plan)).remembered
        any_redis.cli("PUBLISH", "edge:rl:freed", b"another\n" + plan.keys[0])
        await until(lambda: one.gauge("remembered") == 0)


def on_each_node(cluster: RedisCluster, limits: list[int]) -> list[Asked]:
    found: dict[int, Asked] = {}
    for number in range(1000):
        one = step(f"k{number}", limits[min(len(found), len(limits) - 1)], unit=Unit.HOUR)
        found.setdefault(cluster.node_of(one.key).port, one)
        if len(found) == len(limits):
            return list(found.values())
    raise AssertionError("some node has no slots")


@pytest.mark.slow
async def test_on_a_cluster() -> None:
    """What a refused call is given back on other nodes does not end its own refusal; what is freed does."""
    with RedisCluster() as cluster:
        servers = RedisServers("cluster", tuple(RedisAddress("127.0.0.1", node.port) for node in cluster.nodes))
        asked = on_each_node(cluster, [9, 9, 1])
        plan = call(*asked)
        async with replica(servers) as one, replica(servers) as two:
            await one.refused(plan)
            await two.refused(plan)
            await asyncio.sleep(0.2)  # all that was to be given back is
            before = evalshas(*cluster.nodes)
            for _ in range(1000):
                assert (await one.ask(plan)).remembered
            assert evalshas(*cluster.nodes) == before
            await two.store.forget([asked[2].key])
            took_s = await until(lambda: one.gauge("remembered") == two.gauge("remembered") == 0)
            tell(f"cluster: heard of within {took_s * 1000:.1f} ms")
            assert not (await one.ask(plan)).refused

            quick = call(step(limit=5, unit=Unit.SECOND, algorithm=Algorithm.GCRA, burst=1))
            await hammer(one, quick, *cluster.nodes)


@pytest.mark.slow
async def test_after_a_failover_the_new_masters_news_is_heard() -> None:
    with RedisSentinels() as sentinels:
        servers = RedisServers(
            "sentinel",
            tuple(RedisAddress("127.0.0.1", sentinel.port) for sentinel in sentinels.sentinels),
            master=sentinels.name,
            data=RedisAddress(),
        )
        plan = call(step(limit=1, unit=Unit.HOUR))
        async with replica(servers) as one, replica(servers) as two:
            await one.refused(plan)
            gone = sentinels.kill_master()
            await until(lambda: one.gauge("remembered") == 0)
            await asyncio.to_thread(sentinels.wait_for_another, gone)
            await until(lambda: all(each.store.connected and each.news.connected for each in (one, two)), 20)
            await one.refused(plan)
            await two.store.forget([plan.keys[0]])
            await until(lambda: one.gauge("remembered") == 0)
