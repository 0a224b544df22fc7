"""A Redis Cluster: which node has which slot, kept up to date, and work sent to where it belongs.

Nodes tell where a slot is (CLUSTER SLOTS), and when it has moved (MOVED) or is about to (ASK). They then say, too, that
they did not run what was sent, so it may be sent again elsewhere. When a node is away, the map is asked for again and
again until somebody else has its slots.
"""

from __future__ import annotations

import asyncio
from binascii import crc_hqx
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any, NamedTuple

import structlog

from ratelimit_rls.errors import StoreError, StoreUnavailable
from ratelimit_rls.settings.redis_address import RedisAddress, RedisServers
from ratelimit_rls.store.redis.commands import command
from ratelimit_rls.store.redis.connect import Pipe, ReplyError, connect
from ratelimit_rls.store.redis.line import LONGEST_ATTEMPT_S, Connect
from ratelimit_rls.store.redis.node import Node, Terms
from ratelimit_rls.store.redis.servers import Work, no_reply_error, scan
from ratelimit_rls.store.redis.view import SLOTS, View, Where, parse_where, told_at, told_by

log = structlog.get_logger()

CALM_S = 10.0
"""Between two looks at the map while nothing seems wrong."""

TROUBLED_S = 0.1
"""The same while a node is away or slots are on the move."""

MOST_MOVES = 8
"""Times that one run is sent elsewhere before it is given up: a map that leads in a circle must end."""

ASKED_AT_ONCE = 256
"""Keys that are looked at or forgotten together."""

PAUSE_S = 0.01
"""Before a run is sent again whose keys are on the move (TRYAGAIN)."""

GUEST_S = 60.0
"""For so long a node without slots is kept that somebody was sent to (ASK): it is about to get its first."""


def slot_of(key: bytes) -> int:
    """What is in the first braces decides, or the whole key."""
    start = key.find(b"{")
    if start >= 0:
        end = key.find(b"}", start)
        if end > start + 1:
            key = key[start + 1 : end]
    return crc_hqx(key, 0) % SLOTS


