"""Keys of issuers from a file or a URL: rotation without a gap, and failures."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from ratelimit_rls.core.identity import Identity
from ratelimit_rls.errors import SettingsError
from ratelimit_rls.identity import jwks_source
from ratelimit_rls.identity.issuers import KeysAtUrl, KeysInFile
from ratelimit_rls.identity.jwks import MAX_BYTES
from ratelimit_rls.identity.jwks_fetch import fetch
from ratelimit_rls.identity.jwks_source import MIN_EARLY_FETCH_INTERVAL_S, JwksSource
from ratelimit_rls.identity.jwt import JwtVerifier
from tests.support.jwt_factory import NOW, issuer, jwk, key_set, mint, private_key

OLD, NEW = private_key("ES256"), private_key("ES256", 2)
ONLY_OLD = key_set(jwk(OLD, kid="1"))
BOTH = key_set(jwk(OLD, kid="1"), jwk(NEW, kid="2"))
ONLY_NEW = key_set(jwk(NEW, kid="2"))
ALICE = Identity("alice")


class Publisher(ThreadingHTTPServer):
    """HTTP server that publishes keys: `content` is the response, `requests` counts requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.content = ONLY_OLD
        self.status = 200
        self.location = ""
        self.requests = 0
        self.may_answer = threading.Event()
        self.may_answer.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/keys"

    def keys(self, refresh_s: float = 3600, timeout_s: float = 5) -> KeysAtUrl:
        return KeysAtUrl(self.url, refresh_s, timeout_s)


