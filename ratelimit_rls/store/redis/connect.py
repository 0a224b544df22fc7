"""How a Redis is reached: redis-py connects, authenticates and selects; then the bytes are ours.

Nothing is ever sent twice from here. redis-py's own retries are off: after a broken connection nobody knows whether a
command ran, and a hit counted twice is a wrong answer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hiredis

from ratelimit_rls.errors import StoreUnavailable, one_line
from ratelimit_rls.settings.redis_address import RedisAddress, parse_auth

_MESSAGES = (b"message", b"pmessage", b"smessage")


class ReplyError(Exception):
    """An error reply: the server is there and says no."""


class Pipe(asyncio.Protocol):
    """Commands go out as bytes that are ready, replies come back in the order of the commands.

    A subscriber sets `on_push`: it is given every message that is published, and whatever else comes unasked.
    """

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.on_push: Callable[[Any], None] | None = None
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
        try:
            while (reply := self._reader.gets()) is not Pipe:
                if not self._waiting or (self.on_push is not None and _is_message(reply)):
                    self._pushed(reply)
                    continue
                waiting = self._waiting.popleft()
                if not waiting.done():
                    waiting.set_result(reply)
        except hiredis.HiredisError:
            self._give_up("Redis sent what is not its protocol")

    def _pushed(self, reply: Any) -> None:
        if self.on_push is not None:
            self.on_push(reply)
        else:
            # Whose reply is whose cannot be told any more, so there must not be another.
            self._give_up("Redis sent what nobody asked for")

    def connection_lost(self, exc: Exception | None) -> None:
        self._close(StoreUnavailable(f"the connection to Redis broke: {exc or 'closed by the server'}"))

    def abort(self) -> None:
        """Drop the connection with whatever is still unsent or unanswered."""
        self._give_up("the connection to Redis was given up")

    def _give_up(self, why: str) -> None:
        self._transport.abort()
        self._close(StoreUnavailable(why))

    def _close(self, why: StoreUnavailable) -> None:
        if not self.closed.done():
            self.closed.set_result(None)
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_exception(why)
        self._waiting.clear()


def _is_message(reply: Any) -> bool:
    """Something published, which may come between a command and its reply."""
    return isinstance(reply, list) and bool(reply) and reply[0] in _MESSAGES


async def connect(address: RedisAddress, timeout_s: float) -> Pipe:
    """A connection that has authenticated and chosen its database, in that time.

    Raises StoreUnavailable if none can be had. Files are read each time, so what was rotated acts from here on.
    """
    # Here, because this takes a fifth of the time of a start, and is of no use without a Redis.
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
                    said = _without(password, str(exc))
                    raise StoreUnavailable(f"cannot connect to Redis at {address}: {said}") from None
                raise
    except TimeoutError:
        raise StoreUnavailable(f"cannot connect to Redis at {address} within {timeout_s:g} s") from None
    # From here on redis-py's streams would only be in the way: a future and a wake-up for every reply. The connection
    # object would close the socket when it is collected, so its ends are taken out of its hands.
    writer = connection._writer
    assert writer is not None
    connection._reader = connection._writer = None
    pipe = Pipe(writer)
    writer.transport.set_protocol(pipe)
    return pipe


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


def _without(password: str, said: str) -> str:
    """What the server says of a command it does not know has the command's words in it, cut at some length."""
    said = one_line(said.partition(", with args beginning with")[0])
    return "it said no, and repeated the password" if password and password in said else said
