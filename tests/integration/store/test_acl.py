"""The rights that docs/operations.md names are enough, on every server."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import SecretStr

from ratelimit_rls.core.model import Algorithm, Answer
from ratelimit_rls.settings.redis_address import RedisAddress, RedisServers
from ratelimit_rls.store.redis.new import redis_store
from ratelimit_rls.store.redis.node import Terms
from tests.servers import RedisServer
from tests.stores import call, step

PAGE = Path(__file__).parents[3] / "docs" / "operations.md"


def documented_rights() -> list[str]:
    found = re.search(r"ACL SETUSER limiter on >password (.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    return found[1].split()


async def test_a_user_with_the_documented_rights_can_do_all_that_the_service_does(redis_server: RedisServer) -> None:
    # Redis 6.2 knows no rights for a part of a command.
    rights = [right.partition("|")[0] for right in documented_rights()]
    redis_server.cli("ACL", "SETUSER", "limiter", "reset", "on", ">password", *rights)
    address = RedisAddress("127.0.0.1", redis_server.port, username="limiter", password=SecretStr("password"))
    store = redis_store(RedisServers("single", (address,)), None, Terms())
    await store.start()
    try:
        redis_server.cli("SCRIPT", "FLUSH")
        plans = [store.prepare(call(step(f"k{one.value}", 3, algorithm=one))) for one in Algorithm]
        answers = await store.spend([*plans, *(plan.once(b"id") for plan in plans)])
        assert all(isinstance(answer, Answer) for answer in answers), answers
        taken = await store.spend([plan.at_most(1) for plan in plans])
        moments_us = [answer.now_us for answer in taken if isinstance(answer, Answer)]
        given = await store.spend([plan.returned(1, at_us) for plan, at_us in zip(plans, moments_us, strict=True)])
        assert all(isinstance(answer, Answer) for answer in given), given
    finally:
        await store.close()
        redis_server.cli("ACL", "DELUSER", "limiter")
