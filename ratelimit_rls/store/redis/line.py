"""A connection to Redis that is kept: brought back whenever it breaks, in the background.

It is the breaker, too. While there is no connection everybody is told so at once, and a connection is only called one
when the server has shown that it does its work; so a server that hangs, loads its data or takes no writes costs its
callers microseconds, and they are back within half a second of it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

import structlog

from ratelimit_rls.errors import StoreError, StoreTimeout, StoreUnavailable
from ratelimit_rls.store.redis.connect import Pipe, ReplyError

log = structlog.get_logger()

SHORTEST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 0.5
"""Between attempts to reconnect: soon enough that service is back within a second of Redis."""

LONGEST_ATTEMPT_S = 1.0
"""To reconnect. A server that hangs, or a network that swallows packets, must not keep us from trying again."""

STEADY_S = 1.0
"""A connection that broke sooner is not brought back at once, and its successor is good news only when it has lasted so
long: a server may take every connection and serve nobody."""

MOST_LINES = 6
A_LINE_EVERY_S = 10.0
"""In the log: so many at once about one server, and then one in ten seconds, however often it comes and goes."""

MOST_FAILURES = 3
"""In a row, and the connection is given up: a server that refuses everything is asked again in the background only."""

Connect = Callable[[float], Awaitable[Pipe]]
"""A connection to whoever is the right server now, within so many seconds. Raises StoreError."""

Greet = Callable[[Pipe, float], Awaitable[None]]
"""What a connection must have seen before it is used, within so many seconds. Raises StoreError."""


class Line:
    def __init__(
        self,
        name: str,
        connect: Connect,
        greet: Greet,
        *,
        timeout_s: float = 1.0,
        connect_timeout_s: float = 10.0,
        on_connection: Callable[[bool], None] = lambda connected: None,
    ) -> None:
        """`name` is for messages. `timeout_s` is for an answer, `connect_timeout_s` for the first connection."""
        self.name = name
        self._connect_to = connect
        self._greet = greet
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._on_connection = on_connection
        self._pipe: Pipe | None = None
        self._tried = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._failures = 0
        self._steady = True  # the connection before this one was
        self._hurry = asyncio.Event()
        self._lines_left = float(MOST_LINES)
        self._line_at_s = monotonic()

    @property
    def connected(self) -> bool:
        return self._pipe is not None and not self._pipe.closed.done()

    async def start(self) -> None:
        """Raises StoreError if there is no connection to be had now."""
        await self._connect(self._connect_timeout_s)
        self.start_in_background()

    def start_in_background(self) -> None:
        """Returns at once, connected or not."""
        self._keeper = asyncio.create_task(self._keep_connected())

    async def first_attempt(self, timeout_s: float | None = None) -> None:
        """Until it was tried to connect for the first time, with whatever success, or that time is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._tried.wait()

    async def _connect(self, timeout_s: float) -> None:
        ends_s = monotonic() + timeout_s
        pipe = await self._connect_to(timeout_s)
        try:
            await self._greet(pipe, round(max(0.0, ends_s - monotonic()), 2))
        except BaseException:
            pipe.abort()
            raise
        self._pipe = pipe
        self._failures = 0
        self._on_connection(True)

    async def _keep_connected(self) -> None:
        """Wait for the connection to break, and bring it back; for as long as the line is open."""
        pause_s = SHORTEST_PAUSE_S
        news = "connected to redis" if self._pipe is None else ""
        told_why = False  # it is away
        while True:
            if self._pipe is not None:
                up_s = monotonic()
                if not self._steady:
                    await asyncio.wait([self._pipe.closed], timeout=STEADY_S)
                if news and not self._pipe.closed.done():
                    self._say(news, address=self.name)
                    news = ""
                await asyncio.shield(self._pipe.closed)
                self._pipe = None
                self._on_connection(False)
                self._steady = monotonic() - up_s >= STEADY_S
                if not news:
                    self._say("redis connection lost", address=self.name)
                    news = "redis connection restored"
                pause_s = SHORTEST_PAUSE_S if self._steady else await self._paused(pause_s)
            try:
                try:
                    await self._connect(min(self._connect_timeout_s, LONGEST_ATTEMPT_S))
                finally:
                    self._tried.set()
                told_why = False
            except StoreError as exc:
                # The first reason is worth a line; the same one every second is not.
                if told_why:
                    log.debug("redis is away", error=str(exc))
                else:
                    told_why = self._say("redis is away", error=str(exc))
                pause_s = await self._paused(pause_s)

    async def _paused(self, pause_s: float) -> float:
        """For about that time, or until there is news; returns how long the next pause is."""
        self._hurry.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s * random.uniform(0.5, 1)):
                await self._hurry.wait()
        return min(2 * pause_s, LONGEST_PAUSE_S)

    def _say(self, event: str, **more: str) -> bool:
        """In the log, while there are lines left for this server; whether it was said where everybody looks."""
        now_s = monotonic()
        self._lines_left = min(MOST_LINES, self._lines_left + (now_s - self._line_at_s) / A_LINE_EVERY_S)
        self._line_at_s = now_s
        may = self._lines_left >= 1
        self._lines_left -= may
        (log.warning if may else log.debug)(event, **more)
        return may

    def send(self, commands: Sequence[bytes]) -> Sent:
        """Raises StoreUnavailable if there is no connection."""
        pipe = self._pipe
        if pipe is None:
            raise StoreUnavailable(f"no connection to Redis at {self.name}")
        return Sent(self, pipe, [pipe.send(command) for command in commands], self._timeout_s)

    async def ask(self, *commands: bytes) -> list[Any]:
        """What is replied to each command. Raises StoreError if one is not answered, or with an error."""
        with self.send(commands) as sent:
            replies = await sent.replies()
        for reply in replies:
            if isinstance(reply, StoreError):
                raise reply
            if isinstance(reply, ReplyError):
                raise StoreUnavailable(f"Redis at {self.name} refused: {reply}")
        return replies

    def fared(self, pipe: Pipe, replies: Sequence[Any]) -> None:
        """Count refusals in a row; a server that is no master any more need not be asked three times."""
        for reply in replies:
            if not isinstance(reply, ReplyError) or str(reply).startswith(HARMLESS):
                self._failures = 0
                continue
            self._failures += 1
            if self._failures >= MOST_FAILURES or "READONLY" in str(reply):  # Redis 6.2 says it in a longer sentence
                tell = self._say if self._steady else log.debug
                tell("redis refuses to serve", address=self.name, error=str(reply))
                pipe.abort()
                return

    def give_up(self) -> None:
        """Drop the connection, to find another one."""
        if self._pipe is not None:
            self._pipe.abort()

    def hurry(self) -> None:
        """There is reason to think that an attempt would succeed now: make it without further pause."""
        self._hurry.set()

    async def close(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        if self._pipe is not None:
            self._pipe.abort()
            await asyncio.shield(self._pipe.closed)


HARMLESS = ("NOSCRIPT", "MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN")
"""Errors that say where or how to ask, not that the server is unwell; CLUSTERDOWN is its cluster's trouble."""


class Sent:
    """Commands under way on one connection. To be used in a `with` block, for a caller that goes away meanwhile."""

    def __init__(self, line: Line, pipe: Pipe, waiting: list[asyncio.Future[Any]], timeout_s: float) -> None:
        self._line = line
        self._pipe = pipe
        self._waiting = waiting
        self._timeout_s = timeout_s

    async def replies(self) -> list[Any]:
        """Each a value, a ReplyError, or a StoreError where there is none. What has come counts, even if read late."""
        await asyncio.wait(self._waiting, timeout=self._timeout_s)
        late = [reply for reply in self._waiting if reply.cancel()]
        if late:
            # Everything behind it would be late too, and nothing must pile up.
            self._pipe.abort()
        why = StoreTimeout(f"no answer from Redis at {self._line.name} within {self._timeout_s:g} s")
        replies = [why if reply.cancelled() else reply.exception() or reply.result() for reply in self._waiting]
        self._line.fared(self._pipe, replies)
        return replies

    def __enter__(self) -> Sent:
        return self

    def __exit__(self, *_: object) -> None:
        for reply in self._waiting:  # of a caller that has gone: whatever comes of them, nobody is there to be told
            reply.cancel()
