"""Connecting to Redis: sockets, TLS, users, rotated passwords, and error messages."""

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
from ratelimit_rls.store.redis.connection import PipelinedConnection, ReplyError, connect
from ratelimit_rls.store.redis.resp import command
from tests.support.certificates import Authority
from tests.support.ports import free_port
from tests.support.servers import RedisServer, redis_binaries
from tests.support.tcp_proxy import SlowProxy, TlsProxy

PATIENCE_S = 10.0
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


@asynccontextmanager
async def connected(address: RedisAddress, timeout_s: float = PATIENCE_S) -> AsyncIterator[PipelinedConnection]:
    connection = await connect(address, timeout_s)
    try:
        yield connection
    finally:
        connection.abort()
        await connection.closed


async def who_am_i(address: RedisAddress) -> str:
    """Return the user name as the server sees it, which needs a successful login."""
    async with connected(address) as connection:
        reply = await connection.send(command(b"ACL", b"WHOAMI"))
        assert isinstance(reply, bytes), reply
        return reply.decode()


async def connect_error(address: RedisAddress, timeout_s: float = PATIENCE_S) -> str:
    with pytest.raises(StoreUnavailable) as raised:
        await connect(address, timeout_s)
    return str(raised.value)


def at(server: RedisServer, **more: Any) -> RedisAddress:
    return RedisAddress("127.0.0.1", server.port, **more)


async def test_connect_over_a_unix_socket(any_redis: RedisServer) -> None:
    assert await who_am_i(RedisAddress(path=str(any_redis.unix_socket))) == "default"


@pytest.fixture(scope="module")
def guarded() -> Iterator[RedisServer]:
    """A server with a password for the default user, and a user of its own."""
    with RedisServer(password="s3cret", users={"limiter": "hush"}) as server:
        yield server


async def test_connect_with_a_password_and_as_an_acl_user(guarded: RedisServer) -> None:
    assert await who_am_i(at(guarded, password=SecretStr("s3cret"))) == "default"
    assert await who_am_i(at(guarded, username="limiter", password=SecretStr("hush"))) == "limiter"


async def test_a_wrong_password_is_reported_without_showing_it(guarded: RedisServer) -> None:
    message = await connect_error(at(guarded, username="limiter", password=SecretStr("wrong-one")))
    assert f"cannot connect to Redis at redis://limiter@127.0.0.1:{guarded.port}" in message
    assert "wrong-one" not in message


async def test_a_changed_password_file_applies_to_the_next_connection(guarded: RedisServer, tmp_path: Path) -> None:
    file = tmp_path / "auth"
    address = at(guarded, auth_file=str(file))
    file.write_text("limiter:hush\n")
    assert await who_am_i(address) == "limiter"

    file.write_text("rotated-in-too-early")
    message = await connect_error(address)
    assert "password" in message.lower()
    assert "rotated-in-too-early" not in message

    file.write_text("s3cret\r\n")
    assert await who_am_i(address) == "default"


@pytest.mark.slow
async def test_a_password_changed_on_the_server_is_read_from_the_file(tmp_path: Path) -> None:
    file = tmp_path / "auth"
    file.write_text("first")
    with RedisServer(password="first") as server:
        address = at(server, auth_file=str(file))
        async with connected(address) as old:
            server.cli("CONFIG", "SET", "requirepass", "second")
            server.password = "second"
            await connect_error(address)
            file.write_text("second")
            assert await who_am_i(address) == "default"
            assert await old.send(command(b"PING")) == b"PONG"  # existing connections stay authenticated


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "cannot read the password for Redis: [Errno 2] No such file or directory: "),
        (b"\n", "auth is empty"),
        (b"\xff\xfe", "auth is not text"),
    ],
)
async def test_an_unusable_password_file_is_reported(
    any_redis: RedisServer, tmp_path: Path, content: bytes | None, sentence: str
) -> None:
    file = tmp_path / "auth"
    if content is not None:
        file.write_bytes(content)
    assert sentence in await connect_error(at(any_redis, auth_file=str(file)))


async def test_an_error_that_repeats_the_password_is_redacted() -> None:
    long_one = "hush" * 50  # the server would truncate it, so a search for all of it would fail
    with RedisServer(extra=["--rename-command", "AUTH", ""]) as server:
        for password in ("hush", long_one):
            message = await connect_error(at(server, password=SecretStr(password)))
            assert "unknown command" in message
            assert "hush" not in message