class _Handler(BaseHTTPRequestHandler):
    server: Publisher

    def do_GET(self) -> None:
        self.server.requests += 1
        self.server.may_answer.wait(10)
        self.send_response(self.server.status)
        if self.server.location:
            self.send_header("Location", self.server.location)
        self.send_header("Content-Length", str(len(self.server.content)))
        self.end_headers()
        self.wfile.write(self.server.content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(autouse=True, scope="module")
def _authorities() -> Iterator[None]:
    """Read the authorities of the system once, and not for every fetch, which takes longer than the fetch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", cache(ssl.create_default_context))
        yield


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    with Publisher() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.may_answer.set()
        server.shutdown()
        thread.join()


@asynccontextmanager
async def running(tokens: JwtVerifier) -> AsyncIterator[JwtVerifier]:
    await tokens.start()
    try:
        yield tokens
    finally:
        await tokens.close()


async def until_valid(tokens: JwtVerifier, text: str) -> None:
    async with asyncio.timeout(10):
        while tokens.identify(text, NOW) is None:
            await asyncio.sleep(0.005)


async def test_keys_rotate_without_a_gap(publisher: Publisher, tmp_path: Path) -> None:
    before, after = mint(key=OLD, kid="1"), mint(key=NEW, kid="2")
    async with running(JwtVerifier([issuer(tmp_path, keys=publisher.keys())])) as tokens:
        assert tokens.identify(before, NOW) == ALICE
        assert tokens.identify(after, NOW) is None  # not published yet

        publisher.content = BOTH
        assert tokens.identify(mint(key=NEW, kid="2", jti="another"), NOW) is None  # triggers a fetch
        await until_valid(tokens, after)

        assert tokens.identify(before, NOW) == ALICE
        assert tokens.keys() == {"one": 2}


async def test_removed_key_is_rejected(publisher: Publisher, tmp_path: Path) -> None:
    publisher.content = BOTH
    before, after = mint(key=OLD, kid="1"), mint(key=NEW, kid="2")
    source_of = JwtVerifier([issuer(tmp_path, keys=publisher.keys(refresh_s=0.01))])
    async with running(source_of) as tokens:
        assert tokens.identify(before, NOW) == ALICE

        publisher.content = ONLY_NEW
        async with asyncio.timeout(10):
            while tokens.identify(before, NOW) is not None:
                await asyncio.sleep(0.005)

        assert tokens.identify(after, NOW) == ALICE


async def test_unknown_keys_cause_one_early_fetch(publisher: Publisher, tmp_path: Path) -> None:
    async with running(JwtVerifier([issuer(tmp_path, keys=publisher.keys())])) as tokens:
        publisher.content = BOTH
        for number in range(50):
            tokens.identify(mint(kid=f"invented {number}"), NOW)
        await until_valid(tokens, mint(key=NEW, kid="2"))
        assert publisher.requests == 2

        (source,) = tokens._sources.values()
        now_s = asyncio.get_running_loop().time()
        assert source.due_s() > now_s + 100
        tokens.identify(mint(kid="one more"), NOW)

        assert now_s < source.due_s() <= now_s + MIN_EARLY_FETCH_INTERVAL_S


async def test_fetch_interval_has_jitter_and_is_short_after_a_failure(publisher: Publisher, tmp_path: Path) -> None:
    source = JwksSource(issuer(tmp_path, keys=publisher.keys(refresh_s=100)), lambda: None)
    clock = asyncio.get_running_loop().time

    await source.fetch_initial()
    assert 79 < source.due_s() - clock() < 100

    publisher.status = 500
    pauses = []
    for _ in range(9):
        await source.fetch_initial()
        pauses.append(source.due_s() - clock())
    assert pauses[0] < 1
    assert pauses[3] > 5
    assert 79 < pauses[-1] < 100


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"status": 500}, "the server responded 500 Internal Server Error"),
        ({"status": 404}, "the server responded 404 Not Found"),
        ({"content": b"<html>"}, "is not JSON"),
        ({"content": b'{"keys": []}'}, "has no key for ES256"),
        ({"content": b" " * (MAX_BYTES + 1)}, "is larger than 1 MiB"),
        ({"status": 302, "location": "http://keys.example.com/"}, "must begin with https://"),
        ({"status": 302, "location": "file:///etc/passwd"}, "is not allowed"),
    ],
)
async def test_failure_is_logged_once_and_keeps_the_keys(
    publisher: Publisher, tmp_path: Path, broken: dict[str, Any], message: str
) -> None:
    changes = []
    source = JwksSource(issuer(tmp_path, keys=publisher.keys()), lambda: changes.append(1))
    await source.fetch_initial()
    for name, value in broken.items():
        setattr(publisher, name, value)

    with capture_logs() as logs:
        await source.fetch_initial()
        await source.fetch_initial()
        publisher.status, publisher.content, publisher.location = 200, ONLY_OLD, ""
        await source.fetch_initial()

    assert [line["log_level"] for line in logs] == ["warning", "info"]
    assert message in logs[0]["error"]
    assert logs[0]["keys"] == len(source.keys.keys) == 1
    assert changes == [1]  # equal keys are not a change


async def test_allowed_redirect_is_followed(publisher: Publisher, tmp_path: Path) -> None:
    with Publisher() as other:
        thread = threading.Thread(target=other.serve_forever, args=(0.01,))
        thread.start()
        publisher.status, publisher.location = 302, other.url
        source = JwksSource(issuer(tmp_path, keys=publisher.keys()), lambda: None)

        await source.fetch_initial()

        other.shutdown()
        thread.join()
    assert len(source.keys.keys) == 1


async def test_redirects_are_bounded(publisher: Publisher, tmp_path: Path) -> None:
    publisher.status, publisher.location = 302, publisher.url
    with capture_logs() as logs:
        await JwksSource(issuer(tmp_path, keys=publisher.keys()), lambda: None).fetch_initial()

    assert "the server redirected more than 10 times" in logs[0]["error"]
    assert publisher.requests == 11


async def test_unreachable_url_rejects_tokens_but_does_not_fail(tmp_path: Path) -> None:
    unreachable = KeysAtUrl("http://127.0.0.1:1/keys")
    with capture_logs() as logs:
        async with running(JwtVerifier([issuer(tmp_path, keys=unreachable)])) as tokens:
            assert tokens.identify(mint(), NOW) is None
            assert tokens.rejected["key"] == 1
            assert tokens.keys() == {"one": 0}

    assert "Connection refused" in logs[0]["error"]


async def test_unresponsive_server_does_not_block(publisher: Publisher, tmp_path: Path) -> None:
    publisher.may_answer.clear()
    source = JwksSource(issuer(tmp_path, keys=publisher.keys(timeout_s=0.05)), lambda: None)

    with capture_logs() as logs:
        await source.fetch_initial()

    assert "timed out" in logs[0]["error"]

    fetching = asyncio.create_task(
        JwksSource(issuer(tmp_path, keys=publisher.keys(timeout_s=60)), lambda: None).fetch_initial()
    )
    await asyncio.sleep(0)
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "jwks-fetch")


def _trickle(listener: socket.socket, start: bytes, ends: threading.Event) -> None:
    """Send a byte now and then, so that no single wait is long, on each connection until the test ends."""
    while not ends.is_set():
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection, suppress(OSError):
            connection.sendall(start)
            while not ends.wait(0.02):
                connection.sendall(b"x")


@pytest.mark.parametrize(
    "start",
    [b"HTTP/1.1 200 ", b"HTTP/1.1 200 OK\r\nX-A: ", b"HTTP/1.1 200 OK\r\n\r\n", b"\x16\x03\x03\x40\x00"],
    ids=["status", "header", "body", "handshake"],
)
async def test_slow_response_is_bounded_by_timeout(start: bytes, tmp_path: Path) -> None:
    ends = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_trickle, args=(listener, start, ends), daemon=True)
        thread.start()
        scheme = "https" if start.startswith(b"\x16") else "http"
        place = KeysAtUrl(f"{scheme}://127.0.0.1:{listener.getsockname()[1]}/keys", timeout_s=0.3)
        began_s = time.monotonic()
        try:
            with pytest.raises(TimeoutError, match=r"timed out: the response was not complete within 0\.3 s"):
                fetch(place.url, place.timeout_s)
            assert time.monotonic() - began_s < 2

            ends.set()  # of the first connection
            thread.join()
            ends.clear()
            thread = threading.Thread(target=_trickle, args=(listener, start, ends), daemon=True)
            thread.start()
            began_s = time.monotonic()
            with capture_logs() as logs:
                await JwksSource(issuer(tmp_path, keys=place), lambda: None).fetch_initial()
            assert time.monotonic() - began_s < 2
            assert "timed out" in logs[0]["error"]
        finally:
            ends.set()
            thread.join()
    async with asyncio.timeout(5):  # no thread is left
        while {"jwks-fetch", "jwks-fetch-deadline"} & {one.name for one in threading.enumerate()}:
            await asyncio.sleep(0.01)


async def test_start_is_bounded_by_timeout_even_during_dns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """E.g. for DNS resolution, which cannot be interrupted."""
    may_end = threading.Event()
    monkeypatch.setattr(jwks_source, "TIMEOUT_GRACE_S", 0.05)
    monkeypatch.setattr(jwks_source, "fetch", lambda *_: may_end.wait(30))
    place = KeysAtUrl("http://127.0.0.1:1/keys", timeout_s=0.05)
    began_s = time.monotonic()
    await JwksSource(issuer(tmp_path, keys=place), lambda: None).fetch_initial()
    assert time.monotonic() - began_s < 5
    may_end.set()


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check files without delay."""
    monkeypatch.setattr(jwks_source, "FILE_POLL_S", 0.005)


@pytest.mark.usefixtures("quickly")
async def test_changed_key_file_is_reloaded(tmp_path: Path) -> None:
    one = issuer(tmp_path)
    assert isinstance(one.keys, KeysInFile)
    path = one.keys.path
    before, after = mint(key=OLD, kid="1"), mint(key=NEW, kid="2")
    with capture_logs() as logs:
        async with running(JwtVerifier([one])) as tokens:
            assert tokens.identify(before, NOW) == ALICE
            assert tokens.identify(after, NOW) is None

            path.write_bytes(BOTH[:20])  # incomplete
            async with asyncio.timeout(10):
                while not logs:
                    await asyncio.sleep(0.005)
            assert tokens.identify(before, NOW) == ALICE

            replacement = tmp_path / "new"
            replacement.write_bytes(BOTH)
            os.replace(replacement, path)
            await until_valid(tokens, after)
            assert tokens.identify(before, NOW) == ALICE

    assert [line["log_level"] for line in logs] == ["warning", "info"]


@pytest.mark.usefixtures("quickly")
async def test_changed_secret_file_is_reloaded(tmp_path: Path) -> None:
    one = issuer(tmp_path, "HS256")
    assert isinstance(one.keys, KeysInFile)
    another = "another secret of thirty-two bytes or more"
    async with running(JwtVerifier([one])) as tokens:
        assert tokens.identify(mint("HS256"), NOW) == ALICE

        one.keys.path.write_text(another)
        await until_valid(tokens, mint("HS256", another))

        assert tokens.identify(mint("HS256"), NOW) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read: No such file"), (b"{}", "no list 'keys'"), (b" " * (MAX_BYTES + 1), "larger than")],
)
def test_unusable_key_file_is_rejected_at_start(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "keys.json"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(SettingsError, match="RLS_JWT_ISSUERS: the keys of one: .*keys.json .*" + message):
        JwtVerifier([issuer(tmp_path, keys=KeysInFile(path))])
