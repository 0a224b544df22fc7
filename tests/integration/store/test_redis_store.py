"""The Redis store against real servers: how it gets in, what it sends, and what it does when they fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from pydantic import SecretStr

from ratelimit_rls.core.model import Algorithm, Answer, Charge, Plan
from ratelimit_rls.errors import StoreError, StoreTimeout, StoreUnavailable
from ratelimit_rls.settings.redis_address import RedisAddress
from ratelimit_rls.store.redis.store import RedisStore
from tests.servers import RedisServer
from tests.stores import call, step


@asynccontextmanager
async def connected(address: RedisAddress, **options: Any) -> AsyncIterator[RedisStore]:
    store = RedisStore(address, **options)
    await store.start()
    try:
        yield store
    finally:
        await store.close()


def at(server: RedisServer, **more: Any) -> RedisAddress:
    return RedisAddress("127.0.0.1", server.port, **more)


async def spend(store: RedisStore, *plans: Plan) -> list[Answer | StoreError]:
    return await store.spend([store.prepare(plan) for plan in plans])


async def left(store: RedisStore, key: str, limit: int = 3) -> int:
    (answer,) = await spend(store, call(step(key, limit, cost=0)))
    assert isinstance(answer, Answer), answer
    return answer.readings[0].left


def calls_of(server: RedisServer, command: str) -> int:
    return int(server.cli("INFO", "commandstats").get(f"cmdstat_{command}", {"calls": 0})["calls"])


async def test_it_connects_over_a_unix_socket(any_redis: RedisServer) -> None:
    async with connected(RedisAddress(path=str(any_redis.unix_socket))) as store:
        assert await left(store, "k") == 3


async def test_it_authenticates_with_a_password_and_as_an_acl_user() -> None:
    with RedisServer(password="s3cret", users={"limiter": "hush"}) as server:
        async with connected(at(server, password=SecretStr("s3cret"))) as store:
            assert await left(store, "k") == 3
        async with connected(at(server, username="limiter", password=SecretStr("hush"))) as store:
            assert await left(store, "k") == 3


async def test_a_wrong_password_is_told_without_being_shown() -> None:
    with RedisServer(password="s3cret") as server, pytest.raises(StoreUnavailable) as refused:
        await RedisStore(at(server, password=SecretStr("guess"))).start()

    assert "password" in str(refused.value).lower() or "auth" in str(refused.value).lower()
    assert "guess" not in str(refused.value)
    assert "s3cret" not in str(refused.value)


async def test_it_counts_in_the_database_it_is_given(any_redis: RedisServer) -> None:
    async with connected(at(any_redis, database=3)) as store:
        await spend(store, call(step("k")))

    assert any_redis.cli("DBSIZE", database=3) == 1
    assert any_redis.cli("DBSIZE", database=0) == 0


async def test_a_batch_on_one_key_is_one_script_one_read_and_one_write(redis_server: RedisServer) -> None:
    async with connected(at(redis_server)) as store:
        before = {command: calls_of(redis_server, command) for command in ("evalsha", "mget", "set")}
        answers = await spend(store, *(call(step("hot", 1000)) for _ in range(60)))

    assert all(isinstance(answer, Answer) for answer in answers)
    assert {command: calls_of(redis_server, command) - before[command] for command in before} == {
        "evalsha": 1,
        "mget": 1,
        "set": 1,
    }


@pytest.mark.parametrize("algorithm", list(Algorithm), ids=lambda algorithm: algorithm.value)
@pytest.mark.parametrize("charge", list(Charge), ids=lambda charge: charge.value)
async def test_every_state_has_an_end(redis_server: RedisServer, algorithm: Algorithm, charge: Charge) -> None:
    async with connected(at(redis_server), jitter_ms=1000) as store:
        for cost in (1, 5, -1):
            await spend(store, call(step("k", 3, algorithm=algorithm, cost=cost, charge=charge)))

    (key,) = redis_server.cli("KEYS", "*")
    longest_ms = 5 * 60_000  # the debt of five, the second and the jitter on top
    assert 0 < redis_server.cli("PTTL", key) <= longest_ms


async def test_a_flushed_script_comes_back_and_the_hit_counts_once(redis_server: RedisServer) -> None:
    async with connected(at(redis_server)) as store:
        redis_server.cli("SCRIPT", "FLUSH")
        await spend(store, call(step("k")))
        assert await left(store, "k") == 2


async def test_a_server_that_is_away_is_said_so_at_once_and_found_again(any_redis: RedisServer) -> None:
    told: list[bool] = []
    async with connected(at(any_redis), on_connection=told.append) as store:
        any_redis.kill()
        await until(lambda: told == [True, False])
        (answer,) = await spend(store, call(step("k")))
        assert isinstance(answer, StoreUnavailable)

        any_redis.start()
        await until(lambda: told == [True, False, True])
        assert await left(store, "k") == 3


async def test_no_answer_in_time_is_an_error_for_the_batch_and_the_next_one_is_served(any_redis: RedisServer) -> None:
    async with connected(at(any_redis), timeout_s=0.2) as store:
        any_redis.pause()
        answers = await spend(store, call(step("k")), call(step("k")))
        assert [type(answer) for answer in answers] == [StoreTimeout, StoreTimeout]

        any_redis.resume()
        await until(lambda: store.connected)
        # The server may have counted them when it woke up, but each at most once.
        assert await left(store, "k", 10) >= 8


async def test_an_error_reply_is_the_trouble_of_its_own_run(any_redis: RedisServer) -> None:
    any_redis.cli("RPUSH", "broken:gcra:60", "not a string")
    async with connected(at(any_redis)) as store:
        (broken,) = await spend(store, call(step("broken", algorithm=Algorithm.GCRA)))
        # MGET passes over what is not a string, so the state counts as absent and is replaced.
        assert isinstance(broken, Answer)
        any_redis.cli("SET", "broken:sliding_log:60", "not a list")
        (broken,) = await spend(store, call(step("broken", algorithm=Algorithm.SLIDING_LOG)))
        assert isinstance(broken, StoreUnavailable)
        assert await left(store, "k") == 3


async def until(holds: Any) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.005)
