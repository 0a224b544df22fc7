"""Metrics of the nodes of Redis, and what happens if a node does not report any."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from pydantic import SecretStr
from structlog.testing import capture_logs

from ratelimit_rls.core.model import Algorithm, StoreResult
from ratelimit_rls.settings.redis_address import RedisAddress, RedisServers
from ratelimit_rls.store.redis import server_sampler
from ratelimit_rls.store.redis.factory import AnyRedisStore, redis_store
from ratelimit_rls.store.redis.script_node import RedisOptions
from ratelimit_rls.store.redis.server_sampler import ServerSampler
from ratelimit_rls.telemetry import instruments
from ratelimit_rls.telemetry.instruments import REDIS_DURATION, Instrument
from ratelimit_rls.telemetry.series import Distribution, Value
from tests.support.redis_servers import SLOTS, RedisCluster, RedisSentinels
from tests.support.servers import RedisServer
from tests.support.stores import call, step

MIB = 2**20


class Observed:
    """A store with its sampler, whose clock stands still."""

    def __init__(self, store: AnyRedisStore) -> None:
        self.store = store
        self.now_s = 0.0
        self.sampler = ServerSampler(store.realms, 15.0, clock=lambda: self.now_s)

    async def spend(self, times: int = 1, *keys: str) -> None:
        for _ in range(times):
            plans = [self.store.prepare(call(step(key, 10**6, algorithm=Algorithm.GCRA))) for key in keys or ("k",)]
            results = await self.store.spend(plans)
            assert all(isinstance(result, StoreResult) for result in results), results

    def values(self, instrument: Instrument) -> dict[tuple[str, ...], Value]:
        """Return the values of a metric by their attributes."""
        return {attributes: value for (name, attributes), value in self.sampler.measured() if name == instrument.name}

    @property
    def names(self) -> set[str]:
        return {series.instrument for series, _ in self.sampler.measured()}


@asynccontextmanager
async def observed(servers: RedisServers, per_second: RedisServers | None = None) -> AsyncIterator[Observed]:
    store = redis_store(servers, per_second, RedisOptions())
    await store.start()
    try:
        yield Observed(store)
    finally:
        await store.close()


def single(server: RedisServer, **more: object) -> RedisServers:
    return RedisServers("single", (RedisAddress("127.0.0.1", server.port, **more),))  # type: ignore[arg-type]


async def test_metrics_of_every_server(redis_server: RedisServer) -> None:
    node = "127.0.0.1", str(redis_server.port)
    async with observed(single(redis_server)) as seen:
        await seen.sampler.sample()
        first = dict(seen.sampler.measured())
        assert instruments.REDIS_MEMORY_LIMIT.name not in seen.names  # maxmemory is 0
        assert instruments.REDIS_MEMORY_UTILIZATION.name not in seen.names
        assert seen.values(instruments.REDIS_MASTER) == {node: 1}
        assert seen.values(instruments.REDIS_REPLICAS) == {node: 0}
        assert not seen.values(instruments.REDIS_REPLICATION_LAG)
        assert not seen.values(instruments.REDIS_CLUSTER_SLOTS)
        assert {attributes[2:] for attributes in seen.values(instruments.REDIS_CPU_TIME)} == {("user",), ("system",)}

        used = int(redis_server.cli("INFO", "memory")["used_memory"])
        redis_server.cli("CONFIG", "SET", "maxmemory", used + 8 * MIB)
        try:
            await seen.spend(20)
            await seen.sampler.sample()
        finally:
            redis_server.cli("CONFIG", "SET", "maxmemory", 0)
        assert seen.values(instruments.REDIS_MEMORY_LIMIT) == {node: used + 8 * MIB}
        assert 0 < float(seen.values(instruments.REDIS_MEMORY_UTILIZATION)[node]) < 1  # type: ignore[arg-type]
        grown = {
            series.instrument: value - first[series]  # type: ignore[operator]
            for series, value in seen.sampler.measured()
            if isinstance(value, int) and series in first
        }
        assert grown[instruments.REDIS_COMMANDS.name] >= 20
        assert grown[instruments.REDIS_KEYSPACE_HITS.name] >= 19
        assert grown[instruments.REDIS_KEYSPACE_MISSES.name] >= 1
        (durations,) = seen.values(REDIS_DURATION).values()
        assert isinstance(durations, Distribution)
        assert sum(durations.counts) == 20


async def test_evicted_and_expired_keys_are_counted(any_redis: RedisServer) -> None:
    async with observed(single(any_redis)) as seen:
        await seen.sampler.sample()
        assert {*seen.values(instruments.REDIS_KEYS_EXPIRED).values()} == {
            any_redis.cli("INFO", "stats")["expired_keys"]
        }
        used = int(any_redis.cli("INFO", "memory")["used_memory"])
        any_redis.cli("CONFIG", "SET", "maxmemory-policy", "allkeys-random")
        any_redis.cli("CONFIG", "SET", "maxmemory", used + MIB)
        try:
            for n in range(40):
                any_redis.cli("SET", f"filler{n}", "x" * 100_000)
        finally:
            any_redis.cli("CONFIG", "SET", "maxmemory", 0)
            any_redis.cli("CONFIG", "SET", "maxmemory-policy", "noeviction")
        seen.now_s = 10.0
        await seen.sampler.sample()
        (evicted,) = seen.values(instruments.REDIS_KEYS_EVICTED).values()
        assert evicted == any_redis.cli("INFO", "stats")["evicted_keys"] > 0
        (report,) = seen.sampler.report()
        assert report.evicted_per_second is not None
        assert report.evicted_per_second > 0
        assert report.p95_ms is None  # no calls in between


async def test_user_without_info_causes_one_log_line_and_nothing_else(any_redis: RedisServer) -> None:
    any_redis.cli("ACL", "SETUSER", "blind", "reset", "on", ">pw", "~*", "&*", "+@all", "-info")
    servers = single(any_redis, username="blind", password=SecretStr("pw"))
    try:
        async with observed(servers) as seen:
            connections = any_redis.cli("INFO", "stats")["total_connections_received"]
            with capture_logs() as lines:
                for _ in range(5):  # without a success in between, which would end a row of errors
                    await seen.sampler.sample()
                await seen.spend()
            assert [(line["event"], line["log_level"]) for line in lines] == [("redis_info_unavailable", "warning")]
            assert f"Redis at 127.0.0.1:{any_redis.port} has no metrics: INFO returned" in lines[0]["error"]
            assert seen.names == {REDIS_DURATION.name}
            assert seen.sampler.report() == []
            # The errors of INFO do not count as errors of the server, so the connection is still the first one.
            own = any_redis.cli("INFO", "stats")["total_connections_received"] - connections
            assert own == 1, "the connection of this test's own INFO"

            any_redis.cli("ACL", "SETUSER", "blind", "+info")
            await seen.sampler.sample()
            assert instruments.REDIS_COMMANDS.name in seen.names
            any_redis.cli("ACL", "SETUSER", "blind", "-info")
            with capture_logs() as again:
                await seen.sampler.sample()
            assert [line["event"] for line in again] == ["redis_info_unavailable"]
    finally:
        any_redis.cli("ACL", "DELUSER", "blind")


async def test_metrics_of_a_server_that_is_away_end_and_return(any_redis: RedisServer) -> None:
    async with observed(single(any_redis)) as seen:
        await seen.sampler.sample()
        connection = seen.store.realms[0].nodes()[0].connection
        assert instruments.REDIS_COMMANDS.name in seen.names
        any_redis.kill()
        await _until(lambda: not connection.connected)
        assert seen.names == {REDIS_DURATION.name}
        with capture_logs() as lines:
            await seen.sampler.sample()
        assert lines == []  # the lost connection is logged where it is noticed
        assert seen.sampler.report() == []
        any_redis.flush()
        await _until(lambda: connection.connected)
        await seen.sampler.sample()
        assert instruments.REDIS_COMMANDS.name in seen.names


async def test_late_info_does_not_end_the_connection(any_redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_sampler, "QUERY_TIMEOUT_S", 0.05)
    async with observed(single(any_redis)) as seen:
        await seen.sampler.sample()
        any_redis.pause()
        try:
            with capture_logs() as lines:
                await seen.sampler.sample()
        finally:
            any_redis.resume()
        assert [line["event"] for line in lines] == ["redis_info_unavailable"]
        assert "did not answer within 0.05 s" in lines[0]["error"]
        assert seen.names == {REDIS_DURATION.name}
        assert seen.store.connected
        await seen.spend()  # its reply is not taken for that of INFO
        await seen.sampler.sample()
        assert instruments.REDIS_COMMANDS.name in seen.names


async def test_sampling_repeats_until_closed_and_never_with_an_interval_of_zero(any_redis: RedisServer) -> None:
    async with observed(single(any_redis)) as seen:
        often = ServerSampler(seen.store.realms, 0.001)
        never = ServerSampler(seen.store.realms, 0.0)
        often.start()
        never.start()
        await _until(lambda: bool(often.report()) and often.report()[0].commands_per_second is not None)
        await often.close()
        await never.close()
        assert never.report() == []
        assert {series.instrument for series, _ in never.measured()} == {REDIS_DURATION.name}


async def test_two_realms_on_one_server_are_one_node(any_redis: RedisServer) -> None:
    async with observed(single(any_redis), single(any_redis, database=1)) as seen:
        await seen.spend(3)
        await seen.sampler.sample()
        assert len(seen.values(instruments.REDIS_MASTER)) == 1
        (durations,) = seen.values(REDIS_DURATION).values()
        assert isinstance(durations, Distribution)
        assert sum(durations.counts) == 3


@pytest.mark.slow
async def test_every_master_of_a_cluster_and_its_replicas() -> None:
    with RedisCluster(replicas=1) as cluster:
        seeds = tuple(RedisAddress("127.0.0.1", node.port) for node in cluster.nodes[:1])
        async with observed(RedisServers("cluster", seeds)) as seen:
            await seen.spend(2, *map(str, range(50)))
            await seen.sampler.sample()
            masters = {("127.0.0.1", str(node.port)) for node in cluster.nodes[:3]}
            assert seen.values(instruments.REDIS_MASTER) == dict.fromkeys(masters, 1)
            assert seen.values(instruments.REDIS_REPLICAS) == dict.fromkeys(masters, 1)
            assert seen.values(instruments.REDIS_REPLICATION_LAG).keys() == masters
            assert seen.values(instruments.REDIS_REPLICATION_ACK_AGE).keys() == masters
            slots = seen.values(instruments.REDIS_CLUSTER_SLOTS)
            assert slots == {(*node, state): SLOTS for node in masters for state in ("assigned", "ok")}
            durations = seen.values(REDIS_DURATION)
            assert durations.keys() == masters
            assert all(isinstance(one, Distribution) and sum(one.counts) >= 2 for one in durations.values())
            assert len(seen.sampler.report()) == 3

            lost = cluster.nodes[2]
            cluster.kill(cluster.nodes[5])
            cluster.kill(lost)
            await _until(lambda: "cluster_state:fail" in str(cluster.nodes[0].cli("CLUSTER", "INFO")), 20)
            await seen.sampler.sample()
            left = masters - {("127.0.0.1", str(lost.port))}
            assert seen.values(instruments.REDIS_MASTER).keys() == left
            assert {
                value for (*_, state), value in seen.values(instruments.REDIS_CLUSTER_SLOTS).items() if state == "ok"
            } == {10_922}


@pytest.mark.slow
async def test_master_behind_sentinels_is_named_by_its_own_address() -> None:
    with RedisSentinels() as sentinels:
        addresses = tuple(RedisAddress("127.0.0.1", one.port) for one in sentinels.sentinels)
        servers = RedisServers("sentinel", addresses, sentinels.name, RedisAddress())
        first = "127.0.0.1", str(sentinels.master.port)
        async with observed(servers) as seen:
            await seen.spend()
            await seen.sampler.sample()
            assert seen.values(instruments.REDIS_REPLICAS) == {first: 1}
            sentinels.sentinels[0].cli("SENTINEL", "FAILOVER", sentinels.name)
            await _until(
                lambda: (node := seen.store.realms[0].nodes()[0]).port != first[1] and node.connection.connected, 30
            )
            await seen.sampler.sample()
            ((second, is_master),) = seen.values(instruments.REDIS_MASTER).items()
            assert (second != first, is_master) == (True, 1)
            assert seen.values(REDIS_DURATION).keys() == {second}


async def _until(holds: Callable[[], bool], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not holds():
            await asyncio.sleep(0.01)
