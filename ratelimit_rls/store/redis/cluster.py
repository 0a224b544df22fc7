"""Redis Cluster client: keeps the slot map up to date and sends runs to the nodes that own their slots.

The plans of a batch go to each node as one run of the script, even if they are of several slots. If the node does not
serve one of the slots, the run fails with nothing charged, and the plans of each slot are sent as a run of their own.

Nodes report the owners of the slots (CLUSTER SLOTS). They reject a run whose slot has moved (MOVED) or is being moved
(ASK). Such a run has changed nothing, so it is sent again, to the node that they name. While a node is down, the slot
map is fetched repeatedly until another node has its slots.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any, NamedTuple

import structlog

from ratelimit_rls.common.timers import wait_for_event
from ratelimit_rls.core.storage_keys import SLOTS, Location, key_slot
from ratelimit_rls.errors import StoreError, StoreUnavailable, StoreUnusable
from ratelimit_rls.settings.redis_address import RedisAddress, RedisServers
from ratelimit_rls.store.redis.cluster_slots import (
    HostPort,
    SlotMap,
    fetch_from_address,
    fetch_from_node,
    parse_host_port,
)
from ratelimit_rls.store.redis.connection import PipelinedConnection, ReplyError, connect
from ratelimit_rls.store.redis.deployment import ServerNode, decode_part_results, rejected, scan
from ratelimit_rls.store.redis.reconnecting import MAX_ATTEMPT_S, Connect
from ratelimit_rls.store.redis.reply_errors import is_slot_error
from ratelimit_rls.store.redis.resp import command
from ratelimit_rls.store.redis.script_node import RedisOptions, ScriptNode, ScriptRun, StartedRuns
from ratelimit_rls.store.script_codec import EncodedPlan, PartResult, split_runs

_log = structlog.get_logger()

REFRESH_INTERVAL_S = 10.0
"""Interval between refreshes of the slot map while all nodes are connected."""

DEGRADED_REFRESH_INTERVAL_S = 0.1
"""Interval while a node is down or slots are moving."""

MAX_REDIRECTS = 8
"""Redirects that one run follows before it fails: a slot map with a cycle must terminate."""

KEYS_PER_BATCH = 256
"""Keys that are inspected or deleted together."""

RETRY_PAUSE_S = 0.01
"""Pause before a run is sent again whose keys are being moved (TRYAGAIN)."""

IMPORTING_NODE_S = 60.0
"""Time for which a node without slots is kept after an ASK redirect to it: it is about to receive its first slot."""


class Cluster:
    """A deployment of several masters, each with a part of the slots."""

    def __init__(self, servers: RedisServers, options: RedisOptions) -> None:
        self._seeds = servers.addresses
        self._name = str(servers)
        self._options = options
        self._nodes: dict[HostPort, ScriptNode] = {}
        self._map: list[ScriptNode | None] = [None] * SLOTS
        self._last_ask_s: dict[ScriptNode, float] = {}  # by importing node: the time of the last ASK redirect to it
        self._refresh_requested = asyncio.Event()
        self._refresh_task: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def connected(self) -> bool:
        """Return True if every node that owns slots is connected."""
        owners = set(self._map)
        return None not in owners and all(node.connection.connected for node in owners if node)

    @property
    def channel(self) -> bytes:
        return self._options.channel

    async def start(self) -> None:
        await self._refresh()
        await asyncio.gather(*(node.connection.wait_for_first_attempt() for node in self._nodes.values()))
        if not any(node.connection.connected for node in self._nodes.values()):
            error = next((node.connection.error for node in self._nodes.values()), None)
            raise StoreUnavailable(f"no node of the Redis cluster at {self._name} can be used: {error}")
        self._start_refreshing()

    def start_in_background(self) -> None:
        self._refresh_requested.set()
        self._start_refreshing()

    def _start_refreshing(self) -> None:
        self._refresh_task = asyncio.create_task(self._refresh_forever())

    async def _refresh_forever(self) -> None:
        logged = False
        while True:
            pause_s = REFRESH_INTERVAL_S if self.connected else DEGRADED_REFRESH_INTERVAL_S
            await wait_for_event(self._refresh_requested, pause_s)
            self._refresh_requested.clear()
            try:
                await self._refresh()
                logged = False
            except StoreError as exc:
                write = _log.debug if logged else _log.warning  # only the first error is worth a warning
                write("redis_cluster_slots_unavailable", error=str(exc))
                logged = True
                if isinstance(exc, StoreUnusable) and not self.connected:
                    self._options.on_unusable(exc.reason)
            # So that a hundred redirected runs cause one refresh, not a hundred.
            await asyncio.sleep(DEGRADED_REFRESH_INTERVAL_S / 2)

    async def _refresh(self) -> None:
        self._apply(await self._fetch_slot_map())

    async def _fetch_slot_map(self) -> SlotMap:
        """Fetch the slot map from the connected nodes first, then from those in the settings.

        A node that is cut off from the others, or has left them, reports an outdated map, or none. It also reports that
        its cluster is down, so its map is used only if no other node has a better one.
        """
        nodes = [partial(fetch_from_node, node) for node in self._nodes.values() if node.connection.connected]
        timeout_s = min(self._options.connect_timeout_s, MAX_ATTEMPT_S)
        seeds = [partial(fetch_from_address, address, timeout_s) for address in self._seeds]
        slot_maps: list[SlotMap] = []
        errors: list[StoreError] = []
        for fetches in (nodes, seeds):
            for fetch in fetches:
                try:
                    slot_map = await fetch()
                except StoreError as exc:
                    errors.append(exc)
                    continue
                if slot_map.is_healthy:
                    return slot_map
                slot_maps.append(slot_map)
            if any(slot_map.ranges for slot_map in slot_maps):
                break  # the cluster is down; new connections to all seeds would only take time
        best = max(slot_maps, key=lambda slot_map: slot_map.covered, default=None)
        if best is None or not best.ranges:
            unusable = next((error for error in errors if isinstance(error, StoreUnusable)), None)
            message = "; ".join(map(str, errors)) or f"no node of the Redis cluster at {self._name} has slots"
            raise unusable or StoreUnavailable(message)
        return best

    def _apply(self, slot_map: SlotMap) -> None:
        owners: list[ScriptNode | None] = [None] * SLOTS
        for first, last, address in slot_map.ranges:
            owners[first : last + 1] = [self._node(address)] * (last + 1 - first)
        self._map = owners
        now_s = monotonic()
        self._last_ask_s = {node: at_s for node, at_s in self._last_ask_s.items() if now_s - at_s < IMPORTING_NODE_S}
        used = {*owners, *self._last_ask_s}
        for address, node in list(self._nodes.items()):
            if node not in used:
                del self._nodes[address]
                self._retire(node)

    def _node(self, address: HostPort) -> ScriptNode:
        node = self._nodes.get(address)
        if node is None:
            options = replace(self._options, on_connection=self._on_node_connection)
            node = self._nodes[address] = ScriptNode(
                f"{address.host}:{address.port}", partial(connect, self._address(address)), options, must_write=False
            )
            node.connection.start_in_background()
        return node

    def _address(self, address: HostPort) -> RedisAddress:
        return replace(self._seeds[0], host=address.host, port=address.port, path="")

    def _on_node_connection(self, up: bool) -> None:
        if not up:
            self._refresh_requested.set()
        self._options.on_connection(any(node.connection.connected for node in self._nodes.values()))

    def _retire(self, node: ScriptNode) -> None:
        task = asyncio.create_task(self._close_later(node))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close_later(self, node: ScriptNode) -> None:
        """Close a node after the time in which pending replies must arrive. It receives no more runs."""
        try:
            await asyncio.sleep(self._options.timeout_s)
        finally:
            await node.close()

    def shard(self, key: bytes) -> int:
        return key_slot(key)

    def location(self, key: bytes) -> Location:
        slot = key_slot(key)
        owner = self._map[slot]
        return Location(slot, owner.connection.name if owner else "")

    async def spend(self, plans: Sequence[EncodedPlan[bytes]], shards: Sequence[int]) -> list[PartResult]:
        """Run the script once on each node, with all of its slots; once for each slot where a node rejects that."""
        results: list[Any] = [None] * len(plans)
        runs = self._runs_by_node(plans, shards)
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._options.timeout_s
        for round_number in range(MAX_REDIRECTS):
            again: list[_Run] = []
            for run, reply in zip(runs, await self._send(runs), strict=True):
                outcome = reply
                if isinstance(reply, ReplyError):
                    next_runs = self._runs_after(run, reply)
                    again += next_runs
                    # The result of the plans, unless the next runs have others.
                    outcome = self._slot_moving_error(reply) if next_runs else rejected(self._name, reply)
                for number, result in zip(run.numbers, decode_part_results(run.plans, outcome), strict=True):
                    results[number] = result
            # However late it is, a run may be split by slot, and its parts redirected once.
            if not again or (round_number > 1 and loop.time() >= until_s):
                break
            runs = again
            if round_number > 1:
                await asyncio.sleep(RETRY_PAUSE_S)
        return results

    def _runs_by_node(self, plans: Sequence[EncodedPlan[bytes]], slots: Sequence[int]) -> list[_Run]:
        """Return runs with the plans of one node each, in order."""
        owners = self._map
        by_node: dict[ScriptNode | None, list[int]] = {}
        for number, slot in enumerate(slots):
            by_node.setdefault(owners[slot], []).append(number)
        runs: list[_Run] = []
        for node, numbers in by_node.items():
            run = _Run(numbers, [plans[number] for number in numbers], [slots[number] for number in numbers])
            runs += _split(run) if node is None or node.spans_slots else _split_by_slot(run)
        return runs

    def _runs_after(self, run: _Run, error: ReplyError) -> list[_Run]:
        """Return the runs to send after an error with which a node has charged nothing; none if the error is final.

        If a run with several slots fails because the node does not serve all of them, each slot is sent by itself.
        """
        if run.spans_slots and is_slot_error(error):
            return list(_split_by_slot(run))
        redirect = self._redirect(run.slots[0], error)
        return [] if redirect is None else [run._replace(importing_node=redirect.importing_node)]

    def _slot_moving_error(self, error: ReplyError) -> StoreUnavailable:
        return StoreUnavailable(f"a slot of the Redis cluster at {self._name} is being moved: {error}")

    async def _send(self, runs: Sequence[_Run]) -> list[Any]:
        """Send each run to its node, to all nodes at the same time. Return their replies, ReplyErrors and StoreErrors.

        There is no task for each node: three of them would take more time than three runs take.
        """
        by_node: dict[tuple[ScriptNode | None, bool], list[int]] = {}
        for number, run in enumerate(runs):
            node = run.importing_node or self._map[run.slots[0]]
            by_node.setdefault((node, run.importing_node is not None), []).append(number)
        started = {
            target: target[0].start_runs([runs[number].script_run for number in numbers], asking=target[1])
            for target, numbers in by_node.items()
            if target[0] is not None and target[0].connection.connected
        }
        replies: list[Any] = [None] * len(runs)
        try:
            for target, numbers in by_node.items():
                node_replies = await self._finish(target, [runs[number] for number in numbers], started.get(target))
                for number, reply in zip(numbers, node_replies, strict=True):
                    replies[number] = reply
        finally:
            for started_runs in started.values():
                started_runs.sent.cancel()
        return replies

    async def _finish(
        self, target: tuple[ScriptNode | None, bool], runs: Sequence[_Run], started: StartedRuns | None
    ) -> list[Any]:
        """Return the replies of a node to runs. `started` is None if it was not connected."""
        node, asking = target
        try:
            if node is None:
                self._refresh_requested.set()
                raise StoreUnavailable(f"no node of the Redis cluster at {self._name} owns this slot")
            if started is None:  # a node that was just discovered
                await node.connection.wait_for_first_attempt(self._options.timeout_s)
                started = node.start_runs([run.script_run for run in runs], asking=asking)
            with started.sent:
                return await node.finish_runs(started)
        except StoreError as exc:
            return [exc] * len(runs)

    def _redirect(self, slot: int, error: ReplyError) -> _Redirect | None:
        """Return where to send a run next; None if the error is final."""
        try:
            return self._parse_redirect(slot, str(error))
        except StoreUnavailable as exc:
            _log.warning("redis_cluster_redirect_invalid", error=str(exc))
            return None

    def _parse_redirect(self, slot: int, error: str) -> _Redirect | None:
        match error.split(" "):
            case ["MOVED", _, target]:
                self._refresh_requested.set()
                self._map[slot] = self._target_node(target, slot)
                return _Redirect(None)
            case ["ASK", _, target]:
                importing_node = self._target_node(target, slot)
                self._last_ask_s[importing_node] = monotonic()
                return _Redirect(importing_node)
            case ["TRYAGAIN", *_]:
                self._refresh_requested.set()
                return _Redirect(None)
            case ["CLUSTERDOWN", *_]:
                # It may last a second or hours: meanwhile every call fails immediately.
                self._refresh_requested.set()
                return None
            case _:
                return None

    def _target_node(self, name: str, slot: int) -> ScriptNode:
        """Return the node named in a redirect. Without a host it is the host of the node that sent the redirect, the
        slot's owner so far. Raises StoreUnavailable."""
        host, port = parse_host_port(name)
        owner = self._map[slot]
        return self._node(HostPort(host or (parse_host_port(owner.connection.name).host if owner else ""), port))

    async def execute_each(self, name: bytes, keys: Sequence[bytes]) -> list[Any]:
        replies_so_far: list[Any] = []
        for at in range(0, len(keys), KEYS_PER_BATCH):
            batch = keys[at : at + KEYS_PER_BATCH]
            replies_so_far += await asyncio.gather(
                *(self._execute_on_owner(key_slot(key), command(name, key)) for key in batch)
            )
        return replies_so_far

    async def _execute_on_owner(self, slot: int, request: bytes) -> Any:
        for _ in range(MAX_REDIRECTS):
            node = self._map[slot]
            if node is None:
                raise StoreUnavailable(f"no node of the Redis cluster at {self._name} owns this slot")
            await node.connection.wait_for_first_attempt(self._options.timeout_s)
            with node.connection.send([request]) as sent:
                (reply,) = await sent.replies()
            if isinstance(reply, StoreError):
                raise reply
            if not isinstance(reply, ReplyError):
                return reply
            redirect = self._redirect(slot, reply)
            if redirect is None:
                break
            if redirect.importing_node:
                await redirect.importing_node.connection.wait_for_first_attempt(self._options.timeout_s)
                with redirect.importing_node.connection.send([command(b"ASKING"), request]) as sent:
                    reply = (await sent.replies())[1]
                if not isinstance(reply, ReplyError | StoreError):
                    return reply
            await asyncio.sleep(RETRY_PAUSE_S)
        raise StoreUnavailable(f"the Redis cluster at {self._name} returned an error: {reply}")

    async def scan(self, match: bytes) -> AsyncIterator[list[bytes]]:
        for node in self._owners():
            async for keys in scan(node.connection, match):
                yield keys

    async def publish(self, message: bytes) -> None:
        """Publish on any node: a cluster forwards messages to all nodes."""
        error: StoreError = StoreUnavailable(f"no connection to the Redis cluster at {self._name}")
        for node in self._owners():
            try:
                await node.connection.execute(command(b"PUBLISH", self._options.channel, message))
                return
            except StoreError as exc:
                error = exc
        raise error

    def nodes(self) -> list[ServerNode]:
        return [
            ServerNode(address.host, str(address.port), node.connection, in_cluster=True)
            for address, node in self._nodes.items()
        ]

    def _owners(self) -> Iterable[ScriptNode]:
        return [node for node in dict.fromkeys(self._map) if node is not None]

    def pubsub_connect(self) -> Connect:
        return self._connect_to_any

    async def _connect_to_any(self, timeout_s: float) -> PipelinedConnection:
        error: StoreError = StoreUnavailable(f"no connection to the Redis cluster at {self._name}")
        for address in [*map(self._address, self._nodes), *self._seeds]:
            try:
                return await connect(address, timeout_s)
            except StoreError as exc:
                error = exc
        raise error

    async def close(self) -> None:
        if self._refresh_task is not None:
            self._refresh_task.cancel()
            await asyncio.gather(self._refresh_task, return_exceptions=True)
        for task in self._closing:
            task.cancel()
        await asyncio.gather(*(node.close() for node in self._nodes.values()), *self._closing, return_exceptions=True)