class Cluster:
    def __init__(self, servers: RedisServers, terms: Terms) -> None:
        self._seeds = servers.addresses
        self._name = str(servers)
        self._terms = terms
        self._nodes: dict[Where, Node] = {}
        self._map: list[Node | None] = [None] * SLOTS
        self._guests: dict[Node, float] = {}  # and the moment somebody was sent there
        self._look = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._leaving: set[asyncio.Task[None]] = set()

    @property
    def connected(self) -> bool:
        """Whether every node that has slots can be asked."""
        owners = set(self._map)
        return None not in owners and all(node.line.connected for node in owners if node)

    @property
    def channel(self) -> bytes:
        return self._terms.channel

    async def start(self) -> None:
        await self._learn()
        await asyncio.gather(*(node.line.first_attempt() for node in self._nodes.values()))
        if not any(node.line.connected for node in self._nodes.values()):
            raise StoreUnavailable(f"no node of the Redis cluster at {self._name} can be reached")
        self._keep()

    def start_in_background(self) -> None:
        self._look.set()
        self._keep()

    def _keep(self) -> None:
        self._keeper = asyncio.create_task(self._keep_learning())

    async def _keep_learning(self) -> None:
        told = False
        while True:
            pause_s = CALM_S if self.connected else TROUBLED_S
            try:
                async with asyncio.timeout(pause_s):
                    await self._look.wait()
            except TimeoutError:
                pass
            self._look.clear()
            try:
                await self._learn()
                told = False
            except StoreError as exc:
                tell = log.debug if told else log.warning  # the first reason is worth a line
                tell("the redis cluster does not say who has which slot", error=str(exc))
                told = True
            await asyncio.sleep(TROUBLED_S / 2)  # a hundred runs that were moved are one reason to look

    async def _learn(self) -> None:
        self._take(await self._best_view())

    async def _best_view(self) -> View:
        """Ask for the map: nodes that are connected first, then those that were named in the settings.

        A node that is cut off from the others, or has left them, tells how things were, or of nothing. It also says
        that its cluster is down, so it is believed only if nobody tells better.
        """
        nodes = [partial(told_by, node) for node in self._nodes.values() if node.line.connected]
        timeout_s = min(self._terms.connect_timeout_s, LONGEST_ATTEMPT_S)
        seeds = [partial(told_at, address, timeout_s) for address in self._seeds]
        views: list[View] = []
        faults: list[str] = []
        for some in (nodes, seeds):
            for ask in some:
                try:
                    view = await ask()
                except StoreError as exc:
                    faults.append(str(exc))
                    continue
                if view.is_well:
                    return view
                views.append(view)
            if any(view.ranges for view in views):
                break  # down it is; new connections to ever so many seeds would only take time
        best = max(views, key=lambda view: view.covered, default=None)
        if best is None or not best.ranges:
            raise StoreUnavailable("; ".join(faults) or f"no node of the Redis cluster at {self._name} has slots")
        return best

    def _take(self, view: View) -> None:
        owners: list[Node | None] = [None] * SLOTS
        for first, last, where in view.ranges:
            owners[first : last + 1] = [self._node(where)] * (last + 1 - first)
        self._map = owners
        now_s = monotonic()
        self._guests = {node: at_s for node, at_s in self._guests.items() if now_s - at_s < GUEST_S}
        used = {*owners, *self._guests}
        for where, node in list(self._nodes.items()):
            if node not in used:
                del self._nodes[where]
                self._leave(node)

    def _node(self, where: Where) -> Node:
        node = self._nodes.get(where)
        if node is None:
            terms = replace(self._terms, on_connection=self._told_of_connection)
            node = self._nodes[where] = Node(
                f"{where.host}:{where.port}", partial(connect, self._address(where)), terms, must_write=False
            )
            node.line.start_in_background()
        return node

    def _address(self, where: Where) -> RedisAddress:
        return replace(self._seeds[0], host=where.host, port=where.port, path="")

    def _told_of_connection(self, up: bool) -> None:
        if not up:
            self._look.set()
        self._terms.on_connection(any(node.line.connected for node in self._nodes.values()))

    def _leave(self, node: Node) -> None:
        task = asyncio.create_task(self._see_off(node))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _see_off(self, node: Node) -> None:
        """It gets nothing more; what was sent to it is answered by then, or too late."""
        try:
            await asyncio.sleep(self._terms.timeout_s)
        finally:
            await node.close()

    def shard(self, key: bytes) -> int:
        return slot_of(key)

    async def decide(self, work: Sequence[Work]) -> list[Any]:
        replies: list[Any] = [None] * len(work)
        pending = [_Errand(number, None) for number in range(len(work))]
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._terms.timeout_s
        for moves in range(MOST_MOVES):
            told = await self._carry(work, pending)
            again = []
            for errand, reply in zip(pending, told, strict=True):
                where_to = self._sent_on(work[errand.number].shard, reply) if isinstance(reply, ReplyError) else None
                if where_to is None:
                    replies[errand.number] = no_reply_error(self._name, reply)
                else:
                    replies[errand.number] = StoreUnavailable(
                        f"a slot of Redis at {self._name} is on the move: {reply}"
                    )
                    again.append(_Errand(errand.number, where_to.asking))
            if not again or (moves and loop.time() >= until_s):  # the first word of a move is followed, however late
                return replies
            pending = again
            if moves:
                await asyncio.sleep(PAUSE_S)
        return replies

    async def _carry(self, work: Sequence[Work], errands: Sequence[_Errand]) -> list[Any]:
        """Each to its node, all nodes at once."""
        by_node: dict[tuple[Node | None, bool], list[int]] = {}
        for at, errand in enumerate(errands):
            node = errand.asking or self._map[work[errand.number].shard]
            by_node.setdefault((node, errand.asking is not None), []).append(at)
        told: list[Any] = [None] * len(errands)

        async def carry(node: Node | None, asking: bool, members: list[int]) -> None:
            try:
                if node is None:
                    self._look.set()
                    raise StoreUnavailable(f"nobody in the Redis cluster at {self._name} has this slot")
                if not node.line.connected:
                    await node.line.first_attempt(self._terms.timeout_s)  # somebody who was just heard of
                replies = await node.decide([work[errands[at].number].run for at in members], asking=asking)
            except StoreError as exc:
                replies = [exc] * len(members)
            for at, reply in zip(members, replies, strict=True):
                told[at] = reply

        await asyncio.gather(*(carry(node, asking, members) for (node, asking), members in by_node.items()))
        return told

    def _sent_on(self, slot: int, error: ReplyError) -> _SentOn | None:
        """Where a run should be sent next; None: nowhere, that is the answer."""
        try:
            return self._named_by(slot, str(error))
        except StoreUnavailable as exc:
            log.warning("a redis cluster leads nowhere", error=str(exc))
            return None

    def _named_by(self, slot: int, error: str) -> _SentOn | None:
        match error.split(" "):
            case ["MOVED", _, whose]:
                self._look.set()
                self._map[slot] = self._named(whose, slot)
                return _SentOn(None)
            case ["ASK", _, whose]:
                guest = self._named(whose, slot)
                self._guests[guest] = monotonic()
                return _SentOn(guest)
            case ["TRYAGAIN", *_]:
                self._look.set()
                return _SentOn(None)
            case ["CLUSTERDOWN", *_]:
                # It may be so for a second or for hours: until then, every call is told at once.
                self._look.set()
                return None
            case _:
                return None

    def _named(self, name: str, slot: int) -> Node:
        """Without a host, it is that of the node that said so, which has been the slot's. Raises StoreUnavailable."""
        host, port = parse_where(name)
        owner = self._map[slot]
        return self._node(Where(host or (parse_where(owner.line.name).host if owner else ""), port))

    async def each(self, verb: bytes, keys: Sequence[bytes]) -> list[Any]:
        told: list[Any] = []
        for at in range(0, len(keys), ASKED_AT_ONCE):
            some = keys[at : at + ASKED_AT_ONCE]
            told += await asyncio.gather(*(self._ask_owner(slot_of(key), command(verb, key)) for key in some))
        return told

    async def _ask_owner(self, slot: int, asked: bytes) -> Any:
        for _ in range(MOST_MOVES):
            node = self._map[slot]
            if node is None:
                raise StoreUnavailable(f"nobody in the Redis cluster at {self._name} has this slot")
            await node.line.first_attempt(self._terms.timeout_s)
            with node.line.send([asked]) as sent:
                (reply,) = await sent.replies()
            if isinstance(reply, StoreError):
                raise reply
            if not isinstance(reply, ReplyError):
                return reply
            where_to = self._sent_on(slot, reply)
            if where_to is None:
                break
            if where_to.asking:
                await where_to.asking.line.first_attempt(self._terms.timeout_s)
                with where_to.asking.line.send([command(b"ASKING"), asked]) as sent:
                    reply = (await sent.replies())[1]
                if not isinstance(reply, ReplyError | StoreError):
                    return reply
            await asyncio.sleep(PAUSE_S)
        raise StoreUnavailable(f"Redis at {self._name} refused: {reply}")

    async def scan(self, match: bytes) -> AsyncIterator[list[bytes]]:
        for node in self._owners():
            async for keys in scan(node.line, match):
                yield keys

    async def publish(self, message: bytes) -> None:
        """To any node: a cluster passes it on to all."""
        fault: StoreError = StoreUnavailable(f"no connection to the Redis cluster at {self._name}")
        for node in self._owners():
            try:
                await node.line.ask(command(b"PUBLISH", self._terms.channel, message))
                return
            except StoreError as exc:
                fault = exc
        raise fault

    def _owners(self) -> Iterable[Node]:
        return [node for node in dict.fromkeys(self._map) if node is not None]

    def connect_to_listen(self) -> Connect:
        return self._connect_to_any

    async def _connect_to_any(self, timeout_s: float) -> Pipe:
        fault: StoreError = StoreUnavailable(f"no connection to the Redis cluster at {self._name}")
        for address in [*map(self._address, self._nodes), *self._seeds]:
            try:
                return await connect(address, timeout_s)
            except StoreError as exc:
                fault = exc
        raise fault

    async def close(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        for leaving in self._leaving:
            leaving.cancel()
        await asyncio.gather(*(node.close() for node in self._nodes.values()), *self._leaving, return_exceptions=True)


class _Errand(NamedTuple):
    number: int  # of the work
    asking: Node | None  # who is about to get its slot, if that is who must be asked


class _SentOn(NamedTuple):
    asking: Node | None  # None: ask the map again
