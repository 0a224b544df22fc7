"""Redis pub/sub: receives the messages of a channel on a connection of its own, and publishes messages.

Redis delivers a message to current subscribers only, and stores none: `on_connection` reports when the subscription
begins and ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ratelimit_rls.errors import StoreError, StoreTimeout, StoreUnavailable
from ratelimit_rls.store.denial_cache import DenialCache
from ratelimit_rls.store.redis.connection import PipelinedConnection, ReplyError
from ratelimit_rls.store.redis.reconnecting import Connect, ReconnectingConnection
from ratelimit_rls.store.redis.resp import bulk, command

PING_INTERVAL_S = 2.0
"""Interval of pings, which distinguish an idle connection from a dead one."""


class PubSub:
    """A subscription to one channel that reconnects by itself."""

    def __init__(
        self,
        name: str,
        connect: Connect,
        channel: bytes,
        on_message: Callable[[bytes], None],
        *,
        consequence: str,
        on_connection: Callable[[bool], None] = lambda connected: None,
        timeout_s: float = 1.0,
    ) -> None:
        """`name` is the server's, for messages. `consequence` completes the error if the channel is not permitted.

        `timeout_s` applies to a reply and to connecting.
        """
        self._connect = connect
        self._timeout_s = timeout_s
        self._channel = channel
        self._on_message = on_message
        self._consequence = consequence
        self._on_connection = on_connection
        self._connection = ReconnectingConnection(
            name,
            connect,
            self._subscribe,
            timeout_s=timeout_s,
            connect_timeout_s=timeout_s,
            on_connection=on_connection,
        )
        self._ping_task: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        return self._connection.connected

    def start(self) -> None:
        """Connect and subscribe in the background. Returns immediately."""
        self._connection.start_in_background()
        self._ping_task = asyncio.create_task(self._ping())

    async def publish(self, message: bytes) -> None:
        """Publish a message to the current subscribers. Raises StoreError.

        It uses a separate connection: a subscribed one may not publish, and messages are rare.
        """
        connection = await self._connect(self._timeout_s)
        try:
            async with asyncio.timeout(self._timeout_s):
                reply = await connection.send(command(b"PUBLISH", self._channel, message))
        except TimeoutError as exc:
            raise StoreTimeout(f"Redis at {self._connection.name} did not answer within {self._timeout_s:g} s") from exc
        finally:
            connection.abort()
        if isinstance(reply, ReplyError):
            raise StoreUnavailable(
                f"Redis at {self._connection.name} denied access to the channel {self._channel.decode()}: {reply}"
            )

    def on_store_connection(self, up: bool) -> None:
        """Reconnect when the store's connection is lost: the counters may be on another server, which publishes them.

        A healthy master that is replaced keeps its subscribers for a while, and sends them nothing.
        """
        if not up:
            self._connection.reconnect()

    async def _subscribe(self, connection: PipelinedConnection, timeout_s: float) -> None:
        """Subscribe, and check that publishing is permitted: ACLs may allow one without the other."""
        connection.on_push = self._pushed
        commands = command(b"PUBLISH", self._channel, b""), command(b"SUBSCRIBE", self._channel)
        try:
            async with asyncio.timeout(timeout_s):
                replies = await asyncio.gather(*map(connection.send, commands))
        except TimeoutError as exc:
            raise StoreTimeout(f"Redis at {self._connection.name} did not answer within {timeout_s:g} s") from exc
        for reply in replies:
            if isinstance(reply, ReplyError):
                raise StoreUnavailable(
                    f"Redis at {self._connection.name} denied access to the channel {self._channel.decode()}, "
                    f"so {self._consequence}: {reply}"
                )

    def _pushed(self, push: Any) -> None:
        match push:
            case [b"message", _, bytes(message)] if message:
                self._on_message(message)

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(PING_INTERVAL_S)
            if self._connection.connected:
                with suppress(StoreError):  # the connection has been dropped then, and the loss was logged
                    await self._connection.execute(command(b"PING"))

    async def close(self) -> None:
        if self._ping_task is not None:
            self._ping_task.cancel()
            await asyncio.gather(self._ping_task, return_exceptions=True)
        await self._connection.close()
        self._on_connection(False)


class InvalidationListener(PubSub):
    """A subscription to the keys of counters that any process refunds or deletes: their cached denials are dropped.

    Denials that were cached without a subscription may have ended unnoticed: the cache is emptied when the connection
    is lost, and stays empty until it is restored.
    """

    def __init__(
        self, name: str, connect: Connect, channel: bytes, denials: DenialCache, *, timeout_s: float = 1.0
    ) -> None:
        super().__init__(
            f"{name} (invalidations)",
            connect,
            channel,
            lambda message: denials.forget(map(bulk, message.split(b"\n"))),
            consequence="denials are not cached",
            on_connection=denials.set_subscribed,
            timeout_s=timeout_s,
        )
