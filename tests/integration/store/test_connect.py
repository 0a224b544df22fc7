"""How a connection to Redis is had: sockets, TLS, users, passwords that rotate, and how it is said when it is not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop
from pydantic import SecretStr

from ratelimit_rls.errors import StoreUnavailable
from ratelimit_rls.settings.redis_address import RedisAddress, RedisTls
from ratelimit_rls.store.redis.commands import command
from ratelimit_rls.store.redis.connect import Pipe, ReplyError, connect
from tests.certificates import Authority
from tests.process import free_port
from tests.relays import SlowRelay, TlsRelay
from tests.servers import RedisServer, redis_binaries

PATIENCE_S = 10.0
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


@asynccontextmanager
async def connected(address: RedisAddress, timeout_s: float = PATIENCE_S) -> AsyncIterator[Pipe]:
    pipe = await connect(address, timeout_s)
    try:
        yield pipe
    finally:
        pipe.abort()
        await pipe.closed


async def who_am_i(address: RedisAddress) -> str:
    """As the server sees it, which it says only to those it has let in."""
    async with connected(address) as pipe:
        reply = await pipe.send(command(b"ACL", b"WHOAMI"))
        assert isinstance(reply, bytes), reply
        return reply.decode()


async def refusal(address: RedisAddress, timeout_s: float = PATIENCE_S) -> str:
    with pytest.raises(StoreUnavailable) as refused:
        await connect(address, timeout_s)
    return str(refused.value)


def at(server: RedisServer, **more: Any) -> RedisAddress:
    return RedisAddress("127.0.0.1", server.port, **more)


async def test_over_a_unix_socket(any_redis: RedisServer) -> None:
    assert await who_am_i(RedisAddress(path=str(any_redis.unix_socket))) == "default"


@pytest.fixture(scope="module")
def guarded() -> Iterator[RedisServer]:
    """A server with a password for the default user, and a user of its own."""
    with RedisServer(password="s3cret", users={"limiter": "hush"}) as server:
        yield server


async def test_with_a_password_and_as_an_acl_user(guarded: RedisServer) -> None:
    assert await who_am_i(at(guarded, password=SecretStr("s3cret"))) == "default"
    assert await who_am_i(at(guarded, username="limiter", password=SecretStr("hush"))) == "limiter"


async def test_a_user_without_the_right_password_is_told_so(guarded: RedisServer) -> None:
    said = await refusal(at(guarded, username="limiter", password=SecretStr("wrong-one")))
    assert f"cannot connect to Redis at redis://limiter@127.0.0.1:{guarded.port}" in said
    assert "wrong-one" not in said


async def test_a_password_from_a_file_acts_at_the_next_connection(guarded: RedisServer, tmp_path: Path) -> None:
    file = tmp_path / "auth"
    address = at(guarded, auth_file=str(file))
    file.write_text("limiter:hush\n")
    assert await who_am_i(address) == "limiter"

    file.write_text("rotated-in-too-early")
    said = await refusal(address)
    assert "password" in said.lower()
    assert "rotated-in-too-early" not in said

    file.write_text("s3cret\r\n")
    assert await who_am_i(address) == "default"


@pytest.mark.slow
async def test_a_password_that_changes_on_the_server_is_taken_from_the_file(tmp_path: Path) -> None:
    file = tmp_path / "auth"
    file.write_text("first")
    with RedisServer(password="first") as server:
        address = at(server, auth_file=str(file))
        async with connected(address) as old:
            server.cli("CONFIG", "SET", "requirepass", "second")
            server.password = "second"
            await refusal(address)
            file.write_text("second")
            assert await who_am_i(address) == "default"
            assert await old.send(command(b"PING")) == b"PONG"  # who is in stays in


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "cannot read the password for Redis: [Errno 2] No such file or directory: "),
        (b"\n", "auth is empty"),
        (b"\xff\xfe", "auth is not text"),
    ],
)
async def test_a_password_file_that_cannot_be_used(
    any_redis: RedisServer, tmp_path: Path, content: bytes | None, sentence: str
) -> None:
    file = tmp_path / "auth"
    if content is not None:
        file.write_bytes(content)
    assert sentence in await refusal(at(any_redis, auth_file=str(file)))


async def test_a_server_that_repeats_the_password_is_not_repeated() -> None:
    long_one = "hush" * 50  # it would be cut, so a search for the whole of it would not find it
    with RedisServer(extra=["--rename-command", "AUTH", ""]) as server:
        for password in ("hush", long_one):
            said = await refusal(at(server, password=SecretStr(password)))
            assert "unknown command" in said
            assert "hush" not in said


async def test_whoever_else_repeats_it_is_not_repeated_either() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1000)
        writer.write(b"-ERR nobody has the password hush here\r\n")
        writer.close()

    listener = await asyncio.start_server(refuse, "127.0.0.1", 0)
    address = RedisAddress("127.0.0.1", listener.sockets[0].getsockname()[1], password=SecretStr("hush"))
    said = await refusal(address)
    listener.close()
    assert said == f"cannot connect to Redis at {address}: it said no, and repeated the password"


async def test_a_database_is_chosen(any_redis: RedisServer) -> None:
    async with connected(at(any_redis, database=5)) as pipe:
        await pipe.send(command(b"SET", b"k", b"v"))
    assert any_redis.cli("GET", "k", database=5) == b"v"


async def test_nobody_there() -> None:
    port = free_port()
    assert f"cannot connect to Redis at redis://127.0.0.1:{port}: " in await refusal(RedisAddress("127.0.0.1", port))


@asynccontextmanager
async def a_mute() -> AsyncIterator[int]:
    """The port of somebody who takes connections and never says anything."""
    hung_up = asyncio.Event()

    async def be_silent(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await hung_up.wait()
        writer.close()

    server = await asyncio.start_server(be_silent, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    hung_up.set()
    server.close()


@pytest.mark.parametrize(
    "more",
    [{"password": SecretStr("hush")}, {"database": 1}, {"tls": RedisTls()}],
    ids=["authentication", "database", "handshake"],
)
async def test_every_step_is_within_the_time_there_is(more: dict[str, Any]) -> None:
    async with a_mute() as port:
        said = await refusal(RedisAddress("127.0.0.1", port, **more), timeout_s=0.05)
    assert said.endswith(f"127.0.0.1:{port}{'/1' if 'database' in more else ''} within 0.05 s")


@pytest.mark.slow
async def test_the_steps_have_that_time_together(guarded: RedisServer) -> None:
    """Each of two replies is quick enough, both are not."""
    with SlowRelay(guarded) as relay:
        relay.delay_ms = 150
        address = RedisAddress("127.0.0.1", relay.port, database=1, password=SecretStr("s3cret"))
        assert "within 0.2 s" in await refusal(address, timeout_s=0.2)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def tls(_any_redis: RedisServer, authority: Authority) -> Iterator[TlsRelay]:
    with TlsRelay(_any_redis, *authority.issue("localhost")) as relay:
        yield relay


@pytest.fixture(scope="module")
def mutual(_any_redis: RedisServer, authority: Authority) -> Iterator[TlsRelay]:
    with TlsRelay(_any_redis, *authority.issue("localhost"), client_ca=authority.ca_path) as relay:
        yield relay


def on_loop(name: str, work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=LOOPS[name]) as runner:
        runner.run(work)


@pytest.mark.parametrize("loop", LOOPS)
def test_the_connection_is_taken_over_from_tls(loop: str, tls: TlsRelay, authority: Authority) -> None:
    async def talk() -> None:
        address = RedisAddress("localhost", tls.port, tls=RedisTls(str(authority.ca_path)))
        async with connected(address) as pipe:
            long_one = b"x" * 300_000  # more than one record of TLS, both ways
            replies = [pipe.send(command(b"ECHO", long_one)), *(pipe.send(command(b"PING")) for _ in range(500))]
            assert await asyncio.gather(*replies) == [long_one, *[b"PONG"] * 500]
            last = pipe.send(command(b"QUIT"))
            assert await last == b"OK"
            await asyncio.wait_for(asyncio.shield(pipe.closed), PATIENCE_S)

    on_loop(loop, talk())


@pytest.mark.parametrize("loop", LOOPS)
def test_mutual_tls_needs_a_certificate(loop: str, mutual: TlsRelay, authority: Authority) -> None:
    ca = str(authority.ca_path)
    certificate, key = map(str, authority.issue("limiter"))

    async def talk() -> None:
        assert await who_am_i(RedisAddress("localhost", mutual.port, tls=RedisTls(ca, certificate, key))) == "default"
        without = RedisAddress("localhost", mutual.port, tls=RedisTls(ca))
        assert f"cannot connect to Redis at rediss://localhost:{mutual.port}: " in await refusal(without)

    on_loop(loop, talk())


async def test_tls_believes_only_its_ca(tls: TlsRelay) -> None:
    assert "certificate verify failed" in await refusal(RedisAddress("localhost", tls.port, tls=RedisTls()))


async def test_tls_checks_the_name_unless_told_otherwise(tls: TlsRelay, authority: Authority) -> None:
    ca = str(authority.ca_path)
    assert "certificate" in await refusal(RedisAddress("127.0.0.1", tls.port, tls=RedisTls(ca)))
    any_name = RedisTls(ca, check_hostname=False)
    assert await who_am_i(RedisAddress("127.0.0.1", tls.port, tls=any_name)) == "default"
    chain_too = RedisTls(check_hostname=False)
    assert "certificate" in await refusal(RedisAddress("127.0.0.1", tls.port, tls=chain_too))


@pytest.mark.slow
async def test_a_certificate_that_was_renewed_acts_at_the_next_connection(
    mutual: TlsRelay, authority: Authority, tmp_path: Path
) -> None:
    certificate, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    files = RedisTls(str(authority.ca_path), str(certificate), str(key))
    address = RedisAddress("localhost", mutual.port, tls=files)
    said = await refusal(address)
    assert "cannot use the TLS files for Redis" in said
    assert str(certificate) in said

    strangers = Authority(tmp_path / "strangers").issue("limiter")
    certificate.write_bytes(strangers[0].read_bytes())
    key.write_bytes(strangers[1].read_bytes())
    assert "cannot connect" in await refusal(address)

    ours = authority.issue("limiter")
    certificate.write_bytes(ours[0].read_bytes())
    key.write_bytes(ours[1].read_bytes())
    assert await who_am_i(address) == "default"


@pytest.mark.slow
async def test_tls_of_redis_itself(authority: Authority) -> None:
    binary = next((one for one in redis_binaries().values() if b"libssl" in one.read_bytes()), None)
    if binary is None:
        pytest.skip("no Redis with TLS is on this machine")
    certificate, key = map(str, authority.issue("localhost"))
    port, ca = free_port(), str(authority.ca_path)
    files = ["--tls-cert-file", certificate, "--tls-key-file", key, "--tls-ca-cert-file", ca]
    with RedisServer(binary, extra=["--tls-port", str(port), *files]):
        shown, its_key = map(str, authority.issue("limiter"))
        assert await who_am_i(RedisAddress("localhost", port, tls=RedisTls(ca, shown, its_key))) == "default"
        without = RedisAddress("localhost", port, tls=RedisTls(ca))
        assert "cannot connect" in await refusal(without)


async def test_what_is_published_goes_to_the_subscriber(redis_server: RedisServer) -> None:
    pushed: asyncio.Queue[Any] = asyncio.Queue()
    async with connected(at(redis_server)) as pipe:
        pipe.on_push = pushed.put_nowait
        assert await pipe.send(command(b"SUBSCRIBE", b"news")) == [b"subscribe", b"news", 1]
        redis_server.cli("PUBLISH", "news", "one")
        assert await asyncio.wait_for(pushed.get(), PATIENCE_S) == [b"message", b"news", b"one"]


async def test_news_between_a_command_and_its_reply_is_not_the_reply(any_redis: RedisServer) -> None:
    pushed: list[Any] = []
    with SlowRelay(any_redis) as relay:
        async with connected(RedisAddress("127.0.0.1", relay.port)) as pipe:
            pipe.on_push = pushed.append
            await pipe.send(command(b"SUBSCRIBE", b"news"))
            relay.delay_ms = 50
            any_redis.cli("PUBLISH", "news", "one")
            assert await pipe.send(command(b"PING")) == [b"pong", b""]
    assert pushed == [[b"message", b"news", b"one"]]


async def test_what_nobody_asked_for_ends_the_connection(
    any_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected(at(any_redis)) as pipe:
        pipe._transport.write(command(b"PING"))
        await asyncio.wait_for(asyncio.shield(pipe.closed), PATIENCE_S)
        with pytest.raises(StoreUnavailable):
            await pipe.send(command(b"PING"))
    assert not caplog.records  # as of an exception that nobody expected


async def test_an_error_is_a_reply(any_redis: RedisServer) -> None:
    async with connected(at(any_redis)) as pipe:
        assert isinstance(await pipe.send(command(b"NOSUCH")), ReplyError)