async def test_any_error_that_contains_the_password_is_redacted() -> None:
    async def deny(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1000)
        writer.write(b"-ERR nobody has the password hush here\r\n")
        writer.close()

    listener = await asyncio.start_server(deny, "127.0.0.1", 0)
    address = RedisAddress("127.0.0.1", listener.sockets[0].getsockname()[1], password=SecretStr("hush"))
    message = await connect_error(address)
    listener.close()
    assert message == f"cannot connect to Redis at {address}: the server's error message contains the password"


async def test_the_database_is_selected(any_redis: RedisServer) -> None:
    async with connected(at(any_redis, database=5)) as connection:
        await connection.send(command(b"SET", b"k", b"v"))
    assert any_redis.cli("GET", "k", database=5) == b"v"


async def test_a_closed_port_is_reported() -> None:
    port = free_port()
    assert f"cannot connect to Redis at redis://127.0.0.1:{port}: " in await connect_error(
        RedisAddress("127.0.0.1", port)
    )


@asynccontextmanager
async def a_mute() -> AsyncIterator[int]:
    """Return the port of a server that accepts connections and never responds."""
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
async def test_every_step_of_connecting_has_a_timeout(more: dict[str, Any]) -> None:
    async with a_mute() as port:
        message = await connect_error(RedisAddress("127.0.0.1", port, **more), timeout_s=0.05)
    assert message.endswith(f"127.0.0.1:{port}{'/1' if 'database' in more else ''} within 0.05 s")


@pytest.mark.slow
async def test_the_timeout_covers_all_steps_together(guarded: RedisServer) -> None:
    """Each of two replies is fast enough, both together are not."""
    with SlowProxy(guarded) as relay:
        relay.delay_ms = 150
        address = RedisAddress("127.0.0.1", relay.port, database=1, password=SecretStr("s3cret"))
        assert "within 0.2 s" in await connect_error(address, timeout_s=0.2)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def tls(_any_redis: RedisServer, authority: Authority) -> Iterator[TlsProxy]:
    with TlsProxy(_any_redis, *authority.issue("localhost")) as relay:
        yield relay


@pytest.fixture(scope="module")
def mutual(_any_redis: RedisServer, authority: Authority) -> Iterator[TlsProxy]:
    with TlsProxy(_any_redis, *authority.issue("localhost"), client_ca=authority.ca_path) as relay:
        yield relay


def on_loop(name: str, work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=LOOPS[name]) as runner:
        runner.run(work)


@pytest.mark.parametrize("loop", LOOPS)
def test_the_connection_is_taken_over_from_tls(loop: str, tls: TlsProxy, authority: Authority) -> None:
    async def talk() -> None:
        address = RedisAddress("localhost", tls.port, tls=RedisTls(str(authority.ca_path)))
        async with connected(address) as connection:
            long_one = b"x" * 300_000  # more than one TLS record in both directions
            replies = [
                connection.send(command(b"ECHO", long_one)),
                *(connection.send(command(b"PING")) for _ in range(500)),
            ]
            assert await asyncio.gather(*replies) == [long_one, *[b"PONG"] * 500]
            last = connection.send(command(b"QUIT"))
            assert await last == b"OK"
            await asyncio.wait_for(asyncio.shield(connection.closed), PATIENCE_S)

    on_loop(loop, talk())


@pytest.mark.parametrize("loop", LOOPS)
def test_mutual_tls_needs_a_certificate(loop: str, mutual: TlsProxy, authority: Authority) -> None:
    ca = str(authority.ca_path)
    certificate, key = map(str, authority.issue("limiter"))

    async def talk() -> None:
        assert await who_am_i(RedisAddress("localhost", mutual.port, tls=RedisTls(ca, certificate, key))) == "default"
        without = RedisAddress("localhost", mutual.port, tls=RedisTls(ca))
        assert f"cannot connect to Redis at rediss://localhost:{mutual.port}: " in await connect_error(without)

    on_loop(loop, talk())


async def test_tls_trusts_only_its_ca(tls: TlsProxy) -> None:
    assert "certificate verify failed" in await connect_error(RedisAddress("localhost", tls.port, tls=RedisTls()))


