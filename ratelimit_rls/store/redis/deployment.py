"""Redis deployments that hold counters: a single server here, or a cluster (cluster.py)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from ratelimit_rls.core.model import StoreResult
from ratelimit_rls.core.storage_keys import Location
from ratelimit_rls.errors import StoreError, StoreUnavailable
from ratelimit_rls.settings.redis_address import RedisAddress, RedisServers
from ratelimit_rls.store.redis.connection import PipelinedConnection, ReplyError, connect
from ratelimit_rls.store.redis.reconnecting import Connect, ReconnectingConnection
from ratelimit_rls.store.redis.reply_errors import explain
from ratelimit_rls.store.redis.resp import command
from ratelimit_rls.store.redis.script_node import RedisOptions, ScriptNode, ScriptRun, error_hint
from ratelimit_rls.store.redis.sentinel import find_master, watch_master
from ratelimit_rls.store.script_codec import EncodedPlan, PartResult, decode_parts, decode_reply, split_runs
from ratelimit_rls.telemetry.series import Durations

SCAN_COUNT = b"1000"

Result = TypeVar("Result")


class ServerNode(NamedTuple):
    """A server that holds counters, and the connection to it."""

    address: str  # host name or IP address, or the path of a Unix socket
    port: str  # empty for a Unix socket
    connection: ReconnectingConnection
    in_cluster: bool = False

    def __str__(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{host}:{self.port}" if self.port else self.address


class Deployment(Protocol):
    """One or more Redis servers that hold the counters together."""

    @property
    def connected(self) -> bool: ...

    @property
    def channel(self) -> bytes:
        """The channel on which `publish` sends the keys of freed counters."""
        ...

    async def start(self) -> None:
        """Connect. Raises StoreError if that is not possible now."""
        ...

    def start_in_background(self) -> None:
        """Connect in the background, with retries. Returns immediately."""
        ...

    def nodes(self) -> list[ServerNode]:
        """Return the servers that hold counters now, those without a connection included."""
        ...

    def shard(self, key: bytes) -> int:
        """Return the shard of a key. Keys of one shard are always on one server, and can be decided in one step."""
        ...

    def location(self, key: bytes) -> Location:
        """Return the slot and the node of a key, as known now."""
        ...

    async def spend(self, plans: Sequence[EncodedPlan[bytes]], shards: Sequence[int]) -> Sequence[PartResult]:
        """Return the result of each plan, or its error. `shards`: of each plan; plans of one shard run in order.

        Nothing is sent twice unless a server did not run it.
        """
        ...

    async def execute_each(self, name: bytes, keys: Sequence[bytes]) -> list[Any]:
        """Run a command with one key for each key, and return the replies. Raises StoreError."""
        ...

    def scan(self, match: bytes) -> AsyncIterator[list[bytes]]:
        """Yield the existing keys in batches; a key may occur twice. Raises StoreError."""
        ...

    async def publish(self, message: bytes) -> None:
        """Publish a message on the channel of these servers. Raises StoreError."""
        ...

    def pubsub_connect(self) -> Connect:
        """Return a function that connects to a server on which published messages can be received."""
        ...

    async def close(self) -> None: ...


class SingleNode:
    """A single Redis server, or the current master of a Sentinel deployment."""

    def __init__(self, servers: RedisServers, options: RedisOptions) -> None:
        self._servers = servers
        self._has_sentinels = servers.kind == "sentinel"
        self._connect = self._connect_to_master if self._has_sentinels else partial(connect, servers.addresses[0])
        self._connections: dict[PipelinedConnection, RedisAddress] = {}  # to masters
        self._master: RedisAddress | None = None  # as last reported by the sentinels
        self._durations: dict[RedisAddress, Durations] = {}  # of every master so far
        self._options = options
        self._node = ScriptNode(str(servers), self._connect, options)
        self._watch_task: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        return self._node.connection.connected

    @property
    def channel(self) -> bytes:
        return self._options.channel

    async def start(self) -> None:
        await self._node.connection.start()
        self._watch()

    def start_in_background(self) -> None:
        self._node.connection.start_in_background()
        self._watch()

    def _watch(self) -> None:
        if self._has_sentinels:
            self._watch_task = asyncio.create_task(watch_master(self._servers, self._on_master))

    async def _connect_to_master(self, timeout_s: float) -> PipelinedConnection:
        master = await find_master(self._servers, timeout_s / 2)
        connection = await connect(master, timeout_s / 2)
        self._connections[connection] = master
        connection.closed.add_done_callback(lambda _: self._connections.pop(connection))
        return connection

    def _on_master(self, master: RedisAddress) -> None:
        """Close connections to former masters, including subscribers; a connection to the new one stays."""
        for connection, connected_to in list(self._connections.items()):
            if connected_to != master:
                connection.abort()
        if master != self._master:
            self._master = master
            self._node.connection.durations = self._durations.setdefault(master, Durations())
            self._node.connection.retry_now()

    def nodes(self) -> list[ServerNode]:
        address = self._servers.addresses[0]
        if self._has_sentinels:
            master = self._master or next(iter(self._connections.values()), None)
            if master is None:
                return []  # no sentinel has named one yet
            address = master
        port = "" if address.path else str(address.port)
        return [ServerNode(address.path or address.host, port, self._node.connection)]

    def shard(self, key: bytes) -> int:
        return 0

    def location(self, key: bytes) -> Location:
        nodes = self.nodes()
        return Location(None, str(nodes[0]) if nodes else "")

    async def spend(self, plans: Sequence[EncodedPlan[bytes]], shards: Sequence[int]) -> list[StoreResult | StoreError]:
        runs = [ScriptRun(run) for run in split_runs(plans)]
        try:
            replies = await self._node.run_script(runs)
        except StoreUnavailable as exc:
            return [exc] * len(plans)
        results: list[StoreResult | StoreError] = []
        for run, reply in zip(runs, replies, strict=True):
            if isinstance(reply, ReplyError):
                reply = rejected(self._node.connection.name, reply, error_hint(reply))
            results += decode_results(run.plans, reply)
        return results

    async def execute_each(self, name: bytes, keys: Sequence[bytes]) -> list[Any]:
        return await self._node.connection.execute(*(command(name, key) for key in keys)) if keys else []

    async def scan(self, match: bytes) -> AsyncIterator[list[bytes]]:
        async for keys in scan(self._node.connection, match):
            yield keys

    async def publish(self, message: bytes) -> None:
        await self._node.connection.execute(command(b"PUBLISH", self._options.channel, message))

    def pubsub_connect(self) -> Connect:
        return self._connect

    async def close(self) -> None:
        if self._watch_task is not None:
            self._watch_task.cancel()
            await asyncio.gather(self._watch_task, return_exceptions=True)
        await self._node.close()


async def scan(connection: ReconnectingConnection, match: bytes) -> AsyncIterator[list[bytes]]:
    cursor = b"0"
    while True:
        (reply,) = await connection.execute(command(b"SCAN", cursor, b"MATCH", match, b"COUNT", SCAN_COUNT))
        cursor, keys = reply
        yield keys
        if cursor == b"0":
            return


def rejected(name: str, error: ReplyError, hint: str = "") -> StoreUnavailable:
    """Return the error of a run that a server rejected."""
    return StoreUnavailable(f"Redis at {name} rejected the batch: {explain(error)}{hint}")


def decode_results(plans: Sequence[EncodedPlan[bytes]], reply: Any) -> Sequence[StoreResult | StoreError]:
    """Return the result of each plan of a run, or the same error for all of them."""
    return _decoded(decode_reply, plans, reply)


def decode_part_results(plans: Sequence[EncodedPlan[bytes]], reply: Any) -> Sequence[PartResult]:
    """Return the result of each part of a run, or the same error for all of them."""
    return _decoded(decode_parts, plans, reply)


def _decoded(
    decode: Callable[[Sequence[EncodedPlan[bytes]], Any], Sequence[Result]],
    plans: Sequence[EncodedPlan[bytes]],
    reply: Any,
) -> Sequence[Result | StoreError]:
    if isinstance(reply, StoreError):
        return [reply] * len(plans)
    try:
        return decode(plans, reply)
    except (IndexError, TypeError, ZeroDivisionError):  # the last: a short reply to limits that never have one
        return [StoreUnavailable("Redis returned a malformed script reply")] * len(plans)
