"""The Redis servers that hold counters together: one of them, or a cluster (topology.py)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from ratelimit_rls.errors import StoreUnavailable
from ratelimit_rls.settings.redis_address import RedisAddress, RedisServers
from ratelimit_rls.store.redis.commands import command
from ratelimit_rls.store.redis.connect import Pipe, ReplyError, connect
from ratelimit_rls.store.redis.line import Connect, Line
from ratelimit_rls.store.redis.node import Node, Run, Terms, hint
from ratelimit_rls.store.redis.sentinel import find_master, watch_master

SCANNED_AT_ONCE = b"1000"


class Work(NamedTuple):
    """A run of the script, and where its keys live."""

    shard: int
    run: Run


class Servers(Protocol):
    @property
    def connected(self) -> bool: ...

    @property
    def channel(self) -> bytes:
        """Where `publish` tells of what was freed."""
        ...

    async def start(self) -> None:
        """Raises StoreError if they cannot be had now."""
        ...

    def start_in_background(self) -> None:
        """Returns at once, and keeps trying."""
        ...

    def shard(self, key: bytes) -> int:
        """Keys of one shard can be decided together."""
        ...

    async def decide(self, work: Sequence[Work]) -> list[Any]:
        """For each its reply, or a StoreError. Nothing is sent twice unless a server said that it did not run."""
        ...

    async def each(self, verb: bytes, keys: Sequence[bytes]) -> list[Any]:
        """What the verb says of each key. Raises StoreError."""
        ...

    def scan(self, match: bytes) -> AsyncIterator[list[bytes]]:
        """The keys there are, by and by; one may come twice. Raises StoreError."""
        ...

    async def publish(self, message: bytes) -> None:
        """To everybody who listens on the channel of these servers. Raises StoreError."""
        ...

    def connect_to_listen(self) -> Connect:
        """How to reach a server that hears what is published."""
        ...

    async def close(self) -> None: ...


class OneServer:
    """A single Redis, or the master that sentinels watch over."""

    def __init__(self, servers: RedisServers, terms: Terms) -> None:
        self._servers = servers
        self._has_sentinels = servers.kind == "sentinel"
        self._connect = self._connect_to_master if self._has_sentinels else partial(connect, servers.addresses[0])
        self._connections: dict[Pipe, RedisAddress] = {}  # to masters
        self._master: RedisAddress | None = None  # as the sentinels said last
        self._terms = terms
        self._node = Node(str(servers), self._connect, terms)
        self._watching: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        return self._node.line.connected

    @property
    def channel(self) -> bytes:
        return self._terms.channel

    async def start(self) -> None:
        await self._node.line.start()
        self._watch()

    def start_in_background(self) -> None:
        self._node.line.start_in_background()
        self._watch()

    def _watch(self) -> None:
        if self._has_sentinels:
            self._watching = asyncio.create_task(watch_master(self._servers, self._told_of_master))

    async def _connect_to_master(self, timeout_s: float) -> Pipe:
        master = await find_master(self._servers, timeout_s / 2)
        pipe = await connect(master, timeout_s / 2)
        self._connections[pipe] = master
        pipe.closed.add_done_callback(lambda _: self._connections.pop(pipe))
        return pipe

    def _told_of_master(self, master: RedisAddress) -> None:
        """Leave whoever is none any more, those who listen there, too; a connection to the new one stays."""
        for pipe, connected_to in list(self._connections.items()):
            if connected_to != master:
                pipe.abort()
        if master != self._master:
            self._master = master
            self._node.line.hurry()

    def shard(self, key: bytes) -> int:
        return 0

    async def decide(self, work: Sequence[Work]) -> list[Any]:
        try:
            replies = await self._node.decide([run for _, run in work])
        except StoreUnavailable as exc:
            return [exc] * len(work)
        return [no_reply_error(self._node.line.name, reply, hint) for reply in replies]

    async def each(self, verb: bytes, keys: Sequence[bytes]) -> list[Any]:
        return await self._node.line.ask(*(command(verb, key) for key in keys)) if keys else []

    async def scan(self, match: bytes) -> AsyncIterator[list[bytes]]:
        async for keys in scan(self._node.line, match):
            yield keys

    async def publish(self, message: bytes) -> None:
        await self._node.line.ask(command(b"PUBLISH", self._terms.channel, message))

    def connect_to_listen(self) -> Connect:
        return self._connect

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self._node.close()


async def scan(line: Line, match: bytes) -> AsyncIterator[list[bytes]]:
    cursor = b"0"
    while True:
        (reply,) = await line.ask(command(b"SCAN", cursor, b"MATCH", match, b"COUNT", SCANNED_AT_ONCE))
        cursor, keys = reply
        yield keys
        if cursor == b"0":
            return


def no_reply_error(name: str, reply: Any, hint: Callable[[ReplyError], str] = lambda error: "") -> Any:
    if isinstance(reply, ReplyError):
        return StoreUnavailable(f"Redis at {name} refused the batch: {reply}{hint(reply)}")
    return reply
