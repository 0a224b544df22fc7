"""Keys of issuers from where they are published: rotation without a gap, and what happens when that place fails."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from ratelimit_rls.core.identity import Identity
from ratelimit_rls.errors import SettingsError
from ratelimit_rls.identity import key_source
from ratelimit_rls.identity.issuers import KeysAtUrl, KeysInFile
from ratelimit_rls.identity.jwt import Tokens
from ratelimit_rls.identity.key_source import EARLY_PAUSE_S, MOST_BYTES, KeySource, fetch
from tests.unit.identity.minted import NOW, issuer, jwk, key_set, mint, private_key

OLD, NEW = private_key("ES256"), private_key("ES256", 2)
ONLY_OLD = key_set(jwk(OLD, kid="1"))
BOTH = key_set(jwk(OLD, kid="1"), jwk(NEW, kid="2"))
ONLY_NEW = key_set(jwk(NEW, kid="2"))
ALICE = Identity("alice")


class Publisher(ThreadingHTTPServer):
    """A place where keys are published: `content` is what it says, and `asked` counts."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.content = ONLY_OLD
        self.status = 200
        self.location = ""
        self.asked = 0
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
        self.server.asked += 1
        self.server.may_answer.wait(10)
        self.send_response(self.server.status)
        if self.server.location:
            self.send_header("Location", self.server.location)
        self.send_header("Content-Length", str(len(self.server.content)))
        self.end_headers()
        self.wfile.write(self.server.content)

    def log_message(self, *_: Any) -> None:
        pass


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
async def running(tokens: Tokens) -> AsyncIterator[Tokens]:
    await tokens.start()
    try:
        yield tokens
    finally:
        await tokens.close()


async def until_valid(tokens: Tokens, text: str) -> None:
    async with asyncio.timeout(10):
        while tokens.identify(text, NOW) is None:
            await asyncio.sleep(0.005)


async def test_keys_rotate_without_a_gap(publisher: Publisher, tmp_path: Path) -> None:
    before, after = mint(key=OLD, kid="1"), mint(key=NEW, kid="2")
    async with running(Tokens([issuer(tmp_path, keys=publisher.keys())])) as tokens:
        assert tokens.identify(before, NOW) == ALICE
        assert tokens.identify(after, NOW) is None  # nobody has published it yet

        publisher.content = BOTH
        assert tokens.identify(mint(key=NEW, kid="2", jti="another"), NOW) is None  # and this one asks for it
        await until_valid(tokens, after)

        assert tokens.identify(before, NOW) == ALICE
        assert tokens.keys() == {"one": 2}


async def test_a_key_that_is_not_published_any_more_is_not_believed_any_more(
    publisher: Publisher, tmp_path: Path
) -> None:
    publisher.content = BOTH
    before, after = mint(key=OLD, kid="1"), mint(key=NEW, kid="2")
    source_of = Tokens([issuer(tmp_path, keys=publisher.keys(refresh_s=0.01))])
    async with running(source_of) as tokens:
        assert tokens.identify(before, NOW) == ALICE

        publisher.content = ONLY_NEW
        async with asyncio.timeout(10):
            while tokens.identify(before, NOW) is not None:
                await asyncio.sleep(0.005)

        assert tokens.identify(after, NOW) == ALICE


async def test_unknown_keys_make_us_ask_once(publisher: Publisher, tmp_path: Path) -> None:
    async with running(Tokens([issuer(tmp_path, keys=publisher.keys())])) as tokens:
        publisher.content = BOTH
        for number in range(50):
            tokens.identify(mint(kid=f"invented {number}"), NOW)
        await until_valid(tokens, mint(key=NEW, kid="2"))
        assert publisher.asked == 2

        (source,) = tokens._sources.values()
        now_s = asyncio.get_running_loop().time()
        assert source.due_s() > now_s + 100
        tokens.identify(mint(kid="one more"), NOW)

        assert now_s < source.due_s() <= now_s + EARLY_PAUSE_S


async def test_the_next_fetch_is_a_little_early_and_soon_after_a_failure(publisher: Publisher, tmp_path: Path) -> None:
    source = KeySource(issuer(tmp_path, keys=publisher.keys(refresh_s=100)), lambda: None)
    clock = asyncio.get_running_loop().time

    await source.first()
    assert 79 < source.due_s() - clock() < 100

    publisher.status = 500
    pauses = []
    for _ in range(9):
        await source.first()
        pauses.append(source.due_s() - clock())
    assert pauses[0] < 1
    assert pauses[3] > 5
    assert 79 < pauses[-1] < 100


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        ({"status": 500}, "the answer is 500 Internal Server Error"),
        ({"status": 404}, "the answer is 404 Not Found"),
        ({"content": b"<html>"}, "is not JSON"),
        ({"content": b'{"keys": []}'}, "has no key for ES256"),
        ({"content": b" " * (MOST_BYTES + 1)}, "is larger than 1 MiB"),
        ({"status": 302, "location": "http://keys.example.com/"}, "must begin with https://"),
        ({"status": 302, "location": "file:///etc/passwd"}, "is not allowed"),
    ],
)
async def test_whatever_fails_is_told_once_and_leaves_the_keys(
    publisher: Publisher, tmp_path: Path, broken: dict[str, Any], told: str
) -> None:
    forgotten = []
    source = KeySource(issuer(tmp_path, keys=publisher.keys()), lambda: forgotten.append(1))
    await source.first()
    for name, value in broken.items():
        setattr(publisher, name, value)

    with capture_logs() as logs:
        await source.first()
        await source.first()
        publisher.status, publisher.content, publisher.location = 200, ONLY_OLD, ""
        await source.first()

    assert [line["log_level"] for line in logs] == ["warning", "info"]
    assert told in logs[0]["error"]
    assert logs[0]["keys"] == len(source.keys.keys) == 1
    assert forgotten == [1]  # the same keys are no change


