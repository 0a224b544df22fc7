"""Proxy for calls of methods that have no pipeline: forwards messages to an internal grpc.aio server, and back.

These methods are called rarely (health watches, reflection, ResetLimit), so the detour is acceptable. In return, gRPC
itself serves them, streaming included.

The bytes that a call has sent count as buffered until it ends: gRPC keeps messages that its server has not read yet,
and does not report how many.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator
from secrets import token_hex
from typing import TypeVar

import grpc
import structlog
from grpc import aio

from ratelimit_rls.h2 import response_frames
from ratelimit_rls.h2.call_headers import CallHeaders
from ratelimit_rls.h2.header_blocks import MAX_LIST_BYTES
from ratelimit_rls.h2.status import RpcError, StatusCode, message_too_large
from ratelimit_rls.telemetry.abuse import Abuse
from ratelimit_rls.transport.call_budget import CallBudget
from ratelimit_rls.transport.grpc.protocol import GrpcProtocol
from ratelimit_rls.transport.peers import UNIX, peer_group

MAX_PROXIED_CALLS = 1000
MAX_PROXIED_CALLS_OF_PEER = 100
MAX_PROXIED_CALLS_OF_CONNECTION = 32
MAX_PROXIED_CALLS_PER_SECOND_OF_PEER = 200
"""Limits on calls in progress. Each is a task and a call over a socket, and may last as long as its client likes."""

MAX_PROXIED_CALL_BYTES = 64 * 1024
"""Maximum size of all messages of a call, with their prefixes."""

COPIES = 4
"""Copies of a message that exist at the same time: here, in gRPC on the way to the internal server, and there."""

MESSAGE_OVERHEAD_BYTES = 128
"""Memory of a queued message beyond its own bytes. A client can send very many empty messages."""

MAX_TIMEOUT_S = 1e8
"""Three years. gRPC counts in nanoseconds, and a deadline much further ahead expires at once."""

PEER_METADATA = f"x-rls-peer-{token_hex(16)}"
"""Metadata key that carries the client's address, or "unix", to the internal server.

It is random in every process and never leaves the process, so a client cannot know it. Values that a client sends under
this key are dropped nevertheless.
"""

_METADATA_BYTES = 2 * MAX_LIST_BYTES

SERVER_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_PROXIED_CALL_BYTES),
    ("grpc.max_metadata_size", _METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", _METADATA_BYTES),
]
"""Options of the internal server. It rejects longer messages, which never reach it. It accepts all metadata that this
port accepts, and PEER_METADATA: when gRPC rejects metadata, it sends the client the names of all of it, that one
included."""

_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]

_COMPRESSED = RpcError(
    StatusCode.UNIMPLEMENTED,
    "messages of this method must not be compressed; the accepted encoding is identity",
    Abuse.COMPRESSED_MESSAGE,
    (("grpc-accept-encoding", "identity"),),
)
_TOO_MANY_CALLS = RpcError(
    StatusCode.RESOURCE_EXHAUSTED, "too many calls of this service; try again later", Abuse.PROXIED_CALL_BUDGET
)
_TOO_MANY_MESSAGES = RpcError(
    StatusCode.RESOURCE_EXHAUSTED, "the call has more messages than its method accepts", Abuse.PROXIED_CALL_BUDGET
)

_log = structlog.get_logger()

K = TypeVar("K")


class CallProxy:
    """Forwards calls to the internal server over one channel, which is opened on first use."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._channel: aio.Channel | None = None
        self._budget = CallBudget(0, MAX_PROXIED_CALLS_PER_SECOND_OF_PEER)
        self._calls: set[asyncio.Task[None]] = set()
        self._by_connection: Counter[GrpcProtocol] = Counter()
        self._by_peer: Counter[str] = Counter()

    def call(
        self, connection: GrpcProtocol, stream_id: int, headers: CallHeaders, max_messages: int
    ) -> ProxiedCall | RpcError:
        if not self._has_place(connection) or self._budget.spend(connection.peer) is not None:
            return _TOO_MANY_CALLS
        if self._channel is None:
            self._channel = aio.insecure_channel(self._target, _OPTIONS)
        call = ProxiedCall(connection, stream_id, headers, max_messages)
        task = asyncio.get_running_loop().create_task(call.run(self._channel))
        call.task = task
        self._count(task, connection)
        return call

    def _has_place(self, connection: GrpcProtocol) -> bool:
        peer = connection.peer
        return (
            len(self._calls) < MAX_PROXIED_CALLS
            and self._by_connection[connection] < MAX_PROXIED_CALLS_OF_CONNECTION
            and (peer == UNIX or self._by_peer[peer_group(peer)] < MAX_PROXIED_CALLS_OF_PEER)
        )

    def _count(self, task: asyncio.Task[None], connection: GrpcProtocol) -> None:
        """Count a call until its task ends, which may be after the call has ended for its caller."""
        group = peer_group(connection.peer)

        def ended(task: asyncio.Task[None]) -> None:
            self._calls.discard(task)
            _decrement(self._by_connection, connection)
            _decrement(self._by_peer, group)

        self._calls.add(task)
        self._by_connection[connection] += 1
        self._by_peer[group] += 1
        task.add_done_callback(ended)

    async def close(self) -> None:
        for task in list(self._calls):
            task.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close()


