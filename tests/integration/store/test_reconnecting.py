"""The reconnecting connection to a real server that accepts connections and rejects commands."""

from __future__ import annotations

import asyncio
from functools import partial
from time import monotonic

import pytest
from structlog.testing import capture_logs

from ratelimit_rls.core.model import StoreResult
from ratelimit_rls.errors import StoreError, StoreUnavailable
from ratelimit_rls.settings.redis_address import RedisAddress
from ratelimit_rls.store.redis.connection import PipelinedConnection, connect
from ratelimit_rls.store.redis.deployment import decode_results
from ratelimit_rls.store.redis.reconnecting import MAX_PAUSE_S, MIN_STABLE_S, ReconnectingConnection
from ratelimit_rls.store.redis.script_node import RedisOptions, ScriptNode, ScriptRun
from ratelimit_rls.store.redis.store import RedisStore
from tests.support.servers import RedisServer
from tests.support.stores import call, step


@pytest.mark.slow
async def test_a_server_that_rejects_everything_causes_few_connections_and_log_lines(any_redis: RedisServer) -> None:
    """The server is out of memory, and the handshake writes nothing, as with nodes of a cluster."""
    address = RedisAddress("127.0.0.1", any_redis.port)
    with capture_logs() as lines:
        node = ScriptNode(any_redis.address, partial(connect, address), RedisOptions(), must_write=False)
        await node.connection.start()
        run = [RedisStore.prepare(None, call(step("k", 10**6)))]  # type: ignore[arg-type]
        before = int(any_redis.cli("INFO", "stats")["total_connections_received"])
        denied = 0
        any_redis.cli("CONFIG", "SET", "maxmemory", "1")
        try:
            ends_s = monotonic() + 3
            while monotonic() < ends_s:
                denied += await _denies(node, run)
                await asyncio.sleep(0.002)
        finally:
            any_redis.cli("CONFIG", "SET", "maxmemory", "0")
        connections = int(any_redis.cli("INFO", "stats")["total_connections_received"]) - before
        back_s = monotonic()
        while await _denies(node, run):
            await asyncio.sleep(0.002)
        back_s = monotonic() - back_s
        await asyncio.sleep(MIN_STABLE_S + 0.2)
        await node.close()

    events = [(line["event"], line["log_level"]) for line in lines if line["log_level"] != "debug"]
    print(f"{denied} calls denied in 3 s, {connections} connections, events {events}; back {back_s:.2f} s after it")
    assert connections <= 15
    assert events == [
        ("redis_rejects_commands", "warning"),
        ("redis_connection_lost", "warning"),
        ("redis_connection_restored", "info"),
    ]
    assert back_s <= 2 * MAX_PAUSE_S


async def _denies(node: ScriptNode, run: list) -> bool:  # type: ignore[type-arg]
    try:
        (reply,) = await node.run_script([ScriptRun(run)])
    except StoreUnavailable:
        return True
    return not (isinstance(reply, list) and isinstance(decode_results(run, reply)[0], StoreResult))


async def test_retry_now_connects_without_further_pause(any_redis: RedisServer) -> None:
    attempts = 0

    async def fail(timeout_s: float) -> PipelinedConnection:
        nonlocal attempts
        attempts += 1
        raise StoreUnavailable("not yet")

    async def greet(pipe: PipelinedConnection, timeout_s: float) -> None:
        raise AssertionError("there is no connection")

    line = ReconnectingConnection("nowhere", fail, greet)
    line.start_in_background()
    await line.wait_for_first_attempt()
    made = 0
    for _ in range(100):  # which would take half a minute with pauses
        made = attempts
        line.retry_now()
        while attempts == made:
            await asyncio.sleep(0)
    await line.close()
    with pytest.raises(StoreError):
        line.send([])