async def test_tls_checks_the_host_name_unless_disabled(tls: TlsProxy, authority: Authority) -> None:
    ca = str(authority.ca_path)
    assert "certificate" in await connect_error(RedisAddress("127.0.0.1", tls.port, tls=RedisTls(ca)))
    any_name = RedisTls(ca, check_hostname=False)
    assert await who_am_i(RedisAddress("127.0.0.1", tls.port, tls=any_name)) == "default"
    chain_too = RedisTls(check_hostname=False)
    assert "certificate" in await connect_error(RedisAddress("127.0.0.1", tls.port, tls=chain_too))


@pytest.mark.slow
async def test_a_renewed_certificate_applies_to_the_next_connection(
    mutual: TlsProxy, authority: Authority, tmp_path: Path
) -> None:
    certificate, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    files = RedisTls(str(authority.ca_path), str(certificate), str(key))
    address = RedisAddress("localhost", mutual.port, tls=files)
    message = await connect_error(address)
    assert "cannot use the TLS files for Redis" in message
    assert str(certificate) in message

    strangers = Authority(tmp_path / "strangers").issue("limiter")
    certificate.write_bytes(strangers[0].read_bytes())
    key.write_bytes(strangers[1].read_bytes())
    assert "cannot connect" in await connect_error(address)

    issued = authority.issue("limiter")
    certificate.write_bytes(issued[0].read_bytes())
    key.write_bytes(issued[1].read_bytes())
    assert await who_am_i(address) == "default"


@pytest.mark.slow
async def test_tls_implemented_by_redis(authority: Authority) -> None:
    binary = next((one for one in redis_binaries().values() if b"libssl" in one.read_bytes()), None)
    if binary is None:
        pytest.skip("no Redis with TLS is on this machine")
    certificate, key = map(str, authority.issue("localhost"))
    port, ca = free_port(), str(authority.ca_path)
    files = ["--tls-cert-file", certificate, "--tls-key-file", key, "--tls-ca-cert-file", ca]
    with RedisServer(binary, extra=["--tls-port", str(port), *files]):
        client_certificate, its_key = map(str, authority.issue("limiter"))
        assert (
            await who_am_i(RedisAddress("localhost", port, tls=RedisTls(ca, client_certificate, its_key))) == "default"
        )
        without = RedisAddress("localhost", port, tls=RedisTls(ca))
        assert "cannot connect" in await connect_error(without)


async def test_published_messages_reach_the_subscriber(redis_server: RedisServer) -> None:
    pushed: asyncio.Queue[Any] = asyncio.Queue()
    async with connected(at(redis_server)) as connection:
        connection.on_push = pushed.put_nowait
        assert await connection.send(command(b"SUBSCRIBE", b"news")) == [b"subscribe", b"news", 1]
        redis_server.cli("PUBLISH", "news", "one")
        assert await asyncio.wait_for(pushed.get(), PATIENCE_S) == [b"message", b"news", b"one"]


async def test_a_message_before_a_reply_is_not_taken_for_the_reply(any_redis: RedisServer) -> None:
    pushed: list[Any] = []
    with SlowProxy(any_redis) as relay:
        async with connected(RedisAddress("127.0.0.1", relay.port)) as connection:
            connection.on_push = pushed.append
            await connection.send(command(b"SUBSCRIBE", b"news"))
            relay.delay_ms = 50
            any_redis.cli("PUBLISH", "news", "one")
            assert await connection.send(command(b"PING")) == [b"pong", b""]
    assert pushed == [[b"message", b"news", b"one"]]


async def test_an_unsolicited_reply_ends_the_connection(
    any_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected(at(any_redis)) as connection:
        connection._transport.write(command(b"PING"))
        await asyncio.wait_for(asyncio.shield(connection.closed), PATIENCE_S)
        with pytest.raises(StoreUnavailable):
            await connection.send(command(b"PING"))
    assert not caplog.records  # such as an unhandled exception


async def test_an_error_reply_is_returned_as_a_value(any_redis: RedisServer) -> None:
    async with connected(at(any_redis)) as connection:
        assert isinstance(await connection.send(command(b"NOSUCH")), ReplyError)
