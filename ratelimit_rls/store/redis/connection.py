"""Connection to a Redis server: redis-py connects, authenticates and selects the database; then we use its transport.

Nothing is ever sent twice. redis-py's own retries are disabled: after a connection breaks it is unknown whether a
command ran, and a hit that is counted twice is a wrong result.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any

import hiredis

from ratelimit_rls.errors import StoreUnavailable, one_line
from ratelimit_rls.settings.redis_address import RedisAddress, parse_auth

_MESSAGE_KINDS = (b"message", b"pmessage", b"smessage")


class ReplyError(Exception):
    """An error reply of the server."""


class PipelinedConnection(asyncio.Protocol):
    """A connection that sends encoded commands and receives replies in the order of the commands.

    A subscriber sets `on_push`, which is called with every published message and any other unsolicited reply.
    """

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.on_push: Callable[[Any], None] | None = None
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._writer = writer  # kept because it, too, closes the socket when it is garbage collected
        self._transport = writer.transport
        self._reader = hiredis.Reader(replyError=ReplyError, notEnoughData=PipelinedConnection)
        self._waiting: deque[tuple[asyncio.Future[Any], float]] = deque()  # and when the reply is late
        self._check_s = inf  # when it is next checked whether a reply is late
        self._check_timer: asyncio.TimerHandle | None = None

    def send(self, command: bytes, due_s: float = inf) -> asyncio.Future[Any]:
        """Send a command. The result is a value or a ReplyError; without a reply it raises StoreUnavailable.

        The connection is closed if the reply is still awaited at `due_s` of the monotonic clock: later replies would be
        late, too, and nothing must accumulate. One timer serves all commands.
        """
        reply: asyncio.Future[Any] = self.closed.get_loop().create_future()
        if self.closed.done():
            reply.set_exception(StoreUnavailable("the connection to Redis is closed"))
            return reply
        self._waiting.append((reply, due_s))
        if due_s < self._check_s:
            self._check_at(due_s)
        self._transport.write(command)
        return reply

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        try:
            while (reply := self._reader.gets()) is not PipelinedConnection:
                if not self._waiting or (self.on_push is not None and _is_message(reply)):
                    self._pushed(reply)
                    continue
                waiting, _ = self._waiting.popleft()
                if not waiting.done():
                    waiting.set_result(reply)
        except hiredis.HiredisError:
            self._fail("Redis sent data that is not RESP")

    def _check_at(self, due_s: float) -> None:
        if self._check_timer is not None:
            self._check_timer.cancel()
        self._check_s = due_s
        self._check_timer = self.closed.get_loop().call_later(max(0.0, due_s - monotonic()), self._check_late)

    def _check_late(self) -> None:
        """Close the connection if a reply is late; otherwise check again when the next one is due."""
        self._check_s, self._check_timer = inf, None
        due_s = min((due_s for waiting, due_s in self._waiting if not waiting.done()), default=inf)
        if due_s <= monotonic():
            self._fail("Redis did not answer in time")
        elif due_s < inf:
            self._check_at(due_s)

    def _pushed(self, reply: Any) -> None:
        if self.on_push is not None:
            self.on_push(reply)
        else:
            # Replies can no longer be matched to commands, so the connection must end.
            self._fail("Redis sent a reply without a command")

    def connection_lost(self, exc: Exception | None) -> None:
        self._close(StoreUnavailable(f"the connection to Redis broke: {exc or 'closed by the server'}"))

    def abort(self) -> None:
        """Drop the connection with everything that is unsent or unanswered."""
        self._fail("the connection to Redis was closed")

    def _fail(self, message: str) -> None:
        self._transport.abort()
        self._close(StoreUnavailable(message))

    def _close(self, error: StoreUnavailable) -> None:
        if not self.closed.done():
            self.closed.set_result(None)
        if self._check_timer is not None:
            self._check_timer.cancel()
        for waiting, _ in self._waiting:
            if not waiting.done():
                waiting.set_exception(error)
        self._waiting.clear()


def _is_message(reply: Any) -> bool:
    """Return True for a published message, which may arrive between a command and its reply."""
    return isinstance(reply, list) and bool(reply) and reply[0] in _MESSAGE_KINDS


async def connect(address: RedisAddress, timeout_s: float) -> PipelinedConnection:
    """Return a connection that has authenticated and selected its database, within the timeout.

    Raises StoreUnavailable. Credential and TLS files are read each time, so rotated files take effect.
    """
    # Imported here, because it takes a fifth of the startup time, and is not needed without Redis.
    from ratelimit_rls.store.redis.redis_py import RedisError, new_connection

    try:
        async with asyncio.timeout(timeout_s):
            username, password = await _credentials(address)
            connection = await new_connection(address, username, password)
            try:
                await connection.connect()  # type: ignore[no-untyped-call]
            except BaseException as exc:
                if connection._writer is not None:
                    connection._writer.transport.abort()  # closing would wait for a server that may hang
                if isinstance(exc, RedisError | OSError):
                    message = _redacted(password, str(exc))
                    raise StoreUnavailable(f"cannot connect to Redis at {address}: {message}") from None
                raise
    except TimeoutError:
        raise StoreUnavailable(f"cannot connect to Redis at {address} within {timeout_s:g} s") from None
    # redis-py's streams would only add overhead from here on: a future and a wake-up for every reply. Its connection
    # object would close the socket when it is garbage collected, so we take reader and writer from it.
    writer = connection._writer
    assert writer is not None
    connection._reader = connection._writer = None
    pipelined = PipelinedConnection(writer)
    writer.transport.set_protocol(pipelined)
    return pipelined


async def _credentials(address: RedisAddress) -> tuple[str, str]:
    if not address.auth_file:
        return address.username, address.password.get_secret_value()
    try:
        text = await asyncio.to_thread(Path(address.auth_file).read_text, "utf-8")
    except OSError as exc:
        raise StoreUnavailable(f"cannot read the password for Redis: {exc}") from exc
    except UnicodeDecodeError:
        raise StoreUnavailable(f"cannot read the password for Redis: {address.auth_file} is not text") from None
    auth = text.rstrip("\r\n")
    if not auth:
        raise StoreUnavailable(f"cannot read the password for Redis: {address.auth_file} is empty") from None
    return parse_auth(auth)


def _redacted(password: str, message: str) -> str:
    """Return an error message without the password: for an unknown command the server repeats its arguments,
    truncated."""
    message = one_line(message.partition(", with args beginning with")[0])
    return "the server's error message contains the password" if password and password in message else message
