"""Proxied calls: buffering, accounting, errors and cleanup."""

from __future__ import annotations

import asyncio
import gc
import weakref
from math import inf

import pytest
from structlog.testing import capture_logs

from ratelimit_rls.h2.call_headers import STREAMING, CallHeaders
from ratelimit_rls.h2.status import RpcError, StatusCode
from ratelimit_rls.telemetry.abuse import Abuse
from ratelimit_rls.telemetry.traces import Metadata
from ratelimit_rls.transport.grpc.call_proxy import (
    COPIES,
    MAX_PROXIED_CALL_BYTES,
    MAX_TIMEOUT_S,
    MESSAGE_OVERHEAD_BYTES,
    PEER_METADATA,
    ProxiedCall,
    bounded_timeout_s,
)
from tests.unit.h2.client import prefixed

MAX_BYTES = 4 * 2**20
MAX_MESSAGES = 12


class Connection:
    peer = "192.0.2.7"

    def __init__(self) -> None:
        self.ends: list[tuple[int, int, str]] = []

    def end_response(self, stream_id: int, code: int, words: str, metadata: object) -> None:
        self.ends.append((stream_id, code, words))


class Broken:
    """Channel on which every call fails."""

    def stream_stream(self, path: str) -> None:
        raise RuntimeError("a secret")


@pytest.fixture
def connection() -> Connection:
    return Connection()


@pytest.fixture
def call(connection: Connection) -> ProxiedCall:
    return new_call(connection)


def new_call(connection: Connection, metadata: Metadata = ()) -> ProxiedCall:
    head = CallHeaders("/a/b", inf, metadata, b"gzip", None, None, STREAMING)
    return ProxiedCall(connection, 1, head, MAX_MESSAGES)  # type: ignore[arg-type]


async def forwarded(call: ProxiedCall) -> list[bytes]:
    assert call.on_end_stream() is None
    return [message async for message in call._requests()]


@pytest.mark.parametrize("cut", range(20))
async def test_messages_may_arrive_in_parts(call: ProxiedCall, cut: int) -> None:
    sent = prefixed(b"one") + prefixed(b"") + prefixed(b"three")
    assert call.receive_data(sent[:cut], MAX_BYTES) is None
    assert call.receive_data(sent[cut:], MAX_BYTES) is None
    assert await forwarded(call) == [b"one", b"", b"three"]


async def test_messages_count_with_their_memory_until_the_call_ends(call: ProxiedCall) -> None:
    """gRPC may keep them that long: it does not report when its server has read one."""
    call.receive_data(prefixed(bytes(1000)), MAX_BYTES)
    first_bytes = 5 + COPIES * 1000 + MESSAGE_OVERHEAD_BYTES
    assert call.buffered_bytes == first_bytes
    for _ in range(10):
        call.receive_data(prefixed(b""), MAX_BYTES)
    call.receive_data(b"\0\0", MAX_BYTES)
    assert call.buffered_bytes == first_bytes + 10 * (5 + MESSAGE_OVERHEAD_BYTES) + 2
    call.receive_data(b"\0\0\0", MAX_BYTES)
    assert len(await forwarded(call)) == 12
    assert call.buffered_bytes == first_bytes + 11 * (5 + MESSAGE_OVERHEAD_BYTES)


LARGEST = prefixed(bytes(MAX_PROXIED_CALL_BYTES - 5))


@pytest.mark.parametrize(
    ("before", "sent", "code", "abuse"),
    [
        (b"", b"\0\0\0\xff\xfc", StatusCode.RESOURCE_EXHAUSTED, Abuse.MESSAGE_TOO_LARGE),
        (LARGEST, prefixed(b""), StatusCode.RESOURCE_EXHAUSTED, Abuse.MESSAGE_TOO_LARGE),
        (LARGEST[:-1], LARGEST[-1:] + prefixed(b""), StatusCode.RESOURCE_EXHAUSTED, Abuse.MESSAGE_TOO_LARGE),
        (prefixed(b"") * MAX_MESSAGES, prefixed(b""), StatusCode.RESOURCE_EXHAUSTED, Abuse.PROXIED_CALL_BUDGET),
        (b"", prefixed(b"x", compressed=1), StatusCode.UNIMPLEMENTED, Abuse.COMPRESSED_MESSAGE),
        (b"", prefixed(b"x", compressed=1)[:5], StatusCode.UNIMPLEMENTED, Abuse.COMPRESSED_MESSAGE),
    ],
)
def test_invalid_messages_are_rejected(
    call: ProxiedCall, before: bytes, sent: bytes, code: StatusCode, abuse: Abuse
) -> None:
    assert call.receive_data(before, MAX_BYTES) is None
    failure = call.receive_data(sent, MAX_BYTES)
    assert failure is not None
    assert (failure.code, failure.reason) == (code, abuse)


def test_error_for_a_compressed_message_names_the_accepted_encoding(call: ProxiedCall) -> None:
    """gRPC's compression specification requires this."""
    failure = call.receive_data(prefixed(b"x", compressed=1), MAX_BYTES)
    assert failure is not None
    assert failure.metadata == (("grpc-accept-encoding", "identity"),)


def test_request_that_ends_within_a_message_is_an_error(call: ProxiedCall) -> None:
    """Otherwise the internal server would wait forever for the rest."""
    call.receive_data(prefixed(b"1") + b"\0\0", MAX_BYTES)
    assert call.on_end_stream() == RpcError(StatusCode.INTERNAL, "the stream ended within a message")


class Silence:
    """Channel with a call that is never answered."""

    def stream_stream(self, path: str) -> Silence:
        return self

    def __call__(self, requests: object, *, timeout: float | None, metadata: object) -> Silence:
        self.metadata = metadata
        return self

    def __aiter__(self) -> Silence:
        return self

    async def __anext__(self) -> bytes:
        return await asyncio.get_running_loop().create_future()

    def cancel(self) -> None:
        self.is_cancelled = True


async def test_client_cannot_set_the_peer_metadata() -> None:
    """Not even a client that knows the key."""
    call, silence = new_call(Connection(), (("a", "1"), (PEER_METADATA, "198.51.100.1"))), Silence()
    call.task = asyncio.create_task(call.run(silence))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.wait([call.task])
    assert silence.metadata == (("a", "1"), (PEER_METADATA, "192.0.2.7"))


async def test_cancelled_call_is_freed_without_gc() -> None:
    """The service collects only young garbage, and a call may be old."""
    gc.disable()
    try:
        call, silence = new_call(Connection()), Silence()
        call.task = asyncio.create_task(call.run(silence))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call.task])
        assert silence.is_cancelled
        assert silence.metadata == ((PEER_METADATA, "192.0.2.7"),)
        kept = weakref.ref(call)
        del call
        assert kept() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("allowed_s", "expected"),
    [(0.5, 0.5), (MAX_TIMEOUT_S, MAX_TIMEOUT_S), (MAX_TIMEOUT_S + 1, None), (3.6e11, None), (inf, None)],
)
def test_very_long_timeouts_become_no_timeout(allowed_s: float, expected: float | None) -> None:
    """gRPC itself would let deadlines too far ahead expire at once."""
    assert bounded_timeout_s(allowed_s) == expected


async def test_call_that_cannot_be_forwarded_ends_with_an_error(call: ProxiedCall, connection: Connection) -> None:
    with capture_logs() as lines:
        await call.run(Broken())  # type: ignore[arg-type]
    assert connection.ends == [(1, StatusCode.INTERNAL, "internal error")]
    assert lines == [{"event": "proxy_call_failed", "exc_info": True, "log_level": "error"}]
