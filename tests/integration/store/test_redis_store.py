"""The Redis store on real servers: connecting, commands, and failures."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import hiredis
import pytest
import redis
from pydantic import SecretStr

from ratelimit_rls.core.model import Algorithm, Charge, Penalty, Plan, StoreResult, WarnAt
from ratelimit_rls.errors import StoreError, StoreTimeout, StoreUnavailable, UnknownState
from ratelimit_rls.settings.redis_address import RedisAddress, RedisServers
from ratelimit_rls.store.redis.deployment import SingleNode
from ratelimit_rls.store.redis.script_node import RedisOptions
from ratelimit_rls.store.redis.store import RedisStore
from ratelimit_rls.store.script_codec import EncodedPlan
from tests.support.servers import RedisServer
from tests.support.stores import START_US, KeyedOp, MonitoredDescriptor, call, long_step, monitored_call, step


def new_store(address: RedisAddress, **options: Any) -> RedisStore:
    return RedisStore(SingleNode(RedisServers("single", (address,)), RedisOptions(**options)))


@asynccontextmanager
async def connected(address: RedisAddress, **options: Any) -> AsyncIterator[RedisStore]:
    store = new_store(address, **options)
    await store.start()
    try:
        yield store
    finally:
        await store.close()


def at(server: RedisServer, **more: Any) -> RedisAddress:
    return RedisAddress("127.0.0.1", server.port, **more)


async def spend(store: RedisStore, *plans: Plan) -> list[StoreResult | StoreError]:
    return await store.spend([store.prepare(plan) for plan in plans])


async def left(store: RedisStore, key: str, limit: int = 3) -> int:
    (answer,) = await spend(store, call(long_step(key, limit, cost=0)))
    assert isinstance(answer, StoreResult), answer
    return answer.readings[0].left


def calls_of(server: RedisServer, command: str) -> int:
    return int(server.cli("INFO", "commandstats").get(f"cmdstat_{command}", {"calls": 0})["calls"])


def rejected_calls_of(server: RedisServer, command: str) -> int:
    return int(server.cli("INFO", "commandstats").get(f"cmdstat_{command}", {}).get("rejected_calls", 0))


async def test_the_store_connects_over_a_unix_socket(any_redis: RedisServer) -> None:
    async with connected(RedisAddress(path=str(any_redis.unix_socket))) as store:
        assert await left(store, "k") == 3


async def test_the_store_authenticates_with_a_password_and_as_an_acl_user() -> None:
    with RedisServer(password="s3cret", users={"limiter": "hush"}) as server:
        async with connected(at(server, password=SecretStr("s3cret"))) as store:
            assert await left(store, "k") == 3
        async with connected(at(server, username="limiter", password=SecretStr("hush"))) as store:
            assert await left(store, "k") == 3


async def test_a_wrong_password_is_reported_without_showing_it() -> None:
    with RedisServer(password="s3cret") as server, pytest.raises(StoreUnavailable) as raised:
        await new_store(at(server, password=SecretStr("guess"))).start()

    assert "password" in str(raised.value).lower() or "auth" in str(raised.value).lower()
    assert "guess" not in str(raised.value)
    assert "s3cret" not in str(raised.value)


async def test_counters_are_in_the_configured_database(any_redis: RedisServer) -> None:
    async with connected(at(any_redis, database=3)) as store:
        await spend(store, call(long_step("k")))

    assert any_redis.cli("DBSIZE", database=3) == 1
    assert any_redis.cli("DBSIZE", database=0) == 0


async def test_a_batch_on_one_key_is_one_script_one_read_and_one_write(redis_server: RedisServer) -> None:
    async with connected(at(redis_server)) as store:
        before = {command: calls_of(redis_server, command) for command in ("mget", "set")}
        runs_before = redis_server.script_runs()
        answers = await spend(store, *(call(long_step("hot", 1000)) for _ in range(60)))

    assert all(isinstance(answer, StoreResult) for answer in answers)
    assert {command: calls_of(redis_server, command) - before[command] for command in before} == {
        "mget": 1,
        "set": 1,
    }
    assert redis_server.script_runs() == runs_before + 1


@pytest.mark.parametrize("algorithm", list(Algorithm), ids=lambda algorithm: algorithm.value)
@pytest.mark.parametrize(
    "plant",
    [
        *[("SET", text) for text in ("garbage", "nan", "1e400", "1.5", "-3", "5 1", "5 1 x", "v2:7")],
        ("SET", "1786000000000000000"),  # in nanoseconds
        ("SET", "1786000000000000000 5 0 1786000020000000000"),
        ("RPUSH", "garbage"),
        ("HSET", "field", "value"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("others", [0, 1], ids=["alone", "with others"])
async def test_a_state_of_an_unknown_form_is_kept_and_affects_no_other_call(
    any_redis: RedisServer, algorithm: Algorithm, plant: tuple[str, ...], others: int
) -> None:
    if algorithm is Algorithm.GCRA and plant == ("SET", "5 1"):
        plant = ("SET", "5 1 2")  # otherwise it is a state
    poisoned = step("poisoned", algorithm=algorithm)
    any_redis.cli(plant[0], poisoned.key, *plant[1:])
    stored = any_redis.cli("DUMP", poisoned.key)
    healthy = [call(step("healthy"), step("token", algorithm=Algorithm.TOKEN_BUCKET))] * others
    async with connected(at(any_redis)) as store:
        *before, failed = await spend(store, *[call(step("before"))] * others, call(poisoned))
        answers = [*before, *(await spend(store, call(step("before", cost=0)), *healthy))]

    assert isinstance(failed, UnknownState)
    assert failed.key == poisoned.key.decode()
    assert any_redis.cli("DUMP", poisoned.key) == stored
    left_after = [one.left for answer in answers if isinstance(answer, StoreResult) for one in answer.readings]
    assert left_after == ([2, 2, 2, 2] if others else [3])


@pytest.mark.parametrize("order", [[0, 1], [1, 0]], ids=["first", "last"])
async def test_a_call_with_an_unknown_state_charges_none_of_its_limits(
    any_redis: RedisServer, order: list[int]
) -> None:
    steps = [step("poisoned"), step("healthy")]
    any_redis.cli("SET", steps[0].key, "v2:7")
    async with connected(at(any_redis)) as store:
        (failed,) = await spend(store, call(*(steps[number] for number in order)))
        assert isinstance(failed, UnknownState)
        assert failed.key == steps[0].key.decode()
        (looked,) = await spend(store, call(step("healthy", cost=0)))
        assert isinstance(looked, StoreResult)
        assert looked.readings[0].left == 3


async def test_an_unknown_record_of_a_call_is_kept(any_redis: RedisServer) -> None:
    async with connected(at(any_redis)) as store:
        plan = store.prepare(call(long_step("k"))).idempotent(b"request")
        key = store.decode_key(cast("EncodedPlan[bytes]", plan).idempotency_key)
        any_redis.cli("SET", key, "v2:7")
        (failed,) = await store.spend([plan])
        assert isinstance(failed, UnknownState)
        assert failed.key == key.decode()
        assert await left(store, "k") == 3
    assert any_redis.cli("GET", key) == b"v2:7"


@pytest.mark.parametrize("text", ["{fraction}", "{huge}", "0{current}", "0x10", " {current}"])
async def test_an_invalid_number_is_an_unknown_state(any_redis: RedisServer, text: str) -> None:
    """Even with the current window: a fraction of a hit, more hits than a state can hold, or another notation."""
    index = START_US // 60_000_000 % 65536
    numbers = {
        "fraction": f"{5 * 65536 + index}.25",
        "huge": str(2**53 + index + index % 2),
        "current": str(65536 + index),
    }
    poisoned = step("poisoned")
    any_redis.cli("SET", poisoned.key, text.format(**numbers))
    async with connected(at(any_redis), clock=lambda: START_US) as store:
        for cost in (0, 1):
            (answer,) = await spend(store, call(step("poisoned", cost=cost)))
            assert isinstance(answer, UnknownState)
    assert any_redis.cli("GET", poisoned.key) == text.format(**numbers).encode()


async def test_a_timeout_of_a_deletion_is_reported(any_redis: RedisServer) -> None:
    async with connected(at(any_redis), timeout_s=0.1) as store:
        any_redis.pause()
        try:
            with pytest.raises(StoreTimeout):
                await store.forget([b"k"])
        finally:
            any_redis.resume()


@pytest.mark.parametrize("text", ["garbage", "nan", "inf", "1e400", "5 1", "5 1 ", "0 2 5", "-1"])
@pytest.mark.parametrize("watcher", [1, 2], ids=["penalty", "warning"])
async def test_an_unknown_state_of_a_watcher_is_kept(any_redis: RedisServer, text: str, watcher: int) -> None:
    plan = monitored_call(MonitoredDescriptor((step("k", 9),), (Penalty(1_000_000, 1, (2,)), WarnAt(800))))
    any_redis.cli("SET", plan.keys[watcher], text)
    async with connected(at(any_redis)) as store:
        (answer,) = await spend(store, plan)
        assert isinstance(answer, UnknownState)
        (looked,) = await spend(store, call(step("k", 9, cost=0)))
        assert isinstance(looked, StoreResult)
        assert looked.readings[0].left == 9
    assert any_redis.cli("GET", plan.keys[watcher]) == text.encode()


def broken_log(server: RedisServer) -> KeyedOp:
    """Return a limit whose log has an invalid element, which only a denial reads: the script fails."""
    log = long_step("broken", algorithm=Algorithm.SLIDING_LOG)
    elements = ["0 0", *(f"{START_US} {total}" for total in range(1, 21))]
    elements[10] = "garbage"
    server.cli("RPUSH", log.key, *elements)
    return log


async def test_an_error_reply_fails_only_its_own_run_and_is_not_retried(redis_server: RedisServer) -> None:
    log = broken_log(redis_server)
    async with connected(at(redis_server), clock=lambda: START_US) as store:
        before = calls_of(redis_server, "eval")
        (broken,) = await spend(store, call(log))
        assert isinstance(broken, StoreUnavailable)
        assert await left(store, "k") == 3

    assert calls_of(redis_server, "eval") == before


async def test_jitter_lengthens_ttls(any_redis: RedisServer) -> None:
    async with connected(at(any_redis), jitter_ms=3_600_000) as store:
        for i in range(10):
            await spend(store, call(step(f"k{i}")))

    lives = {any_redis.cli("PTTL", key) for key in any_redis.cli("KEYS", "*")}
    assert max(lives) > 120_000
    assert len(lives) > 5


async def test_a_sliding_log_is_bounded(any_redis: RedisServer) -> None:
    now_us = START_US
    elements = [f"{now_us - 30_000_000 + i} {i}" for i in range(1, 20_001)]
    any_redis.cli("RPUSH", "rl:{k}:sliding_log:60", "0 0", *elements)
    debt = call(step(limit=100, algorithm=Algorithm.SLIDING_LOG, charge=Charge.ALWAYS))
    async with connected(at(any_redis), clock=lambda: now_us) as store:
        for _ in range(3):
            (answer,) = await spend(store, debt)
            assert isinstance(answer, StoreResult)

    assert answer.readings[0].left == 100 - 20_003  # type: ignore[union-attr]
    assert any_redis.cli("LLEN", "rl:{k}:sliding_log:60") == 20_001


async def test_a_cancelled_batch_does_not_affect_others(
    any_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected(at(any_redis), timeout_s=5) as store:
        any_redis.pause()
        cancelled = asyncio.create_task(spend(store, call(long_step("k"))))
        stays = asyncio.create_task(spend(store, call(long_step("k"))))
        await asyncio.sleep(0.05)
        cancelled.cancel()
        await asyncio.sleep(0)
        any_redis.resume()
        (answer,) = await stays
        assert isinstance(answer, StoreResult)
        assert answer.readings[0].left == 1
        assert store.connected
    assert not caplog.records


async def test_a_reply_received_in_time_counts_even_if_read_late(any_redis: RedisServer) -> None:
    async with connected(at(any_redis), timeout_s=0.2) as store:
        pending = asyncio.create_task(spend(store, call(long_step("k"))))
        await asyncio.sleep(0)
        time.sleep(0.4)  # the event loop itself is late
        (answer,) = await pending

        assert isinstance(answer, StoreResult)
        assert store.connected


def has_functions(server: RedisServer) -> bool:
    """Return True for Redis 7 and Valkey."""
    try:
        server.cli("FUNCTION", "LIST")
    except redis.ResponseError:
        return False
    return True


@pytest.fixture
def with_functions(redis_server: RedisServer) -> RedisServer:
    if not has_functions(redis_server):
        pytest.skip("this server has no functions")
    return redis_server


async def take(store: RedisStore, key: str = "k") -> int:
    """Charge one of three hits, and return what is left."""
    (result,) = await spend(store, call(long_step(key)))
    assert isinstance(result, StoreResult), result
    return result.readings[0].left


class TestFunctions:
    async def test_script_is_a_function_where_the_server_has_them(self, redis_server: RedisServer) -> None:
        async with connected(at(redis_server)) as store:
            redis_server.cli("CONFIG", "RESETSTAT")
            assert [await take(store) for _ in range(3)] == [2, 1, 0]
        expected = (3, 0) if has_functions(redis_server) else (0, 3)
        assert (calls_of(redis_server, "fcall"), calls_of(redis_server, "evalsha")) == expected

    async def test_deleted_function_is_loaded_again(self, with_functions: RedisServer) -> None:
        async with connected(at(with_functions)) as store:
            with_functions.cli("CONFIG", "RESETSTAT")
            with_functions.cli("FUNCTION", "FLUSH")
            with_functions.cli("SCRIPT", "FLUSH")
            assert [await take(store) for _ in range(3)] == [2, 1, 0]
            assert store.connected
        assert {name: calls_of(with_functions, name) for name in ("fcall", "evalsha", "eval")} == {
            "fcall": 3,  # the first one failed
            "evalsha": 1,
            "eval": 1,
        }

    @pytest.mark.parametrize("forbidden", ["-fcall", "-function"])
    async def test_script_is_used_if_functions_are_not_allowed(
        self, with_functions: RedisServer, forbidden: str
    ) -> None:
        with_functions.cli("ACL", "SETUSER", "limited", "reset", "on", ">secret", "~*", "&*", "+@all", forbidden)
        async with connected(at(with_functions, username="limited", password=SecretStr("secret"))) as store:
            with_functions.cli("CONFIG", "RESETSTAT")
            assert [await take(store) for _ in range(3)] == [2, 1, 0]
            assert store.connected
        with_functions.cli("ACL", "DELUSER", "limited")
        assert calls_of(with_functions, "evalsha") == 3
        assert rejected_calls_of(with_functions, "fcall") == 0, "it is known since the connection was made"

    @pytest.mark.parametrize(("setting", "none"), [("maxmemory", "1"), ("min-replicas-to-write", "1")])
    async def test_denials_are_still_read_while_nothing_can_be_written(
        self, with_functions: RedisServer, setting: str, none: str
    ) -> None:
        """Rejected functions are no reason to drop the connection, however many runs there are."""
        exhausted = [call(long_step(f"k{number}", 1)) for number in range(300)]
        async with connected(at(with_functions)) as store:
            await spend(store, *exhausted)
            with_functions.cli("CONFIG", "SET", setting, none)
            try:
                denied = [await spend(store, *exhausted) for _ in range(2)]
                (failed,) = await spend(store, call(long_step("other")))
                (denied_again,) = await spend(store, exhausted[0])
            finally:
                with_functions.cli("CONFIG", "SET", setting, 0)
        results = [result for batch in denied for result in batch]
        assert len(results) == 600
        assert all(isinstance(result, StoreResult) and result.denied for result in [*results, denied_again])
        assert isinstance(failed, StoreUnavailable)


class ScriptedServer:
    """A server without functions that answers SCRIPT LOAD and EVALSHA with given replies; None: no reply.

    The first EVALSHA of a connection is that of the handshake.
    """

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
                    replies = {
                        b"FUNCTION": iter([b"-ERR unknown command 'FUNCTION'\r\n"]),
                        b"SCRIPT": self._loads,
                        b"EVALSHA": self._evals,
                    }.get(command[0], iter([b"+OK\r\n"]))
                    writer.write(next(replies, None) or b"")
        writer.close()


async def test_runs_that_were_answered_in_time_keep_their_results(caplog: pytest.LogCaptureFixture) -> None:
    first_run = b"*513\r\n:1\r\n" + b":0\r\n:2\r\n:0\r\n:9\r\n" * 128
    server = ScriptedServer([b"+sha\r\n"], [b"*1\r\n:1\r\n", first_run])
    async with server.serving() as address, connected(address, timeout_s=0.2) as store:
        answers = await spend(store, *(call(long_step(f"k{i}")) for i in range(400)))
        assert not store.connected  # replies after a late one would be late, too

    assert [type(answer) for answer in answers] == [StoreResult] * 128 + [StoreTimeout] * 272
    gc.collect()
    assert not caplog.records  # such as futures whose exceptions were never retrieved


async def test_reconnecting_continues_with_a_silent_server() -> None:
    probed = b"*1\r\n:1\r\n"
    server = ScriptedServer([b"+sha\r\n", None, b"+sha\r\n"], [probed, None, probed])
    async with server.serving() as address, connected(address, timeout_s=0.1, connect_timeout_s=0.1) as store:
        await spend(store, call(long_step("k")))
        await until(lambda: server.connections == 3 and store.connected)


async def test_a_connection_attempt_is_not_retried() -> None:
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


async def test_a_server_that_rejects_writes_is_not_used(any_redis: RedisServer) -> None:
    any_redis.cli("REPLICAOF", "127.0.0.1", "1")
    try:
        with pytest.raises(StoreUnavailable, match="is not usable: it is a replica"):
            await new_store(at(any_redis)).start()
    finally:
        any_redis.cli("REPLICAOF", "NO", "ONE")


async def test_a_demoted_master_is_disconnected_immediately(any_redis: RedisServer) -> None:
    async with connected(at(any_redis)) as store:
        any_redis.cli("REPLICAOF", "127.0.0.1", "1")
        (results,) = await spend(store, call(long_step("k")))
        assert isinstance(results, StoreUnavailable)
        await until(lambda: not store.connected)
        any_redis.cli("REPLICAOF", "NO", "ONE")
        await until(lambda: store.connected)
        assert await left(store, "k") == 3


async def test_three_errors_in_a_row_drop_the_connection(
    any_redis: RedisServer,
) -> None:
    async with connected(at(any_redis)) as store:
        any_redis.cli("CONFIG", "SET", "maxmemory", "1")
        try:
            for denials in range(3):
                assert store.connected, f"given up after {denials} denials"
                (results,) = await spend(store, call(long_step("k")))
                assert "OOM" in str(results)
            await until(lambda: not store.connected)
        finally:
            any_redis.cli("CONFIG", "SET", "maxmemory", "0")
        await until(lambda: store.connected)
        assert await left(store, "k") == 3


async def test_errors_that_are_not_in_a_row_keep_the_connection(any_redis: RedisServer) -> None:
    odd = broken_log(any_redis)
    async with connected(at(any_redis), clock=lambda: START_US) as store:
        for _ in range(5):
            (results,) = await spend(store, call(odd))
            assert isinstance(results, StoreUnavailable)
            await spend(store, call(long_step("k")))
        assert store.connected


async def test_a_background_start_connects_when_the_server_appears() -> None:
    server = RedisServer()
    store = new_store(at(server))
    store.start_in_background()
    (results,) = await spend(store, call(long_step("k")))
    assert isinstance(results, StoreUnavailable)
    with server:
        await until(lambda: store.connected)
        assert await left(store, "k") == 3
        await store.close()


async def test_an_idempotency_record_expires_after_its_ttl(any_redis: RedisServer) -> None:
    async with connected(at(any_redis), idempotency_s=300) as store:
        await store.spend([store.prepare(call(long_step("k"))).idempotent(b"id")])

    (record,) = any_redis.cli("KEYS", "rl:{k}:once:*")
    assert 299_000 < any_redis.cli("PTTL", record) <= 300_000


async def test_freed_keys_are_published(any_redis: RedisServer) -> None:
    received: list[bytes] = []
    with redis.Redis(port=any_redis.port) as client, client.pubsub() as listening:
        listening.subscribe("p:rl:freed")
        listening.get_message(timeout=5)
        async with connected(at(any_redis), key_prefix=b"p:") as store:
            await spend(store, call(long_step("a", 5, cost=3)))
            await spend(store, call(long_step("a", 5, cost=-1)), call(long_step("b")))
            taken = await store.spend([store.prepare(call(long_step("c", 9))).take_up_to(4)])
            assert isinstance(taken[0], StoreResult)
            await store.spend([store.prepare(call(long_step("c", 9))).refund(4, taken[0].now_us)])
            await store.forget([b"rl:{d}:gcra:60"])
        any_redis.cli("PUBLISH", "p:rl:freed", "the end")
        while b"the end" not in received:
            message = listening.get_message(timeout=5)
            assert message is not None
            received += message["data"].split(b"\n")

    assert received[:-1] == [long_step("a").key, long_step("c").key, b"rl:{d}:gcra:60"]


async def test_must_write_false_accepts_a_server_that_rejects_writes(any_redis: RedisServer) -> None:
    async with connected(at(any_redis)) as store:
        await spend(store, call(long_step("k")))
    any_redis.cli("CONFIG", "SET", "maxmemory", "1")
    try:
        async with connected(at(any_redis), must_write=False) as store:
            assert await store.forget([long_step("k").key]) == [long_step("k").key]
    finally:
        any_redis.cli("CONFIG", "SET", "maxmemory", "0")
