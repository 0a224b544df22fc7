"""The ACL permissions in docs/operations.md are sufficient on every server."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import SecretStr

from ratelimit_rls.core.model import Algorithm, StoreResult
from ratelimit_rls.settings.redis_address import RedisAddress, RedisServers
from ratelimit_rls.store.redis.factory import redis_store
from ratelimit_rls.store.redis.script_node import RedisOptions
from tests.support.servers import RedisServer
from tests.support.stores import call, step

PAGE = Path(__file__).parents[3] / "docs" / "operations.md"


def documented_rights() -> list[str]:
    found = re.search(r"ACL SETUSER limiter on >password (.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    return found[1].split()


async def test_the_documented_acl_permissions_are_sufficient(redis_server: RedisServer) -> None:
    # Redis 6.2 has no permissions for subcommands.
    rights = [right.partition("|")[0] for right in documented_rights()]
    redis_server.cli("ACL", "SETUSER", "limiter", "reset", "on", ">password", *rights)
    address = RedisAddress("127.0.0.1", redis_server.port, username="limiter", password=SecretStr("password"))
    store = redis_store(RedisServers("single", (address,)), None, RedisOptions())
    await store.start()
    try:
        redis_server.cli("SCRIPT", "FLUSH")
        plans = [store.prepare(call(step(f"k{one.value}", 3, algorithm=one))) for one in Algorithm]
        answers = await store.spend([*plans, *(plan.idempotent(b"id") for plan in plans)])
        assert all(isinstance(answer, StoreResult) for answer in answers), answers
        taken = await store.spend([plan.take_up_to(1) for plan in plans])
        moments_us = [answer.now_us for answer in taken if isinstance(answer, StoreResult)]
        given = await store.spend([plan.refund(1, at_us) for plan, at_us in zip(plans, moments_us, strict=True)])
        assert all(isinstance(answer, StoreResult) for answer in given), given
    finally:
        await store.close()
        redis_server.cli("ACL", "DELUSER", "limiter")
