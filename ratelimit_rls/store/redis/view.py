"""A cluster as one of its nodes sees it: whether it is well, and who has which slots."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from ratelimit_rls.errors import StoreError, StoreTimeout, StoreUnavailable
from ratelimit_rls.settings.redis_address import RedisAddress
from ratelimit_rls.store.redis.commands import command
from ratelimit_rls.store.redis.connect import ReplyError, connect
from ratelimit_rls.store.redis.node import Node

SLOTS = 16_384

_HOW_AND_WHERE = command(b"CLUSTER", b"INFO"), command(b"CLUSTER", b"SLOTS")


class Where(NamedTuple):
    host: str
    port: int


def parse_where(text: str) -> Where:
    """Of host:port, which IPv6 has without brackets. Raises StoreUnavailable."""
    host, _, port = text.rpartition(":")
    try:
        return Where(host, int(port))
    except ValueError:
        raise StoreUnavailable(f"Redis names a node in a way that is not understood: {text!r}") from None


class View(NamedTuple):
    """The cluster, as one of its nodes sees it."""

    is_well: bool
    ranges: list[tuple[int, int, Where]]  # of slots, from the first to the last, and whose they are

    @property
    def covered(self) -> int:
        return sum(last + 1 - first for first, last, _ in self.ranges)


async def told_by(node: Node) -> View:
    with node.line.send(_HOW_AND_WHERE) as sent:
        info, slots = await sent.replies()
    return _view(info, slots, parse_where(node.line.name))


async def told_at(address: RedisAddress, timeout_s: float) -> View:
    pipe = await connect(address, timeout_s)
    try:
        async with asyncio.timeout(timeout_s):
            info, slots = [await reply for reply in map(pipe.send, _HOW_AND_WHERE)]
    except TimeoutError:
        raise StoreTimeout(f"Redis at {address} does not tell its slots: no answer within {timeout_s:g} s") from None
    finally:
        pipe.abort()
    return _view(info, slots, Where(address.host, address.port))


def _view(info: Any, slots: Any, asked: Where) -> View:
    """A host that a node does not know of is its own. Raises StoreError."""
    if isinstance(slots, StoreError):
        raise slots
    name = f"{asked.host}:{asked.port}"
    if isinstance(slots, ReplyError):
        raise StoreUnavailable(f"Redis at {name} is not a node of a cluster: {slots}")
    try:
        ranges = [
            (first, last, Where(host.decode() if host else asked.host, port))
            for first, last, (host, port, *_), *_ in slots
        ]
        if not all(0 <= first <= last < SLOTS and 0 < node.port < 65_536 for first, last, node in ranges):
            raise ValueError("a slot or a port that does not exist")
    except (TypeError, ValueError, AttributeError) as exc:
        raise StoreUnavailable(f"Redis at {name} tells its slots in a way that is not understood: {exc}") from exc
    # Who may not ask how a cluster is has to take it as it comes.
    return View(bool(ranges) and not (isinstance(info, bytes) and b"cluster_state:ok" not in info), ranges)
