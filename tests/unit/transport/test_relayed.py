"""What of a relayed call is kept until it is handed on, how much that counts for, and how it ends if it cannot be."""

from __future__ import annotations

import asyncio
import gc
import weakref
from gzip import compress
from math import inf

import pytest

from ratelimit_rls.transport.grpc.door import Failure, FailureCode
from ratelimit_rls.transport.grpc.head import NOWHERE, Head
from ratelimit_rls.transport.grpc.relay import KEPT_BYTES, LONGEST_TIMEOUT_S, Relayed, timeout_s
from tests.unit.transport.http2_client import prefixed

MOST_BYTES = 1000


class Connection:
    def __init__(self) -> None:
        self.consumed_bytes: list[tuple[int, int]] = []
        self.ends: list[tuple[int, int, str]] = []

    def consumed(self, stream_id: int, size: int, held_bytes: int) -> None:
        self.consumed_bytes.append((size, held_bytes))

    def end(self, stream_id: int, code: int, words: str, metadata: object) -> None:
        self.ends.append((stream_id, code, words))


class Broken:
    """A channel that nothing can be sent on."""

    def stream_stream(self, path: str) -> None:
        raise RuntimeError("a secret")


@pytest.fixture
def connection() -> Connection:
    return Connection()


@pytest.fixture
def call(connection: Connection) -> Relayed:
    return new_call(connection)


def new_call(connection: Connection) -> Relayed:
    head = Head("/a/b", inf, (), b"gzip", None, None, NOWHERE)
    return Relayed(connection, 1, head)  # type: ignore[arg-type]


async def handed_on(call: Relayed) -> list[bytes]:
    assert call.ended() is None
    return [message async for message in call._requests()]


@pytest.mark.parametrize("cut", range(20))
async def test_messages_may_be_cut_anywhere(call: Relayed, connection: Connection, cut: int) -> None:
    sent = prefixed(b"one") + prefixed(b"") + prefixed(b"three")
    assert call.take(sent[:cut], MOST_BYTES) is None
    assert call.take(sent[cut:], MOST_BYTES) is None
    assert await handed_on(call) == [b"one", b"", b"three"]
    assert call.held_bytes == 0
    assert [size for size, _ in connection.consumed_bytes] == [8, 5, 10]


async def test_a_message_counts_for_what_it_takes(call: Relayed, connection: Connection) -> None:
    packed = prefixed(compress(bytes(MOST_BYTES)), compressed=1)
    call.take(packed, MOST_BYTES)
    assert call.held_bytes == MOST_BYTES + KEPT_BYTES
    for _ in range(10):
        call.take(prefixed(b""), MOST_BYTES)
    assert call.held_bytes == MOST_BYTES + 11 * KEPT_BYTES
    call.take(b"\0\0", MOST_BYTES)
    assert call.held_bytes == MOST_BYTES + 11 * KEPT_BYTES + 2
    call.take(b"\0\0\0", MOST_BYTES)
    assert len(await handed_on(call)) == 12
    assert connection.consumed_bytes == [(len(packed), MOST_BYTES + KEPT_BYTES)] + [(5, KEPT_BYTES)] * 11
    assert call.held_bytes == 0


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b"\0\0\0\3\xe9", FailureCode.RESOURCE_EXHAUSTED),
        (prefixed(compress(bytes(MOST_BYTES + 1)), compressed=1), FailureCode.RESOURCE_EXHAUSTED),
        (prefixed(b"x", compressed=1), FailureCode.INTERNAL),
    ],
)
def test_what_cannot_be_taken(call: Relayed, sent: bytes, code: FailureCode) -> None:
    failure = call.take(sent, MOST_BYTES)
    assert failure is not None
    assert failure.code == code


def test_a_request_does_not_end_within_a_message(call: Relayed) -> None:
    """Whoever serves it would wait for the rest for ever."""
    call.take(prefixed(b"1") + b"\0\0", MOST_BYTES)
    assert call.ended() == Failure(FailureCode.INTERNAL, "the call ends within a message")


class Silence:
    """A channel, and a call on it that is never answered."""

    def stream_stream(self, path: str) -> Silence:
        return self

    def __call__(self, *arguments: object, **named: object) -> Silence:
        return self

    def __aiter__(self) -> Silence:
        return self

    async def __anext__(self) -> bytes:
        return await asyncio.get_running_loop().create_future()

    def cancel(self) -> None:
        self.is_cancelled = True


async def test_nothing_stays_of_one_that_is_cancelled() -> None:
    """The service has the collector look at young objects only, and a call may be old."""
    gc.disable()
    try:
        call, silence = new_call(Connection()), Silence()
        call.task = asyncio.create_task(call.run(silence))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call.task])
        assert silence.is_cancelled
        kept = weakref.ref(call)
        del call
        assert kept() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("allowed_s", "expected"),
    [(0.5, 0.5), (LONGEST_TIMEOUT_S, LONGEST_TIMEOUT_S), (LONGEST_TIMEOUT_S + 1, None), (3.6e11, None), (inf, None)],
)
def test_a_caller_that_waits_for_years_waits_for_ever(allowed_s: float, expected: float | None) -> None:
    """gRPC itself has what lies too far ahead be over at once."""
    assert timeout_s(allowed_s) == expected


async def test_a_call_that_cannot_be_handed_on_ends_all_the_same(
    call: Relayed, connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    await call.run(Broken())  # type: ignore[arg-type]
    assert connection.ends == [(1, FailureCode.INTERNAL, "internal error")]
    assert "RuntimeError: a secret" in caplog.text
