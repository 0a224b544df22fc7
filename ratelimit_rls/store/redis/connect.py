"""How a Redis is reached: redis-py connects, authenticates and selects; then the bytes are ours.

Nothing is ever sent twice from here. redis-py's own retries are off: after a broken connection nobody knows whether a
command ran, and a hit counted twice is a wrong answer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import hiredis
from redis.asyncio.connection import AbstractConnection, Connection, UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from ratelimit_rls.errors import StoreUnavailable
from ratelimit_rls.settings.redis_address import RedisAddress


class ReplyError(Exception):
    """An error reply: the server is there and says no."""


class Pipe(asyncio.Protocol):
    """Commands go out as bytes that are ready, replies come back in the order of the commands."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._writer = writer  # kept because it, too, closes the socket when it is collected
        self._transport = writer.transport
        self._reader = hiredis.Reader(replyError=ReplyError, notEnoughData=Pipe)
        self._waiting: deque[asyncio.Future[Any]] = deque()

    def send(self, command: bytes) -> asyncio.Future[Any]:
        """The reply to come: a value, or a ReplyError as a value. Fails with StoreUnavailable if none can come."""
        reply: asyncio.Future[Any] = self.closed.get_loop().create_future()
        if self.closed.done():
            reply.set_exception(StoreUnavailable("the connection to Redis is closed"))
            return reply
        self._waiting.append(reply)
        self._transport.write(command)
        return reply

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        while (reply := self._reader.gets()) is not Pipe:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_result(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        self._close(StoreUnavailable(f"the connection to Redis broke: {exc or 'closed by the server'}"))

    def abort(self) -> None:
        """Drop the connection with whatever is still unsent or unanswered."""
        self._transport.abort()
        self._close(StoreUnavailable("the connection to Redis was given up"))

    def _close(self, why: StoreUnavailable) -> None:
        if not self.closed.done():
            self.closed.set_result(None)
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_exception(why)
        self._waiting.clear()


async def connect(address: RedisAddress, timeout_s: float) -> Pipe:
    """A connection that has authenticated and chosen its database. Raises StoreUnavailable if none can be had."""
    connection = _connection(address, timeout_s)
    try:
        await connection.connect()  # type: ignore[no-untyped-call]
    except (RedisError, OSError, TimeoutError) as exc:
        await connection.disconnect(nowait=True)
        raise StoreUnavailable(f"cannot connect to Redis at {address}: {exc}") from exc
    # From here on redis-py's streams would only be in the way: a future and a wake-up for every reply. The connection
    # object would close the socket when it is collected, so its ends are taken out of its hands.
    writer = connection._writer
    assert writer is not None
    connection._reader = connection._writer = None
    pipe = Pipe(writer)
    writer.transport.set_protocol(pipe)
    return pipe


def _connection(address: RedisAddress, timeout_s: float) -> AbstractConnection:
    options: dict[str, Any] = {
        "db": address.database,
        "username": address.username or None,
        "password": address.password.get_secret_value() or None,
        "socket_connect_timeout": timeout_s,
        "socket_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
    }
    if address.path:
        return UnixDomainSocketConnection(path=address.path, **options)
    return Connection(host=address.host, port=address.port, socket_keepalive=True, **options)
