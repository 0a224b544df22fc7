"""The Redis store against real servers: how it gets in, what it sends, and what it does when they fail."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import hiredis
import pytest
import redis
from pydantic import SecretStr

from ratelimit_rls.core.model import Algorithm, Answer, Charge, Penalty, Plan, WarnAt
from ratelimit_rls.errors import StoreError, StoreTimeout, StoreUnavailable
from ratelimit_rls.settings.redis_address import RedisAddress, RedisServers
from ratelimit_rls.store.redis.node import Terms
from ratelimit_rls.store.redis.servers import OneServer
from ratelimit_rls.store.redis.store import RedisStore
from tests.servers import RedisServer
from tests.stores import START_US, Watched, call, step, watched_call


def new_store(address: RedisAddress, **terms: Any) -> RedisStore:
    return RedisStore(OneServer(RedisServers("single", (address,)), Terms(**terms)))


@asynccontextmanager
async def connected(address: RedisAddress, **terms: Any) -> AsyncIterator[RedisStore]:
    store = new_store(address, **terms)
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
        await new_store(at(server, password=SecretStr("guess"))).start()

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


@pytest.mark.parametrize("algorithm", list(Algorithm), ids=lambda algorithm: algorithm.value)
@pytest.mark.parametrize(
    "plant",
    [("SET", text) for text in ("garbage", "nan", "1e400", "1.5", "-3", "5 1", "5 1 x")] + [("RPUSH", "garbage")],
    ids=" ".join,
)
async def test_what_is_not_ours_counts_as_nothing_and_harms_nobody_else(
    any_redis: RedisServer, algorithm: Algorithm, plant: tuple[str, str]
) -> None:
    if algorithm is Algorithm.SLIDING_LOG and plant[0] == "RPUSH":
        plant = ("RPUSH", "0 0")  # its own kind of list, with nothing in it
    poisoned = step("poisoned", algorithm=algorithm)
    any_redis.cli(plant[0], poisoned.key, plant[1])
    async with connected(at(any_redis)) as store:
        answers = await spend(store, call(poisoned), call(step("healthy")))

    assert [answer.readings[0].left for answer in answers if isinstance(answer, Answer)] == [2, 2]


@pytest.mark.parametrize("text", ["{fraction}", "{huge}"])
async def test_a_number_that_we_would_not_have_written_counts_as_nothing(any_redis: RedisServer, text: str) -> None:
    """Though it names the present window: a part of a hit, or more of them than a state can hold."""
    index = int(time.time() // 60) % 65536
    numbers = {"fraction": f"{5 * 65536 + index}.25", "huge": str(2**53 + index + index % 2)}
    poisoned = step("poisoned")
    any_redis.cli("SET", poisoned.key, text.format(**numbers))
    async with connected(at(any_redis)) as store:
        assert await left(store, "poisoned") == 3


async def test_what_cannot_be_forgotten_in_time_is_said_not_to_be(any_redis: RedisServer) -> None:
    async with connected(at(any_redis), timeout_s=0.1) as store:
        any_redis.pause()
        try:
            with pytest.raises(StoreTimeout):
                await store.forget([b"k"])
        finally:
            any_redis.resume()


@pytest.mark.parametrize("text", ["garbage", "nan", "inf", "1e400", "5 1", "5 1 ", "0 2 5", "-1"])
async def test_a_watchers_state_that_is_not_ours_counts_as_nothing(any_redis: RedisServer, text: str) -> None:
    plan = watched_call(Watched((step("k", 9),), (Penalty(1_000_000, 1, (2,)), WarnAt(800))))
    for key in plan.keys[1:]:
        any_redis.cli("SET", key, text)
    async with connected(at(any_redis)) as store:
        (answer,) = await spend(store, plan)

    assert isinstance(answer, Answer)
    assert answer.readings[1:] == ((0, 0, 0), (0, 0, 0))


async def test_an_error_reply_is_the_trouble_of_its_own_run_and_is_not_sent_again(redis_server: RedisServer) -> None:
    redis_server.cli("HSET", "rl:{broken}:sliding_log:60", "not", "a list")
    async with connected(at(redis_server)) as store:
        before = calls_of(redis_server, "eval")
        (broken,) = await spend(store, call(step("broken", algorithm=Algorithm.SLIDING_LOG)))
        assert isinstance(broken, StoreUnavailable)
        assert await left(store, "k") == 3

    assert calls_of(redis_server, "eval") == before


async def test_jitter_lengthens_lives(any_redis: RedisServer) -> None:
    async with connected(at(any_redis), jitter_ms=3_600_000) as store:
        for i in range(10):
            await spend(store, call(step(f"k{i}")))

    lives = {any_redis.cli("PTTL", key) for key in any_redis.cli("KEYS", "*")}
    assert max(lives) > 120_000
    assert len(lives) > 5


async def test_a_log_never_grows_beyond_its_bound(any_redis: RedisServer) -> None:
    now_us = START_US
    elements = [f"{now_us - 30_000_000 + i} {i}" for i in range(1, 20_001)]
    any_redis.cli("RPUSH", "rl:{k}:sliding_log:60", "0 0", *elements)
    debt = call(step(limit=100, algorithm=Algorithm.SLIDING_LOG, charge=Charge.ALWAYS))
    async with connected(at(any_redis), clock=lambda: now_us) as store:
        for _ in range(3):
            (answer,) = await spend(store, debt)
            assert isinstance(answer, Answer)

    assert answer.readings[0].left == 100 - 20_003
    assert any_redis.cli("LLEN", "rl:{k}:sliding_log:60") == 20_001


async def test_a_batch_whose_caller_is_gone_does_not_harm_the_others(
    any_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected(at(any_redis), timeout_s=5) as store:
        any_redis.pause()
        gone = asyncio.create_task(spend(store, call(step("k"))))
        stays = asyncio.create_task(spend(store, call(step("k"))))
        await asyncio.sleep(0.05)
        gone.cancel()
        await asyncio.sleep(0)
        any_redis.resume()
        (answer,) = await stays
        assert isinstance(answer, Answer)
        assert answer.readings[0].left == 1
        assert store.connected
    assert not caplog.records


async def test_a_reply_that_was_there_in_time_counts_however_late_it_is_read(any_redis: RedisServer) -> None:
    async with connected(at(any_redis), timeout_s=0.2) as store:
        asked = asyncio.create_task(spend(store, call(step("k"))))
        await asyncio.sleep(0)
        time.sleep(0.4)  # the loop itself is what is late
        (answer,) = await asked

        assert isinstance(answer, Answer)
        assert store.connected


class Scripted:
    """A server that greets, and then answers SCRIPT LOAD and EVALSHA with what it is told to say; None: nothing."""

    def __init__(self, loads: list[bytes | None], evals: list[bytes | None]) -> None:
        self._loads, self._evals = iter(loads), iter(evals)
        self.connections = 0

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[RedisAddress]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        try:
            yield RedisAddress("127.0.0.1", server.sockets[0].getsockname()[1])
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        commands = hiredis.Reader()
        with suppress(ConnectionError, asyncio.CancelledError):
            while data := await reader.read(65536):
                commands.feed(data)
                while (command := commands.gets()) is not False:
                    said = {b"SCRIPT": self._loads, b"EVALSHA": self._evals}.get(command[0], iter([b"+OK\r\n"]))
                    writer.write(next(said, None) or b"")
        writer.close()


async def test_runs_that_were_answered_in_time_keep_their_answers(caplog: pytest.LogCaptureFixture) -> None:
    first_run = b"*513\r\n:1\r\n" + b":0\r\n:2\r\n:0\r\n:9\r\n" * 128
    server = Scripted([b"+sha\r\n"], [first_run])
    async with server.serving() as address, connected(address, timeout_s=0.2) as store:
        answers = await spend(store, *(call(step(f"k{i}")) for i in range(400)))
        assert not store.connected  # everything behind a late answer would be late, too

    assert [type(answer) for answer in answers] == [Answer] * 128 + [StoreTimeout] * 272
    gc.collect()
    assert not caplog.records  # such as futures whose exceptions nobody took


async def test_a_silent_server_does_not_end_the_attempts_to_reconnect() -> None:
    server = Scripted([b"+sha\r\n", None, b"+sha\r\n"], [None])
    async with server.serving() as address, connected(address, timeout_s=0.1, connect_timeout_s=0.1) as store:
        await spend(store, call(step("k")))
        await until(lambda: server.connections == 3 and store.connected)


async def test_a_connection_is_tried_once() -> None:
    tried = 0

    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal tried
        tried += 1
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    address = RedisAddress("127.0.0.1", server.sockets[0].getsockname()[1])
    with pytest.raises(StoreUnavailable):
        await new_store(address, connect_timeout_s=1).start()
    server.close()
    assert tried == 1


async def until(holds: Any) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.005)


async def test_a_server_that_takes_no_writes_is_no_server(any_redis: RedisServer) -> None:
    any_redis.cli("REPLICAOF", "127.0.0.1", "1")
    try:
        with pytest.raises(StoreUnavailable, match="does not serve: READONLY"):
            await new_store(at(any_redis)).start()
    finally:
        any_redis.cli("REPLICAOF", "NO", "ONE")


async def test_a_master_that_became_a_replica_is_left_at_once_and_found_again(any_redis: RedisServer) -> None:
    async with connected(at(any_redis)) as store:
        any_redis.cli("REPLICAOF", "127.0.0.1", "1")
        (told,) = await spend(store, call(step("k")))
        assert isinstance(told, StoreUnavailable)
        await until(lambda: not store.connected)
        any_redis.cli("REPLICAOF", "NO", "ONE")
        await until(lambda: store.connected)
        assert await left(store, "k") == 3


async def test_a_server_that_refuses_three_times_in_a_row_is_asked_in_the_background_only(
    any_redis: RedisServer,
) -> None:
    async with connected(at(any_redis)) as store:
        any_redis.cli("CONFIG", "SET", "maxmemory", "1")
        try:
            for refusals in range(3):
                assert store.connected, f"given up after {refusals} refusals"
                (told,) = await spend(store, call(step("k")))
                assert "OOM" in str(told)
            await until(lambda: not store.connected)
        finally:
            any_redis.cli("CONFIG", "SET", "maxmemory", "0")
        await until(lambda: store.connected)
        assert await left(store, "k") == 3


async def test_refusals_that_are_not_in_a_row_do_no_harm(any_redis: RedisServer) -> None:
    any_redis.cli("HSET", "rl:{odd}:sliding_log:60", "not", "a list")
    async with connected(at(any_redis)) as store:
        for _ in range(5):
            (told,) = await spend(store, call(step("odd", algorithm=Algorithm.SLIDING_LOG)))
            assert "WRONGTYPE" in str(told)
            await spend(store, call(step("k")))
        assert store.connected


async def test_a_connection_in_the_background_comes_when_the_server_does() -> None:
    server = RedisServer()
    store = new_store(at(server))
    store.start_in_background()
    (told,) = await spend(store, call(step("k")))
    assert isinstance(told, StoreUnavailable)
    with server:
        await until(lambda: store.connected)
        assert await left(store, "k") == 3
        await store.close()


async def test_an_id_is_kept_for_as_long_as_it_counts_once(any_redis: RedisServer) -> None:
    async with connected(at(any_redis), once_s=300) as store:
        await store.spend([store.prepare(call(step("k"))).once(b"id")])

    (record,) = any_redis.cli("KEYS", "rl:{k}:once:*")
    assert 299_000 < any_redis.cli("PTTL", record) <= 300_000


async def test_what_is_freed_is_told_to_everybody(any_redis: RedisServer) -> None:
    heard: list[bytes] = []
    with redis.Redis(port=any_redis.port) as client, client.pubsub() as listening:
        listening.subscribe("p:rl:freed")
        listening.get_message(timeout=5)
        async with connected(at(any_redis), key_prefix=b"p:") as store:
            await spend(store, call(step("a", 5, cost=3)))
            await spend(store, call(step("a", 5, cost=-1)), call(step("b")))
            taken = await store.spend([store.prepare(call(step("c", 9))).at_most(4)])
            assert isinstance(taken[0], Answer)
            await store.spend([store.prepare(call(step("c", 9))).returned(4, taken[0].now_us)])
            await store.forget([b"rl:{d}:gcra:60"])
        any_redis.cli("PUBLISH", "p:rl:freed", "the end")
        while b"the end" not in heard:
            message = listening.get_message(timeout=5)
            assert message is not None
            heard += message["data"].split(b"\n")

    assert heard[:-1] == [b"rl:{a}:fixed_window:60", b"rl:{c}:fixed_window:60", b"rl:{d}:gcra:60"]


async def test_who_only_looks_or_forgets_needs_no_server_that_takes_more(any_redis: RedisServer) -> None:
    async with connected(at(any_redis)) as store:
        await spend(store, call(step("k")))
    any_redis.cli("CONFIG", "SET", "maxmemory", "1")
    try:
        async with connected(at(any_redis), must_write=False) as store:
            assert await store.forget([b"rl:{k}:fixed_window:60"]) == [b"rl:{k}:fixed_window:60"]
    finally:
        any_redis.cli("CONFIG", "SET", "maxmemory", "0")
