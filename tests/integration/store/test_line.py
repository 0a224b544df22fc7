"""A connection that is kept, to a real server that takes connections and serves nobody."""

from __future__ import annotations

import asyncio
from functools import partial
from time import monotonic

import pytest
from structlog.testing import capture_logs

from ratelimit_rls.core.model import Answer
from ratelimit_rls.errors import StoreError, StoreUnavailable
from ratelimit_rls.settings.redis_address import RedisAddress
from ratelimit_rls.store.redis.connect import Pipe, connect
from ratelimit_rls.store.redis.line import LONGEST_PAUSE_S, STEADY_S, Line
from ratelimit_rls.store.redis.node import Node, Terms
from ratelimit_rls.store.redis.store import RedisStore, answers_of
from tests.servers import RedisServer
from tests.stores import call, step


@pytest.mark.slow
async def test_a_server_that_refuses_everything_costs_few_connections_and_few_lines(any_redis: RedisServer) -> None:
    """Out of memory, and greeted without a write, as the nodes of a cluster are."""
    address = RedisAddress("127.0.0.1", any_redis.port)
    with capture_logs() as lines:
        node = Node(any_redis.address, partial(connect, address), Terms(), must_write=False)
        await node.line.start()
        run = [RedisStore.prepare(None, call(step("k", 10**6)))]  # type: ignore[arg-type]
        before = int(any_redis.cli("INFO", "stats")["total_connections_received"])
        refused = 0
        any_redis.cli("CONFIG", "SET", "maxmemory", "1")
        try:
            ends_s = monotonic() + 3
            while monotonic() < ends_s:
                refused += await _refuses(node, run)
                await asyncio.sleep(0.002)
        finally:
            any_redis.cli("CONFIG", "SET", "maxmemory", "0")
        connections = int(any_redis.cli("INFO", "stats")["total_connections_received"]) - before
        back_s = monotonic()
        while await _refuses(node, run):
            await asyncio.sleep(0.002)
        back_s = monotonic() - back_s
        await asyncio.sleep(STEADY_S + 0.2)
        await node.close()

    told = [line["event"] for line in lines if line["log_level"] == "warning"]
    print(f"{refused} calls refused in 3 s, {connections} connections, told {told}; back {back_s:.2f} s after it")
    assert connections <= 15
    assert told == ["redis refuses to serve", "redis connection lost", "redis connection restored"]
    assert back_s <= 2 * LONGEST_PAUSE_S


async def _refuses(node: Node, run: list) -> bool:  # type: ignore[type-arg]
    try:
        (reply,) = await node.decide([run])
    except StoreUnavailable:
        return True
    return not (isinstance(reply, list) and isinstance(answers_of(run, reply)[0], Answer))


async def test_an_attempt_is_made_at_once_when_there_is_reason_to_hurry(any_redis: RedisServer) -> None:
    attempts = 0

    async def fail(timeout_s: float) -> Pipe:
        nonlocal attempts
        attempts += 1
        raise StoreUnavailable("not yet")

    async def greet(pipe: Pipe, timeout_s: float) -> None:
        raise AssertionError("there is no connection")

    line = Line("nowhere", fail, greet)
    line.start_in_background()
    await line.first_attempt()
    made = 0
    for _ in range(100):  # which would take half a minute otherwise
        made = attempts
        line.hurry()
        while attempts == made:
            await asyncio.sleep(0)
    await line.close()
    with pytest.raises(StoreError):
        line.send([])