class ProxiedCall:
    """One forwarded call. It is proxied as a bidirectional stream, whatever the type of the method."""

    def __init__(self, connection: GrpcProtocol, stream_id: int, headers: CallHeaders, max_messages: int) -> None:
        self.task: asyncio.Task[None] | None = None
        self.response_started = False
        self.has_ended = False  # the client has sent END_STREAM
        self.buffered_bytes = 0  # of all messages so far, including those that gRPC has taken
        self._connection = connection
        self._stream_id = stream_id
        self._headers = headers
        self._messages_left = max_messages
        self._taken_bytes = 0
        self._data = bytearray()  # start of an incomplete message
        self._messages: deque[bytes] = deque()
        self._changed = asyncio.Event()
        self._writable = asyncio.Event()

    # ── called by the connection ──

    @property
    def matches_content_length(self) -> bool:
        return self._headers.content_length in (None, self._taken_bytes)

    def receive_data(self, data: bytes, max_bytes: int) -> RpcError | None:
        """Receive data of the call. Return an error if it is more than a call may send, or compressed."""
        max_bytes = min(max_bytes, MAX_PROXIED_CALL_BYTES)
        before_bytes = self._taken_bytes - len(self._data)  # of messages that are whole
        self._taken_bytes += len(data)
        self.buffered_bytes += len(data)
        self._data += data
        at = 0
        while len(self._data) - at >= response_frames.PREFIX_BYTES:
            is_compressed, length = response_frames.PREFIX.unpack_from(self._data, at)
            if not self._messages_left:
                return _TOO_MANY_MESSAGES
            start = at + response_frames.PREFIX_BYTES
            end = start + length
            if before_bytes + end > max_bytes:
                return message_too_large(max_bytes)
            if is_compressed:
                return _COMPRESSED
            if len(self._data) < end:
                break
            self._messages.append(bytes(self._data[start:end]))
            self._messages_left -= 1
            self.buffered_bytes += (COPIES - 1) * length + MESSAGE_OVERHEAD_BYTES
            self._changed.set()
            at = end
        del self._data[:at]
        return None

    def on_end_stream(self) -> RpcError | None:
        """Handle END_STREAM from the client. Return an error if the last message is incomplete."""
        if self._data:
            return RpcError(StatusCode.INTERNAL, "the stream ended within a message")
        self.has_ended = True
        self._changed.set()
        return None

    def on_writable(self) -> None:
        self._writable.set()

    def cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()

    # ── towards the internal server ──

    async def run(self, channel: aio.Channel) -> None:
        """Forward the call until it ends or is cancelled.

        CancelledError is not re-raised: a task that ends with it keeps its last frame, and with it this object, in a
        reference cycle that only a full garbage collection would free.
        """
        with contextlib.suppress(asyncio.CancelledError):
            try:
                await self._serve(channel)
            except Exception:
                _log.exception("proxy_call_failed")
                self._connection.end_response(self._stream_id, StatusCode.INTERNAL, "internal error", ())

    async def _serve(self, channel: aio.Channel) -> None:
        headers, connection, stream_id = self._headers, self._connection, self._stream_id
        method: aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(headers.path)
        sent = [pair for pair in headers.metadata if pair[0] != PEER_METADATA]
        metadata = (*sent, (PEER_METADATA, connection.peer))
        call = method(self._requests(), timeout=bounded_timeout_s(headers.deadline_in_s), metadata=metadata)
        try:
            async for message in call:
                if not self.response_started:
                    connection.start_response(stream_id)
                self._writable.clear()
                if not connection.send_message(stream_id, message):
                    await self._writable.wait()
        except aio.AioRpcError:
            pass  # the status code below reports it
        finally:
            call.cancel()
        code: grpc.StatusCode = await call.code()
        trailing = await call.trailing_metadata()
        details = (await call.details() or "").replace(PEER_METADATA, "…")
        connection.end_response(stream_id, code.value[0], details, tuple(trailing or ()))

    async def _requests(self) -> AsyncIterator[bytes]:
        while True:
            while self._messages:
                yield self._messages.popleft()
            if self.has_ended:
                return
            self._changed.clear()
            await self._changed.wait()


def _decrement(counts: Counter[K], key: K) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


def bounded_timeout_s(deadline_in_s: float) -> float | None:
    return None if deadline_in_s > MAX_TIMEOUT_S else deadline_in_s
