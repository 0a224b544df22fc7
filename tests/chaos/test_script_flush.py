"""The script and the function are flushed, deleted or replaced while calls are in flight: no hit is lost or doubled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import redis

from ratelimit_rls.core.model import Code
from ratelimit_rls.store.lua_script import function_name
from tests.support.grpc_client import rate_limit_request
from tests.support.load import run_load
from tests.support.servers import RedisServer, Service

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(120)]

CALLS = 3000


def flush(server: RedisServer) -> None:
    server.cli("SCRIPT", "FLUSH")
    with suppress(redis.ResponseError):  # Redis 6.2 has no functions
        server.cli("FUNCTION", "FLUSH")


def delete(server: RedisServer) -> None:
    """Delete our library alone, as an operator does who takes it for that of an earlier release."""
    server.cli("SCRIPT", "FLUSH")
    with suppress(redis.ResponseError):  # it is not loaded now
        server.cli("FUNCTION", "DELETE", function_name())


def replace(server: RedisServer) -> None:
    """Put a library of our name there that does not have our function, and take it away again."""
    library = f"#!lua name={function_name().decode()}\nredis.register_function('other', function() return 1 end)"
    with suppress(redis.ResponseError):
        server.cli("FUNCTION", "LOAD", "REPLACE", library)
    server.cli("SCRIPT", "FLUSH")
    delete(server)


@pytest.mark.parametrize("befall", [flush, delete, replace], ids=lambda one: one.__name__)
async def test_missing_script_neither_loses_nor_doubles_hits(
    befall: Callable[[RedisServer], None], redis_server: RedisServer, tmp_path: Path
) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(
        "domain: flushed\ndescriptors: [{key: all, rate_limit: {unit: year, requests_per_unit: 4000000000}}]\n"
    )
    times = 0

    async def keep_going() -> None:
        nonlocal times
        while True:
            await asyncio.to_thread(befall, redis_server)
            times += 1

    with Service({"RLS_RULES": rules, "REDIS_URL": redis_server.address}) as service:
        disturbing = asyncio.create_task(keep_going())
        message = bytes(rate_limit_request("flushed", {"all": "hits"}))
        outcomes = await run_load([service.grpc_address], message, clients=64, calls=CALLS)
        disturbing.cancel()
        await asyncio.gather(disturbing, return_exceptions=True)

    print(f"{times} times during {CALLS} calls")
    assert outcomes == {Code.OK: CALLS}
    assert times > 5  # otherwise nothing was tested
    assert int(redis_server.cli("GET", "rl:{flushed/all=hits}:fixed_window:31536000")) >> 16 == CALLS