async def test_a_redirect_to_a_place_that_is_allowed_is_followed(publisher: Publisher, tmp_path: Path) -> None:
    with Publisher() as other:
        thread = threading.Thread(target=other.serve_forever, args=(0.01,))
        thread.start()
        publisher.status, publisher.location = 302, other.url
        source = KeySource(issuer(tmp_path, keys=publisher.keys()), lambda: None)

        await source.first()

        other.shutdown()
        thread.join()
    assert len(source.keys.keys) == 1


async def test_without_anybody_there_every_token_is_refused_and_all_else_goes_on(tmp_path: Path) -> None:
    nobody = KeysAtUrl("http://127.0.0.1:1/keys")
    with capture_logs() as logs:
        async with running(Tokens([issuer(tmp_path, keys=nobody)])) as tokens:
            assert tokens.identify(mint(), NOW) is None
            assert tokens.refused["key"] == 1
            assert tokens.keys() == {"one": 0}

    assert "Connection refused" in logs[0]["error"]


async def test_who_does_not_answer_does_not_hold_us_up(publisher: Publisher, tmp_path: Path) -> None:
    publisher.may_answer.clear()
    source = KeySource(issuer(tmp_path, keys=publisher.keys(timeout_s=0.05)), lambda: None)

    with capture_logs() as logs:
        await source.first()

    assert "timed out" in logs[0]["error"]

    fetching = asyncio.create_task(KeySource(issuer(tmp_path, keys=publisher.keys(timeout_s=60)), lambda: None).first())
    await asyncio.sleep(0)
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "keys of an issuer")


def _trickle(listener: socket.socket, start: bytes, ends: threading.Event) -> None:
    """A byte now and then, so that no single wait is long; each connection until the test ends."""
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
async def test_who_answers_a_byte_at_a_time_is_given_no_more_than_the_timeout(start: bytes, tmp_path: Path) -> None:
    ends = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_trickle, args=(listener, start, ends), daemon=True)
        thread.start()
        scheme = "https" if start.startswith(b"\x16") else "http"
        place = KeysAtUrl(f"{scheme}://127.0.0.1:{listener.getsockname()[1]}/keys", timeout_s=0.3)
        began_s = time.monotonic()
        try:
            with pytest.raises(TimeoutError, match=r"timed out: it did not come whole within 0\.3 s"):
                fetch(place.url, place.timeout_s)
            assert time.monotonic() - began_s < 2

            ends.set()  # of the first connection
            thread.join()
            ends.clear()
            thread = threading.Thread(target=_trickle, args=(listener, start, ends), daemon=True)
            thread.start()
            began_s = time.monotonic()
            with capture_logs() as logs:
                await KeySource(issuer(tmp_path, keys=place), lambda: None).first()
            assert time.monotonic() - began_s < 2
            assert "timed out" in logs[0]["error"]
        finally:
            ends.set()
            thread.join()
    async with asyncio.timeout(5):  # nothing is left waiting
        while {"keys of an issuer", "deadline of a fetch"} & {one.name for one in threading.enumerate()}:
            await asyncio.sleep(0.01)


async def test_the_start_waits_no_longer_than_that_whatever_the_fetch_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a name that is not found, say: nothing but the system can end that."""
    may_end = threading.Event()
    monkeypatch.setattr(key_source, "GRACE_S", 0.05)
    monkeypatch.setattr(key_source, "fetch", lambda *_: may_end.wait(30))
    place = KeysAtUrl("http://127.0.0.1:1/keys", timeout_s=0.05)
    began_s = time.monotonic()
    await KeySource(issuer(tmp_path, keys=place), lambda: None).first()
    assert time.monotonic() - began_s < 5
    may_end.set()


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are looked at all the time."""
    monkeypatch.setattr(key_source, "FILE_POLL_S", 0.005)


@pytest.mark.usefixtures("quickly")
async def test_a_file_of_keys_is_read_again_when_it_changes(tmp_path: Path) -> None:
    one = issuer(tmp_path)
    assert isinstance(one.keys, KeysInFile)
    path = one.keys.path
    before, after = mint(key=OLD, kid="1"), mint(key=NEW, kid="2")
    with capture_logs() as logs:
        async with running(Tokens([one])) as tokens:
            assert tokens.identify(before, NOW) == ALICE
            assert tokens.identify(after, NOW) is None

            path.write_bytes(BOTH[:20])  # half of it
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
async def test_a_secret_is_read_again_when_it_changes(tmp_path: Path) -> None:
    one = issuer(tmp_path, "HS256")
    assert isinstance(one.keys, KeysInFile)
    another = "another secret of thirty-two bytes or more"
    async with running(Tokens([one])) as tokens:
        assert tokens.identify(mint("HS256"), NOW) == ALICE

        one.keys.path.write_text(another)
        await until_valid(tokens, mint("HS256", another))

        assert tokens.identify(mint("HS256"), NOW) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read: No such file"), (b"{}", "no list of 'keys'"), (b" " * (MOST_BYTES + 1), "larger than")],
)
def test_a_file_that_cannot_be_used_is_refused_at_start(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "keys.json"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(SettingsError, match="RLS_JWT_ISSUERS: the keys of one: .*keys.json .*" + message):
        Tokens([issuer(tmp_path, keys=KeysInFile(path))])
