"""Denial caches of several processes on real servers, and invalidation by refunds."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from pydantic import SecretStr

from ratelimit_rls.core.model import Algorithm, Plan, StoreResult, Unit
from ratelimit_rls.settings.redis_address import RedisAddress, RedisServers
from ratelimit_rls.store.denial_cache import DenialCache
from ratelimit_rls.store.redis import pubsub as listener_module
from ratelimit_rls.store.redis.factory import AnyRedisStore, redis_store
from ratelimit_rls.store.redis.pubsub import InvalidationListener
from ratelimit_rls.store.redis.script_node import RedisOptions
from tests.support.redis_servers import RedisCluster, RedisSentinels
from tests.support.servers import RedisServer
from tests.support.stores import KeyedOp, call, long_step, step

SOON_S = 5.0
"""Timeout for events that take milliseconds, on a busy machine."""


@dataclass(frozen=True)
class Replica:
    """The store of one process; all replicas use the same servers."""

    store: AnyRedisStore
    denials: DenialCache
    listener: InvalidationListener

    async def ask(self, plan: Plan) -> StoreResult:
        (answer,) = await self.denials.spend([self.denials.prepare(plan)])
        assert isinstance(answer, StoreResult), answer
        return answer

    async def denied(self, plan: Plan) -> StoreResult:
        """Call until the denial is cached, and return it."""
        for _ in range(100):
            answer = await self.ask(plan)
            if answer.remembered:
                return answer
        raise AssertionError("no denial was remembered")

    def gauge(self, name: str) -> int:
        return dict(self.denials.gauges())[f"ratelimit.denial_cache.{name}"]


@asynccontextmanager
async def replica(servers: RedisServers, timeout_s: float = 5.0) -> AsyncIterator[Replica]:
    subscribers: list[Callable[[bool], None]] = []
    options = RedisOptions(
        timeout_s=timeout_s,
        key_prefix=b"edge:",
        on_connection=lambda up: [report(up) for report in subscribers],  # type: ignore[arg-type]
    )
    store = redis_store(servers, None, options)
    denials = DenialCache(store, 2**20, skip_over_limit_charges=False)
    listener = InvalidationListener(
        str(servers), store.realms[0].pubsub_connect(), options.channel, denials, timeout_s=timeout_s
    )
    await store.start()
    subscribers.append(listener.on_store_connection)
    listener.start()
    try:
        await until(lambda: listener.connected)
        yield Replica(store, denials, listener)
    finally:
        await listener.close()
        await denials.close()


async def until(holds: Callable[[], bool], timeout_s: float = SOON_S) -> float:
    """Return how long it took."""
    begun = time.monotonic()
    while not holds():
        assert time.monotonic() < begun + timeout_s, "it did not come to pass"
        await asyncio.sleep(0.001)
    return time.monotonic() - begun


def single(server: RedisServer, **more: object) -> RedisServers:
    return RedisServers("single", (RedisAddress("127.0.0.1", server.port, **more),))  # type: ignore[arg-type]


def script_runs(*servers: RedisServer) -> int:
    return sum(server.script_runs() for server in servers)


def report(line: str) -> None:
    print(f"\n{line}", file=sys.stderr)


async def hammer(one: Replica, plan: Plan, *servers: RedisServer) -> None:
    """A denied client calls without a pause until just before the denial ends, and once more when it has."""
    answer, sent_s = None, 0.0
    while answer is None or not answer.denied:
        sent_s = time.monotonic()
        answer = await one.ask(plan)
    holds_s = answer.readings[0].retry_us / 1e6
    safe_s = sent_s + holds_s * 0.9995  # the store decided after the request was sent
    before, calls, from_store = script_runs(*servers), 0, 0
    while time.monotonic() < safe_s - 0.002 and not from_store:
        answer = await one.ask(plan)
        calls, from_store = calls + answer.remembered, int(not answer.remembered)
    assert not from_store or time.monotonic() >= safe_s, answer  # the machine may have been busy before the request
    assert script_runs(*servers) == before + from_store
    report(f"{calls:,} denied calls in {holds_s:.3f} s: no call of Redis")
    if answer.denied:
        await asyncio.sleep(answer.readings[0].retry_us / 1e6)
        answer = await one.ask(plan)
        from_store += 1
    assert not answer.denied, answer
    assert script_runs(*servers) == before + from_store


async def test_a_denied_client_causes_no_calls_and_is_then_admitted_on_the_first_try(
    redis_server: RedisServer,
) -> None:
    async with replica(single(redis_server)) as one:
        await hammer(one, call(step(limit=5, unit=Unit.SECOND, algorithm=Algorithm.GCRA, burst=1)), redis_server)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", list(Algorithm), ids=lambda algorithm: algorithm.value)
async def test_denials_are_cached_repeatedly_with_every_algorithm(
    redis_server: RedisServer, algorithm: Algorithm
) -> None:
    async with replica(single(redis_server)) as one:
        for key in "ab":
            await hammer(one, call(step(key, 2, unit=Unit.SECOND, algorithm=algorithm, burst=2)), redis_server)


@pytest.mark.parametrize("how", ["reset", "refund"])
async def test_a_refund_by_another_process_ends_the_denial_everywhere(redis_server: RedisServer, how: str) -> None:
    plan = call(long_step(limit=1))
    async with (
        replica(single(redis_server)) as one,
        replica(single(redis_server)) as two,
        replica(single(redis_server)) as third,
    ):
        await one.denied(plan)
        await two.denied(plan)
        if how == "reset":
            assert await third.store.forget([plan.keys[0]]) == [plan.keys[0]]
        else:
            await third.ask(call(long_step(limit=1, cost=-1)))
        took_s = await until(lambda: one.gauge("entries") == two.gauge("entries") == 0)
        report(f"a {how} elsewhere was heard of within {took_s * 1000:.1f} ms of its answer")
        assert not (await one.ask(plan)).denied
        assert not (await two.ask(plan)).remembered  # another client has used it again


async def test_a_process_without_a_subscription_caches_nothing(redis_server: RedisServer) -> None:
    plan = call(long_step(limit=1))
    async with replica(single(redis_server)) as one:
        await one.denied(plan)
        redis_server.cli("CLIENT", "KILL", "TYPE", "pubsub")
        await until(lambda: one.gauge("entries") == 0)
        assert one.gauge("invalidations") == 1
        await until(lambda: one.listener.connected)
        assert not (await one.ask(plan)).remembered
        assert (await one.ask(plan)).remembered


async def test_nothing_is_cached_while_the_subscription_is_lost(any_redis: RedisServer) -> None:
    plan = call(long_step(limit=1))
    async with replica(single(any_redis)) as one:
        await one.denied(plan)
        try:
            any_redis.cli("ACL", "SETUSER", "default", "resetchannels")
            any_redis.cli("CLIENT", "KILL", "TYPE", "pubsub")
            await until(lambda: not one.listener.connected and one.gauge("entries") == 0)
            for _ in range(20):
                assert not (await one.ask(plan)).remembered
        finally:
            any_redis.cli("ACL", "SETUSER", "default", "allchannels")
        await until(lambda: one.listener.connected)
        await one.denied(plan)


async def test_nothing_is_cached_after_the_listener_is_closed(any_redis: RedisServer) -> None:
    plan = call(long_step(limit=1))
    async with replica(single(any_redis)) as one:
        await one.denied(plan)
        await one.listener.close()
        assert one.gauge("entries") == 0
        for _ in range(2):
            assert not (await one.ask(plan)).remembered


async def test_a_dead_subscription_is_detected(any_redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "PING_INTERVAL_S", 0.02)
    plan = call(long_step(limit=1))
    async with replica(single(any_redis), timeout_s=0.1) as one:
        await one.denied(plan)
        await asyncio.sleep(0.06)  # pings are answered meanwhile
        assert (await one.ask(plan)).remembered
        any_redis.pause()
        await until(lambda: one.gauge("entries") == 0)
        any_redis.resume()
        await until(lambda: one.listener.connected and one.store.connected)
        await one.denied(plan)


async def test_all_denials_are_dropped_when_the_store_loses_its_connection(any_redis: RedisServer) -> None:
    """The next server may be another one, whose messages a subscriber of the old one would not receive."""
    plan = call(long_step(limit=1))
    async with replica(single(any_redis)) as one:
        await one.denied(plan)
        any_redis.cli("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        await until(lambda: one.gauge("entries") == 0)
        await until(lambda: one.listener.connected and one.store.connected)
        await one.denied(plan)


@pytest.mark.parametrize("may_not", ["resetchannels", "-publish"])
async def test_a_user_without_channel_permissions_caches_nothing(any_redis: RedisServer, may_not: str) -> None:
    rights = ["on", ">hush", "~*", "&*", "+@all", may_not]
    any_redis.cli("ACL", "SETUSER", "limiter", *rights)
    servers = single(any_redis, username="limiter", password=SecretStr("hush"))
    plan = call(long_step(limit=1))
    store = redis_store(servers, None, RedisOptions())
    denials = DenialCache(store, 2**20, skip_over_limit_charges=False)
    listener = InvalidationListener(str(servers), store.realms[0].pubsub_connect(), RedisOptions().channel, denials)
    await store.start()
    listener.start()
    try:
        one = Replica(store, denials, listener)
        for _ in range(50):
            assert not (await one.ask(plan)).remembered
            await asyncio.sleep(0.002)
        assert not listener.connected
    finally:
        await listener.close()
        await denials.close()
        any_redis.cli("ACL", "DELUSER", "limiter")


async def test_messages_of_other_prefixes_and_odd_messages_are_ignored(any_redis: RedisServer) -> None:
    plan = call(long_step(limit=1))
    async with replica(single(any_redis)) as one:
        await one.denied(plan)
        for channel, message in [("rl:freed", plan.keys[0]), ("edge:rl:freed", b""), ("edge:rl:freed", b"\n\xff\n")]:
            any_redis.cli("PUBLISH", channel, message)
        any_redis.cli("PUBLISH", "edge:rl:freed", b"last")
        await asyncio.sleep(0.01)
        assert (await one.ask(plan)).remembered
        any_redis.cli("PUBLISH", "edge:rl:freed", b"another\n" + plan.keys[0])
        await until(lambda: one.gauge("entries") == 0)


def on_each_node(cluster: RedisCluster, limits: list[int]) -> list[KeyedOp]:
    found: dict[int, KeyedOp] = {}
    for number in range(1000):
        one = long_step(f"k{number}", limits[min(len(found), len(limits) - 1)])
        found.setdefault(cluster.node_of(one.key).port, one)
        if len(found) == len(limits):
            return list(found.values())
    raise AssertionError("some node has no slots")


@pytest.mark.slow
async def test_denials_on_a_cluster() -> None:
    """A denied call's refunds on other nodes do not end its own denial; freeing the denying counter does."""
    with RedisCluster() as cluster:
        servers = RedisServers("cluster", tuple(RedisAddress("127.0.0.1", node.port) for node in cluster.nodes))
        from_store = on_each_node(cluster, [9, 9, 1])
        plan = call(*from_store)
        async with replica(servers) as one, replica(servers) as two:
            await one.denied(plan)
            await two.denied(plan)
            await asyncio.sleep(0.2)  # all refunds have happened
            before = script_runs(*cluster.nodes)
            for _ in range(1000):
                assert (await one.ask(plan)).remembered
            assert script_runs(*cluster.nodes) == before
            await two.store.forget([from_store[2].key])
            took_s = await until(lambda: one.gauge("entries") == two.gauge("entries") == 0)
            report(f"cluster: heard of within {took_s * 1000:.1f} ms")
            assert not (await one.ask(plan)).denied

            quick = call(step(limit=5, unit=Unit.SECOND, algorithm=Algorithm.GCRA, burst=1))
            await hammer(one, quick, *cluster.nodes)


@pytest.mark.slow
async def test_invalidations_of_the_new_master_arrive_after_a_failover() -> None:
    with RedisSentinels() as sentinels:
        servers = RedisServers(
            "sentinel",
            tuple(RedisAddress("127.0.0.1", sentinel.port) for sentinel in sentinels.sentinels),
            master=sentinels.name,
            data=RedisAddress(),
        )
        plan = call(long_step(limit=1))
        async with replica(servers) as one, replica(servers) as two:
            await one.denied(plan)
            killed = sentinels.kill_master()
            await until(lambda: one.gauge("entries") == 0)
            await asyncio.to_thread(sentinels.wait_for_another, killed)
            await until(lambda: all(each.store.connected and each.listener.connected for each in (one, two)), 20)
            await one.denied(plan)
            await two.store.forget([plan.keys[0]])
            await until(lambda: one.gauge("entries") == 0)
