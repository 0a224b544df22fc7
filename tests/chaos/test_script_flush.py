"""SCRIPT FLUSH and FUNCTION FLUSH while calls are in flight: no hit is lost, none is counted twice."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest
import redis

from ratelimit_rls.core.model import Code
from tests.support.grpc_client import rate_limit_request
from tests.support.load import run_load
from tests.support.servers import RedisServer, Service

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(120)]

CALLS = 3000


async def test_flushed_scripts_neither_lose_nor_double_hits(redis_server: RedisServer, tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(
        "domain: flushed\ndescriptors: [{key: all, rate_limit: {unit: year, requests_per_unit: 4000000000}}]\n"
    )
    flushes = 0

    async def flush() -> None:
        nonlocal flushes
        while True:
            await asyncio.to_thread(redis_server.cli, "SCRIPT", "FLUSH")
            with suppress(redis.ResponseError):  # Redis 6.2 has no functions
                await asyncio.to_thread(redis_server.cli, "FUNCTION", "FLUSH")
            flushes += 1

    with Service({"RLS_RULES": rules, "REDIS_URL": redis_server.address}) as service:
        flushing = asyncio.create_task(flush())
        message = bytes(rate_limit_request("flushed", {"all": "hits"}))
        outcomes = await run_load([service.grpc_address], message, clients=64, calls=CALLS)
        flushing.cancel()
        await asyncio.gather(flushing, return_exceptions=True)

    print(f"{flushes} flushes during {CALLS} calls")
    assert outcomes == {Code.OK: CALLS}
    assert flushes > 5  # otherwise nothing was tested
    assert int(redis_server.cli("GET", "rl:{flushed/all=hits}:fixed_window:31536000")) >> 16 == CALLS
