"""Slot map of a cluster as one of its nodes reports it, with the health of the cluster."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from ratelimit_rls.core.storage_keys import SLOTS
from ratelimit_rls.errors import StoreError, StoreTimeout, StoreUnavailable, StoreUnusable
from ratelimit_rls.settings.redis_address import RedisAddress
from ratelimit_rls.store.redis.connection import ReplyError, connect
from ratelimit_rls.store.redis.reply_errors import explain, is_error
from ratelimit_rls.store.redis.resp import command
from ratelimit_rls.store.redis.script_node import ScriptNode

_CLUSTER_COMMANDS = command(b"CLUSTER", b"INFO"), command(b"CLUSTER", b"SLOTS")


class HostPort(NamedTuple):
    host: str
    port: int


def parse_host_port(text: str) -> HostPort:
    """Parse host:port, where an IPv6 host has no brackets. Raises StoreUnavailable."""
    host, _, port = text.rpartition(":")
    try:
        return HostPort(host, int(port))
    except ValueError:
        raise StoreUnavailable(f"cannot parse the address of a Redis node: {text!r} is not host:port") from None


class SlotMap(NamedTuple):
    """The owners of a cluster's slots, as one of its nodes reports them."""

    is_healthy: bool
    ranges: list[tuple[int, int, HostPort]]  # first slot, last slot, owner

    @property
    def covered(self) -> int:
        return sum(last + 1 - first for first, last, _ in self.ranges)


async def fetch_from_node(node: ScriptNode) -> SlotMap:
    with node.connection.send(_CLUSTER_COMMANDS) as sent:
        info, slots = await sent.replies()
    return _parse_slot_map(info, slots, parse_host_port(node.connection.name))


async def fetch_from_address(address: RedisAddress, timeout_s: float) -> SlotMap:
    connection = await connect(address, timeout_s)
    try:
        async with asyncio.timeout(timeout_s):
            info, slots = [await reply for reply in map(connection.send, _CLUSTER_COMMANDS)]
    except TimeoutError:
        raise StoreTimeout(f"Redis at {address} did not return its cluster slots within {timeout_s:g} s") from None
    finally:
        connection.abort()
    return _parse_slot_map(info, slots, HostPort(address.host, address.port))


def _explain(error: ReplyError) -> str:
    """Return why CLUSTER SLOTS failed, and what would be right."""
    if is_error(error, "NOPERM"):
        return "its user may not run CLUSTER SLOTS: grant +cluster|slots and +cluster|info"
    if "cluster support disabled" in str(error):
        return "it is not a node of a cluster: set REDIS_TYPE=SINGLE"
    return explain(error)


def _parse_slot_map(info: Any, slots: Any, source: HostPort) -> SlotMap:
    """Parse the replies of `source`, whose host replaces missing ones. Raises StoreError."""
    if isinstance(slots, StoreError):
        raise slots
    name = f"{source.host}:{source.port}"
    if isinstance(slots, ReplyError):
        raise StoreUnusable(name, _explain(slots))
    try:
        ranges = [
            (first, last, HostPort(host.decode() if host else source.host, port))
            for first, last, (host, port, *_), *_ in slots
        ]
        if not all(0 <= first <= last < SLOTS and 0 < node.port < 65_536 for first, last, node in ranges):
            raise ValueError("slots must be 0 to 16383 and ports 1 to 65535")
    except (TypeError, ValueError, AttributeError) as exc:
        raise StoreUnavailable(f"cannot parse the CLUSTER SLOTS reply of Redis at {name}: {exc}") from exc
    # A user without the permission for CLUSTER INFO gets an error; the cluster then counts as healthy.
    return SlotMap(bool(ranges) and not (isinstance(info, bytes) and b"cluster_state:ok" not in info), ranges)
