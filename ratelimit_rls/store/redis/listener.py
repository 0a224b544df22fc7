"""Hears, on a connection of its own, what is said on a channel of Redis, and says something itself.

Redis passes a message on to whoever listens at that moment, and keeps none: `on_connection` tells from when on, and
until when, there was somebody to hear it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ratelimit_rls.errors import StoreError, StoreTimeout, StoreUnavailable
from ratelimit_rls.store.redis.commands import command
from ratelimit_rls.store.redis.connect import Pipe, ReplyError
from ratelimit_rls.store.redis.line import Connect, Line

PING_EVERY_S = 2.0
"""A connection on which nothing comes is told from one on which nothing can come any more by asking for a sign."""


class Listener:
    def __init__(
        self,
        name: str,
        connect: Connect,
        channel: bytes,
        heard: Callable[[bytes], None],
        *,
        in_vain: str,
        on_connection: Callable[[bool], None] = lambda connected: None,
        timeout_s: float = 1.0,
    ) -> None:
        """`name` is the server's, for messages, and `in_vain` what is not done where the channel is refused.

        `timeout_s` is for an answer, and for a connection.
        """
        self._connect = connect
        self._timeout_s = timeout_s
        self._channel = channel
        self._heard = heard
        self._in_vain = in_vain
        self._on_connection = on_connection
        self._line = Line(
            name,
            connect,
            self._greet,
            timeout_s=timeout_s,
            connect_timeout_s=timeout_s,
            on_connection=on_connection,
        )
        self._pinging: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        return self._line.connected

    def start(self) -> None:
        """Returns at once; who listens is told when news comes."""
        self._line.start_in_background()
        self._pinging = asyncio.create_task(self._ping())

    async def tell(self, message: bytes) -> None:
        """Everybody who listens now. Raises StoreError.

        On a connection for this alone: Redis lets one that listens say nothing else, and there is little to tell.
        """
        pipe = await self._connect(self._timeout_s)
        try:
            async with asyncio.timeout(self._timeout_s):
                reply = await pipe.send(command(b"PUBLISH", self._channel, message))
        except TimeoutError as exc:
            raise StoreTimeout(f"Redis at {self._line.name} did not answer within {self._timeout_s:g} s") from exc
        finally:
            pipe.abort()
        if isinstance(reply, ReplyError):
            raise StoreUnavailable(f"Redis at {self._line.name} refuses the channel {self._channel.decode()}: {reply}")

    def store_connection(self, up: bool) -> None:
        """Told of the store's own: once that is lost the counters may be another server's, and its news is what counts.

        A master that is replaced while it is well keeps its listeners for a while, and tells them nothing.
        """
        if not up:
            self._line.give_up()

    async def _greet(self, pipe: Pipe, timeout_s: float) -> None:
        """Listen; and see that telling is allowed, since a user that may do one need not be let do the other."""
        pipe.on_push = self._pushed
        greetings = command(b"PUBLISH", self._channel, b""), command(b"SUBSCRIBE", self._channel)
        try:
            async with asyncio.timeout(timeout_s):
                replies = await asyncio.gather(*map(pipe.send, greetings))
        except TimeoutError as exc:
            raise StoreTimeout(f"Redis at {self._line.name} did not answer within {timeout_s:g} s") from exc
        for reply in replies:
            if isinstance(reply, ReplyError):
                raise StoreUnavailable(
                    f"Redis at {self._line.name} refuses the channel {self._channel.decode()}, "
                    f"so {self._in_vain}: {reply}"
                )

    def _pushed(self, push: Any) -> None:
        match push:
            case [b"message", _, bytes(told)] if told:
                self._heard(told)

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(PING_EVERY_S)
            if self._line.connected:
                with suppress(StoreError):  # the line has given up the connection then, and tells of it
                    await self._line.ask(command(b"PING"))

    async def close(self) -> None:
        if self._pinging is not None:
            self._pinging.cancel()
            await asyncio.gather(self._pinging, return_exceptions=True)
        await self._line.close()
        self._on_connection(False)
