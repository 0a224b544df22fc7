"""Discovery of the master through real sentinels, before and after a failover."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest
from pydantic import SecretStr

from ratelimit_rls.errors import StoreUnavailable
from ratelimit_rls.settings import Settings
from ratelimit_rls.settings.redis_address import RedisAddress, RedisServers
from ratelimit_rls.store.redis.connection import connect
from ratelimit_rls.store.redis.resp import command
from ratelimit_rls.store.redis.sentinel import find_master, watch_master
from tests.conftest import REDIS_IDS
from tests.support.ports import free_port
from tests.support.redis_servers import RedisSentinels
from tests.support.servers import RedisServer, redis_binaries

PATIENCE_S = 10.0


@pytest.fixture(params=REDIS_IDS)
def sentinels(request: pytest.FixtureRequest) -> Iterator[RedisSentinels]:
    binary = redis_binaries().get(request.param)
    if binary is None:
        pytest.skip(f"{request.param} is not on this machine")
    with RedisSentinels(binary, password="s3cret", sentinel_password="hush") as servers:
        yield servers


def named(sentinels: RedisSentinels, **more: str) -> RedisServers:
    settings = Settings(redis_url=SecretStr(sentinels.url), redis_auth=SecretStr("s3cret"), **more)  # type: ignore[arg-type]
    assert settings.redis is not None
    return settings.redis


@pytest.mark.slow
async def test_the_current_master_is_found(sentinels: RedisSentinels) -> None:
    servers = named(sentinels, redis_sentinel_auth="hush")
    first = await find_master(servers, PATIENCE_S)
    assert (first.host, first.port) == ("127.0.0.1", sentinels.servers[0].port)
    assert await role(first) == b"master"

    sentinels.failover()

    second = await find_master(servers, PATIENCE_S)
    assert second.port == sentinels.servers[1].port
    assert await role(second) == b"master"


@pytest.mark.slow
async def test_a_new_master_is_found_without_the_old_one_and_a_sentinel(sentinels: RedisSentinels) -> None:
    servers = named(sentinels, redis_sentinel_auth="hush")
    await find_master(servers, PATIENCE_S)
    killed = sentinels.kill_master()
    sentinels.sentinels[0].pause()  # it would be asked first, and hangs
    now = await asyncio.to_thread(sentinels.wait_for_another, killed, but=sentinels.sentinels[:1])

    assert (await find_master(servers, 1.0)).port == now.port


@pytest.mark.slow
async def test_the_last_responsive_sentinel_is_queried_first(sentinels: RedisSentinels) -> None:
    requests = 0

    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        requests += 1
        writer.close()

    listener = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    servers = named(sentinels, redis_sentinel_auth="hush")
    useless = replace(servers.addresses[0], port=listener.sockets[0].getsockname()[1])
    servers = replace(servers, addresses=(useless, *servers.addresses))
    for _ in range(3):
        assert (await find_master(servers, PATIENCE_S)).port == sentinels.servers[0].port
    listener.close()
    assert requests == 1


@pytest.mark.slow
async def test_watching_reports_the_replacement_of_a_healthy_master(sentinels: RedisSentinels) -> None:
    moved = asyncio.Event()

    def roles(master: RedisAddress) -> None:
        if master.port != sentinels.servers[0].port:
            moved.set()

    watch = asyncio.create_task(watch_master(named(sentinels, redis_sentinel_auth="hush"), roles, pause_s=0.05))
    await asyncio.sleep(0.2)
    assert not moved.is_set()

    await asyncio.to_thread(sentinels.failover)

    await asyncio.wait_for(moved.wait(), PATIENCE_S)
    assert sentinels.servers[0].cli("ROLE")[0] == b"master"  # it does not know yet: this is why sentinels must be asked
    watch.cancel()


@pytest.mark.slow
async def test_the_errors_of_all_sentinels_are_reported(sentinels: RedisSentinels) -> None:
    with pytest.raises(StoreUnavailable) as raised:
        await find_master(named(sentinels, redis_sentinel_auth="wrong-one"), PATIENCE_S)
    message = str(raised.value)
    assert message.startswith("no sentinel knows the address of the master 'main': ")
    for sentinel in sentinels.sentinels:
        assert f"redis://{sentinel.address}" in message
    assert "wrong-one" not in message


async def test_a_server_that_is_not_a_sentinel_is_reported(any_redis: RedisServer) -> None:
    unused = RedisAddress("127.0.0.1", free_port())
    servers = RedisServers("sentinel", (unused, RedisAddress("127.0.0.1", any_redis.port)), "main", RedisAddress())
    with pytest.raises(StoreUnavailable) as raised:
        await find_master(servers, PATIENCE_S)
    assert f"cannot connect to Redis at {unused}" in str(raised.value)
    assert f"the sentinel at redis://127.0.0.1:{any_redis.port} returned an error: ERR unknown command" in str(
        raised.value
    )


async def role(address: RedisAddress) -> bytes:
    connection = await connect(address, PATIENCE_S)
    try:
        roles = await connection.send(command(b"ROLE"))
        assert isinstance(roles[0], bytes)
        return roles[0]
    finally:
        connection.abort()
