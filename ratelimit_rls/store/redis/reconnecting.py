"""Connection to Redis that is restored in the background whenever it breaks.

It is also the circuit breaker. Without a connection every call fails immediately, and a connection is used only after
the server has shown that it works. So a server that hangs, loads its data or rejects writes costs its callers
microseconds, and they are served again within half a second of its recovery.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from time import monotonic
from typing import Any

import structlog

from ratelimit_rls.common.backoff import HALF, Backoff
from ratelimit_rls.common.timers import wait_for_event
from ratelimit_rls.errors import StoreError, StoreTimeout, StoreUnavailable, StoreUnusable
from ratelimit_rls.store.redis.connection import PipelinedConnection, ReplyError
from ratelimit_rls.store.redis.reply_errors import indicates_fault, needs_script
from ratelimit_rls.telemetry.series import Durations

_log = structlog.get_logger()

_CONNECTED = ("redis_connected", "redis_connection_restored")

MIN_PAUSE_S = 0.05
MAX_PAUSE_S = 0.5
"""Pauses between attempts to reconnect: short enough that service is restored within a second of Redis."""

MAX_ATTEMPT_S = 1.0
"""Timeout of an attempt. A server that hangs, or a network that drops packets, must not prevent the next attempt."""

MIN_STABLE_S = 1.0
"""A connection that broke sooner is not restored immediately, and its successor is reported as restored only when it
has lasted this long: a server may accept every connection and serve none."""

MAX_LOG_BURST = 6
LOG_INTERVAL_S = 10.0
"""Log lines about one server: a burst, and then one per interval, however often the connection breaks."""

MAX_FAILURES = 3
"""Error replies in a row after which the connection is dropped: such a server is probed in the background only."""

Connect = Callable[[float], Awaitable[PipelinedConnection]]
"""Connects to the current server within a timeout in seconds. Raises StoreError."""

Handshake = Callable[[PipelinedConnection, float], Awaitable[None]]
"""Checks a new connection before it is used, within a timeout in seconds. Raises StoreError."""


class ReconnectingConnection:
    """A connection to one server, or to whichever server `connect` finds, that is restored in the background."""

    def __init__(
        self,
        name: str,
        connect: Connect,
        handshake: Handshake,
        *,
        timeout_s: float = 1.0,
        connect_timeout_s: float = 10.0,
        on_connection: Callable[[bool], None] = lambda connected: None,
        on_unusable: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """`name` is for messages. `timeout_s` applies to replies, `connect_timeout_s` to the first connection.

        `on_unusable` is called in the background with the reason whenever a server answers but cannot be used, and with
        "" when that is no longer known, because it does not answer either.
        """
        self.name = name
        self.error: StoreError | None = None  # of the last attempt to connect in the background; None: it succeeded
        self.durations = Durations()  # of `send` and `execute`, until the last reply or the timeout
        self._connect_to = connect
        self._handshake = handshake
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._on_connection = on_connection
        self._on_unusable = on_unusable
        self._connection: PipelinedConnection | None = None
        self._tried = asyncio.Event()
        self._reconnect_task: asyncio.Task[None] | None = None
        self._failures = 0
        self._was_stable = True  # the previous connection
        self._retry_requested = asyncio.Event()
        self._backoff = Backoff(MIN_PAUSE_S, MAX_PAUSE_S, jitter=HALF)
        self._log_tokens = float(MAX_LOG_BURST)
        self._log_refilled_s = monotonic()

    @property
    def connected(self) -> bool:
        return self._connection is not None and not self._connection.closed.done()

    async def start(self) -> None:
        """Connect. Raises StoreError if that is not possible now."""
        await self._connect(self._connect_timeout_s)
        self.start_in_background()

    def start_in_background(self) -> None:
        """Connect in the background. Returns immediately."""
        self._reconnect_task = asyncio.create_task(self._keep_connected())

    async def wait_for_first_attempt(self, timeout_s: float | None = None) -> None:
        """Wait until the first attempt to connect has ended, successfully or not, or the timeout is over."""
        await wait_for_event(self._tried, timeout_s)

    async def _connect(self, timeout_s: float) -> None:
        ends_s = monotonic() + timeout_s
        connection = await self._connect_to(timeout_s)
        try:
            await self._handshake(connection, round(max(0.0, ends_s - monotonic()), 2))
        except BaseException:
            connection.abort()
            raise
        self._connection = connection
        self._failures = 0
        self._on_connection(True)

    async def _keep_connected(self) -> None:
        """Restore the connection whenever it breaks, until cancelled."""
        event = "redis_connected" if self._connection is None else ""  # to be logged once connected
        error_logged = False
        while True:
            if self._connection is not None:
                up_s = monotonic()
                if not self._was_stable:
                    await asyncio.wait([self._connection.closed], timeout=MIN_STABLE_S)
                if event and not self._connection.closed.done():
                    self._log_limited(event, address=self.name)
                    event = ""
                await asyncio.shield(self._connection.closed)
                self._connection = None
                self._on_connection(False)
                self._was_stable = monotonic() - up_s >= MIN_STABLE_S
                if not event:
                    self._log_limited("redis_connection_lost", address=self.name)
                    event = "redis_connection_restored"
                if self._was_stable:
                    self._backoff.reset()
                else:
                    await self._pause()
            try:
                try:
                    await self._connect(min(self._connect_timeout_s, MAX_ATTEMPT_S))
                finally:
                    self._tried.set()
                error_logged = False
                self.error = None
            except StoreError as exc:
                self._report_unusable(exc)
                # The first error is worth a line; the same one every second is not.
                if error_logged:
                    _log.debug("redis_connect_failed", address=self.name, error=str(exc))
                else:
                    error_logged = self._log_limited("redis_connect_failed", address=self.name, error=str(exc))
                await self._pause()

    def _report_unusable(self, error: StoreError) -> None:
        if isinstance(error, StoreUnusable):
            self._on_unusable(error.reason)
        elif isinstance(self.error, StoreUnusable):
            self._on_unusable("")
        self.error = error

    async def _pause(self) -> None:
        """Wait for the back-off, or until `retry_now`."""
        self._retry_requested.clear()
        await wait_for_event(self._retry_requested, self._backoff.next_s())

    def _log_limited(self, event: str, **more: str) -> bool:
        """Log an event, at debug level when this server's lines are used up. Return True unless they are."""
        now_s = monotonic()
        self._log_tokens = min(MAX_LOG_BURST, self._log_tokens + (now_s - self._log_refilled_s) / LOG_INTERVAL_S)
        self._log_refilled_s = now_s
        allowed = self._log_tokens >= 1
        self._log_tokens -= allowed
        (_log.debug if not allowed else _log.info if event in _CONNECTED else _log.warning)(event, **more)
        return allowed

    def send(self, commands: Sequence[bytes]) -> PendingReplies:
        """Send commands. Raises StoreUnavailable if there is no connection."""
        connection = self._connection
        if connection is None:
            raise StoreUnavailable(f"no connection to Redis at {self.name}")
        sent_s = monotonic()
        due_s = sent_s + self._timeout_s
        futures = [connection.send(command, due_s) for command in commands]
        return PendingReplies(self, connection, futures, sent_s, self._timeout_s)

    async def execute(self, *commands: bytes) -> list[Any]:
        """Send commands and return their replies. Raises StoreError if a reply is missing or an error."""
        with self.send(commands) as sent:
            replies = await sent.replies()
        for reply in replies:
            if isinstance(reply, StoreError):
                raise reply
            if isinstance(reply, ReplyError):
                raise StoreUnavailable(f"Redis at {self.name} returned an error: {reply}")
        return replies

    async def query(self, commands: Sequence[bytes], timeout_s: float) -> list[Any]:
        """Send commands for observation, and return a value or a ReplyError for each.

        The connection stays whatever they return, and if they are late: then nothing waits for their replies any more.
        Raises StoreError if there is no connection, or not all replies in time.
        """
        connection = self._connection
        if connection is None:
            raise StoreUnavailable(f"no connection to Redis at {self.name}")
        replies = asyncio.gather(*map(connection.send, commands))
        try:
            async with asyncio.timeout(timeout_s):
                return await replies
        except TimeoutError:
            raise StoreTimeout(f"Redis at {self.name} did not answer within {timeout_s:g} s") from None

    def record_replies(self, connection: PipelinedConnection, replies: Sequence[Any]) -> None:
        """Count error replies in a row, and drop the connection after too many, or at the first READONLY."""
        for reply in replies:
            if needs_script(reply):
                continue  # the reply to the script tells
            if not indicates_fault(reply):
                self._failures = 0
                continue
            self._failures += 1
            if self._failures >= MAX_FAILURES or "READONLY" in str(reply):  # Redis 6.2 has it inside the message
                write = self._log_limited if self._was_stable else _log.debug
                write("redis_rejects_commands", address=self.name, error=str(reply))
                connection.abort()
                return

    def reconnect(self) -> None:
        """Drop the connection, so that a new one is made."""
        if self._connection is not None:
            self._connection.abort()

    def retry_now(self) -> None:
        """Attempt to connect without further pause: there is reason to expect success."""
        self._retry_requested.set()

    async def close(self) -> None:
        if self._reconnect_task is not None:
            self._reconnect_task.cancel()
            await asyncio.gather(self._reconnect_task, return_exceptions=True)
        if self._connection is not None:
            self._connection.abort()
            await asyncio.shield(self._connection.closed)


