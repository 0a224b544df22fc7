"""Calls of methods that have no door: handed on, message by message, to the grpc.aio server behind, and back.

They are asked rarely (health, reflection, an administrator's reset), so their way may be long; what counts is that they
are served by gRPC itself, streams and all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator

import grpc
from grpc import aio

from ratelimit_rls.transport.grpc import reply
from ratelimit_rls.transport.grpc.connection import Connection
from ratelimit_rls.transport.grpc.door import Failure, FailureCode
from ratelimit_rls.transport.grpc.head import Head, decompressed, too_large

KEPT_BYTES = 128
"""What a message takes here beyond its own bytes. Of empty ones, a client can send very many."""

LONGEST_TIMEOUT_S = 1e8
"""Three years. gRPC counts nanoseconds: what lies much farther ahead is over at once."""

_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]

_log = logging.getLogger(__name__)


class Relay:
    def __init__(self, target: str) -> None:
        self._target = target
        self._channel: aio.Channel | None = None
        self._calls: set[asyncio.Task[None]] = set()

    def call(self, connection: Connection, stream_id: int, head: Head) -> Relayed:
        if self._channel is None:
            self._channel = aio.insecure_channel(self._target, _OPTIONS)
        relayed = Relayed(connection, stream_id, head)
        task = asyncio.get_running_loop().create_task(relayed.run(self._channel))
        relayed.task = task
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return relayed

    async def close(self) -> None:
        for task in list(self._calls):
            task.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close()


class Relayed:
    """One such call. It looks like a stream both ways, whatever the method makes of it."""

    def __init__(self, connection: Connection, stream_id: int, head: Head) -> None:
        self.task: asyncio.Task[None] | None = None
        self.has_begun = False  # to be answered
        self.has_ended = False  # on the caller's side
        self.held_bytes = 0  # of messages as they are kept: unpacked
        self._connection = connection
        self._stream_id = stream_id
        self._head = head
        self._taken_bytes = 0
        self._data = bytearray()  # of a message that is not whole
        self._messages: deque[tuple[bytes, int]] = deque()  # with what each took of the caller's window
        self._changed = asyncio.Event()
        self._has_room = asyncio.Event()

    # ── the connection's side ──

    @property
    def is_as_long_as_said(self) -> bool:
        return self._head.content_length in (None, self._taken_bytes)

    def take(self, data: bytes, most_bytes: int) -> Failure | None:
        self._taken_bytes += len(data)
        self.held_bytes += len(data)
        self._data += data
        while len(self._data) >= reply.PREFIX_BYTES:
            is_compressed, length = reply.PREFIX.unpack_from(self._data)
            if length > most_bytes:
                return too_large(most_bytes)
            end = reply.PREFIX_BYTES + length
            if len(self._data) < end:
                return None
            message: bytes | Failure = bytes(self._data[reply.PREFIX_BYTES : end])
            del self._data[:end]
            if is_compressed and isinstance(message, bytes):
                message = decompressed(message, self._head.encoding, most_bytes)
            if isinstance(message, Failure):
                return message
            self._messages.append((message, end))
            self.held_bytes += len(message) + KEPT_BYTES - end
            self._changed.set()
        return None

    def ended(self) -> Failure | None:
        """The caller has no more to send; a failure, if it should have."""
        if self._data:
            return Failure(FailureCode.INTERNAL, "the call ends within a message")
        self.has_ended = True
        self._changed.set()
        return None

    def has_room(self) -> None:
        self._has_room.set()

    def cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()

    # ── the server's side ──

    async def run(self, channel: aio.Channel) -> None:
        """To its end, or until it is cancelled.

        Which is not raised again: a task that ends so keeps its last frame, and with it everything here, in a circle
        that nothing but a full collection would find.
        """
        with contextlib.suppress(asyncio.CancelledError):
            try:
                await self._serve(channel)
            except Exception:
                _log.exception("a call could not be handed on")
                self._connection.end(self._stream_id, FailureCode.INTERNAL, "internal error", ())

    async def _serve(self, channel: aio.Channel) -> None:
        head, connection, stream_id = self._head, self._connection, self._stream_id
        method: aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(head.path)
        call = method(self._requests(), timeout=timeout_s(head.allowed_s), metadata=tuple(head.metadata))
        try:
            async for message in call:
                if not self.has_begun:
                    connection.begin(stream_id)
                self._has_room.clear()
                if not connection.send(stream_id, message):
                    await self._has_room.wait()
        except aio.AioRpcError:
            pass  # its code says so, too
        finally:
            call.cancel()
        code: grpc.StatusCode = await call.code()
        trailing = await call.trailing_metadata()
        connection.end(stream_id, code.value[0], await call.details() or "", tuple(trailing or ()))

    async def _requests(self) -> AsyncIterator[bytes]:
        while True:
            while self._messages:
                message, size = self._messages.popleft()
                held_bytes = len(message) + KEPT_BYTES
                self.held_bytes -= held_bytes
                self._connection.consumed(self._stream_id, size, held_bytes)
                yield message
            if self.has_ended:
                return
            self._changed.clear()
            await self._changed.wait()


def timeout_s(allowed_s: float) -> float | None:
    return None if allowed_s > LONGEST_TIMEOUT_S else allowed_s
