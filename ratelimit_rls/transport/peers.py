"""Peers of connections: their addresses, and limits on their connections."""

from __future__ import annotations

import asyncio
import socket
from ipaddress import IPv6Address
from typing import NamedTuple

from ratelimit_rls.telemetry.abuse import Abuse

UNIX = "unix"
"""Peer address of Unix socket connections. File permissions control access, so there is no limit per peer."""

DISCONNECTED = ""
"""Peer address of TCP connections that were reset before they were accepted. Close them: they are not UNIX."""

_IPV6_NETWORK_BITS = 64
_TCP_INFO: int | None = getattr(socket, "TCP_INFO", None)
_CLOSE_WAIT = 8
"""Value of `tcpi_state` on Linux, the first byte of TCP_INFO, after a FIN was received."""


def peer_address(transport: asyncio.BaseTransport) -> str:
    """Return the address of a connection's peer without the port, UNIX, or DISCONNECTED."""
    name = transport.get_extra_info("peername")
    if isinstance(name, tuple) and name:
        return str(name[0])
    return DISCONNECTED if _is_tcp(transport) else UNIX


def _is_tcp(transport: asyncio.BaseTransport) -> bool:
    connection = transport.get_extra_info("socket")
    return connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6)


def has_peer_closed(transport: asyncio.BaseTransport) -> bool:
    """Return True if the peer of a TCP connection has closed it, although the transport is not reading.

    A transport that does not read learns of it only when it reads again. False if the system cannot tell (not Linux).
    """
    if _TCP_INFO is None or not _is_tcp(transport):
        return False
    connection = transport.get_extra_info("socket")
    return bool(connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 1)[0] == _CLOSE_WAIT)


def peer_group(address: str) -> str:
    """Return the part of an address that identifies one client: an IPv4 address, or the /64 network of an IPv6 address.

    Hosts are assigned whole /64 networks, so a limit per IPv6 address would be ineffective.
    """
    if ":" not in address:
        return address
    network = int(IPv6Address(address.partition("%")[0])) >> (128 - _IPV6_NETWORK_BITS)
    if network == 0:  # ::1, and IPv4 addresses as an IPv6 socket reports them
        return address
    return f"{IPv6Address(network << (128 - _IPV6_NETWORK_BITS))}/{_IPV6_NETWORK_BITS}"


class ConnectionLimits:
    """Limits connections in total and per peer. Every `admit` that returns None must be followed by one `release`."""

    def __init__(self, max_connections: int, max_per_peer: int) -> None:
        """Set the limits; 0 means no limit."""
        self._max_connections = max_connections
        self._max_per_peer = max_per_peer
        self._total = 0
        self._by_peer: dict[str, int] = {}

    @property
    def total(self) -> int:
        return self._total

    @property
    def largest(self) -> tuple[str, int]:
        """Peer group with the most connections, and their number."""
        return max(self._by_peer.items(), key=lambda item: item[1], default=("", 0))

    def count(self, group: str) -> int:
        """Return the number of connections of a peer group; 0 for Unix sockets."""
        return self._by_peer.get(group, 0)

    def admit(self, address: str) -> Abuse | None:
        """Count a new connection, or return why it must be rejected."""
        if self._max_connections and self._total >= self._max_connections:
            return Abuse.TOO_MANY_CONNECTIONS
        if address != UNIX:
            group = peer_group(address)
            count = self._by_peer.get(group, 0)
            if self._max_per_peer and count >= self._max_per_peer:
                return Abuse.TOO_MANY_CONNECTIONS_OF_PEER
            self._by_peer[group] = count + 1
        self._total += 1
        return None

    def release(self, address: str) -> None:
        self._total -= 1
        if address == UNIX:
            return
        group = peer_group(address)
        count = self._by_peer[group] - 1
        if count:
            self._by_peer[group] = count
        else:
            del self._by_peer[group]


class Evicted(NamedTuple):
    """A task that was evicted, and the limit that was reached."""

    task: asyncio.Task[None]
    address: str
    reason: Abuse


class PendingTasks:
    """Tasks that wait for peers, limited in total and per peer. At a limit, a new task evicts an old one.

    At the limit per peer, the oldest task of that peer is evicted; at the total, the oldest task of the peer with the
    most tasks. Finding that peer takes time proportional to the number of peers; everything else takes constant time.
    """

    def __init__(self, max_tasks: int, max_per_peer: int) -> None:
        self._max_tasks = max_tasks
        self._max_per_peer = max_per_peer
        self._total = 0
        self._by_peer: dict[str, dict[asyncio.Task[None], str]] = {}  # with addresses, oldest first

    def add(self, task: asyncio.Task[None], address: str) -> Evicted | None:
        """Add a task. Return the evicted task, if any, which is no longer counted; the caller must cancel it."""
        group = peer_group(address)
        evicted = None
        if group != UNIX and len(self._by_peer.get(group, ())) >= self._max_per_peer:
            evicted = self._evict(group, Abuse.TOO_MANY_CONNECTIONS_OF_PEER)
        elif self._total >= self._max_tasks:
            largest = max(self._by_peer, key=lambda peer: len(self._by_peer[peer]))
            evicted = self._evict(largest, Abuse.TOO_MANY_CONNECTIONS)
        self._by_peer.setdefault(group, {})[task] = address
        self._total += 1
        return evicted

    def discard(self, task: asyncio.Task[None], address: str) -> None:
        """Remove a task. Does nothing if the task was evicted."""
        group = peer_group(address)
        tasks = self._by_peer.get(group)
        if tasks is None or tasks.pop(task, None) is None:
            return
        self._total -= 1
        if not tasks:
            del self._by_peer[group]

    def _evict(self, group: str, reason: Abuse) -> Evicted:
        task, address = next(iter(self._by_peer[group].items()))
        self.discard(task, address)
        return Evicted(task, address, reason)