class PendingReplies:
    """Commands in flight on one connection. Use it in a `with` block, which handles a cancelled caller."""

    def __init__(
        self,
        owner: ReconnectingConnection,
        connection: PipelinedConnection,
        futures: list[asyncio.Future[Any]],
        sent_s: float,
        timeout_s: float,
    ) -> None:
        self._owner = owner
        self._connection = connection
        self._futures = futures
        self._sent_s = sent_s
        self._timeout_s = timeout_s
        self._elapsed_s: float | None = None  # until the last reply
        if futures:
            futures[-1].add_done_callback(self._on_last_reply)

    def _on_last_reply(self, _: asyncio.Future[Any]) -> None:
        self._elapsed_s = monotonic() - self._sent_s

    async def replies(self) -> list[Any]:
        """Return a value, a ReplyError or a StoreError per command. A reply that has arrived counts, even if late, and
        its duration is until it arrived.

        Replies arrive in order, so each is awaited directly: nearly always all of them have arrived with the first.
        """
        replies: list[Any] = []
        for future in self._futures:
            try:
                replies.append(await future)
            except StoreUnavailable as error:
                replies.append(error)
        elapsed_s = monotonic() - self._sent_s if self._elapsed_s is None else self._elapsed_s
        self._owner.durations.observe(elapsed_s)
        if elapsed_s >= self._timeout_s:
            late = StoreTimeout(f"Redis at {self._owner.name} did not answer within {self._timeout_s:g} s")
            replies = [late if isinstance(reply, StoreUnavailable) else reply for reply in replies]
        self._owner.record_replies(self._connection, replies)
        return replies

    def __enter__(self) -> PendingReplies:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Drop the replies that have not arrived, of a cancelled caller: nothing retrieves their results."""
        for reply in self._futures:
            reply.cancel()