class _Run(NamedTuple):
    """Plans of a batch that one node decides in one run. All slots have the same owner."""

    numbers: Sequence[int]  # indexes of the plans in the batch
    plans: Sequence[EncodedPlan[bytes]]
    slots: Sequence[int]  # slot of each plan
    importing_node: ScriptNode | None = None  # decides the run, whose single slot is being moved to it; None: the owner

    @property
    def spans_slots(self) -> bool:
        return len(set(self.slots)) > 1

    @property
    def script_run(self) -> ScriptRun:
        return ScriptRun(self.plans, self.spans_slots)

    def part(self, start: int, end: int) -> _Run:
        return _Run(self.numbers[start:end], self.plans[start:end], self.slots[start:end])


class _Redirect(NamedTuple):
    importing_node: ScriptNode | None  # None: look the node up in the slot map again


def _split(run: _Run) -> Iterator[_Run]:
    """Split a run into runs of at most MAX_BATCH_STEPS limits."""
    start = 0
    for plans in split_runs(run.plans):
        end = start + len(plans)
        yield run if len(plans) == len(run.plans) else run.part(start, end)
        start = end


def _split_by_slot(run: _Run) -> Iterator[_Run]:
    """Split a run into runs of one slot each, of at most MAX_BATCH_STEPS limits."""
    by_slot: dict[int, list[int]] = {}
    for at, slot in enumerate(run.slots):
        by_slot.setdefault(slot, []).append(at)
    for slot, members in by_slot.items():
        part = _Run([run.numbers[at] for at in members], [run.plans[at] for at in members], [slot] * len(members))
        yield from _split(part)
