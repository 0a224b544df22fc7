"""The open connections of the gRPC port, within the bounds of the process: their number, buffered bytes and streams.

Whatever exceeds a bound is taken from the peer that has most of it, not from the one that comes next: otherwise one
client could lock out the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from heapq import heapify, heappop, heapreplace
from operator import itemgetter
from time import monotonic

import structlog

from ratelimit_rls.h2.config import Config
from ratelimit_rls.telemetry.abuse import Abuse, AbuseLog
from ratelimit_rls.transport.grpc.options import ServerLimits
from ratelimit_rls.transport.grpc.protocol import GrpcProtocol
from ratelimit_rls.transport.peers import ConnectionLimits, peer_group

EVICTION_INTERVAL_S = 0.02

MIN_LATE_S = 1.0
"""A connection whose input is late by more than this is evicted before one that is idle between two calls."""

MIN_STREAMS = 16
"""Streams that every connection may have, regardless of the total of the process."""

EXPIRE_S = 0.002
"""CPU time of an iteration for resetting streams above the limit."""

ROOM_SHARE = 0.9
"""Share of the limit on buffered bytes that is left after connections were closed to make room."""

SMALLER_SHARE = 0.75
"""A share of streams that shrinks by less than this factor is not announced."""

_log = structlog.get_logger()


class OpenConnections:
    """Counts connections, their buffered bytes and streams, and closes or limits connections above a bound."""

    def __init__(self, limits: ServerLimits, config: Config, abuse: AbuseLog) -> None:
        """`config` is that of all connections; its `max_streams` is lowered while there are too many streams."""
        self._limits = limits
        self._config = config
        self._abuse = abuse
        self._max_concurrent_streams = config.max_streams
        self._connection_limits = ConnectionLimits(limits.max_connections, limits.max_connections_per_peer)
        self._connections: set[GrpcProtocol] = set()
        self._expiring: list[tuple[GrpcProtocol, int]] = []  # connections with the number of streams to reset
        self._buffered_bytes = 0
        self._evicted_s = 0.0

    def __iter__(self) -> Iterator[GrpcProtocol]:
        return iter(self._connections)

    def __len__(self) -> int:
        return len(self._connections)

    def admit(self, connection: GrpcProtocol) -> Abuse | None:
        """Count a new connection, or return why it must be rejected."""
        rejection = self._connection_limits.admit(connection.peer)
        if rejection is not None and self._evict_idle(connection.peer, rejection):
            rejection = self._connection_limits.admit(connection.peer)
        if rejection is None:
            self._connections.add(connection)
        return rejection

    def _evict_idle(self, address: str, rejection: Abuse) -> bool:
        """Make room for a new connection: close one that waits for its client. Idle clients must not lock out others.

        Evicts from the peer with the most connections, if the new one's peer has fewer: an idle connection that never
        made a call, or else the one whose input is late for longest, or else an idle one, or else the one that has been
        silent for longest of those whose calls are all unfinished. If no peer has more, evicts an idle connection that
        never made a call. Happens at most every EVICTION_INTERVAL_S, because it scans all connections. Return whether a
        connection was evicted.
        """
        now_s = monotonic()
        if now_s - self._evicted_s < EVICTION_INTERVAL_S:
            return False
        self._evicted_s = now_s
        group = peer_group(address)
        largest, most = self._connection_limits.largest
        if rejection is Abuse.TOO_MANY_CONNECTIONS_OF_PEER:
            largest = group
        elif most <= self._connection_limits.count(group) + 1:
            largest = ""
        members = [one for one in self._connections if not largest or one.peer_group == largest]
        idle = [one for one in members if one.is_idle and (largest or not one.idle_order[0])]
        first = min(idle, key=lambda one: one.idle_order, default=None)
        late = max(members, key=lambda one: one.late_s(now_s), default=None) if largest else None
        if late is not None and late.late_s(now_s) > MIN_LATE_S and (first is None or first.idle_order[0]):
            evicted = late
        elif first is not None:
            evicted = first
        elif largest:
            by_silence = sorted(members, key=lambda one: one.idle_order)
            unfinished = next((one for one in by_silence if one.waits_for_client), None)
            if unfinished is None:
                return False
            evicted = unfinished
        else:
            return False
        self._abuse.record(rejection, evicted.peer)
        evicted.close_idle()
        return True

    def remove(self, connection: GrpcProtocol) -> None:
        """Stop counting a connection."""
        self._connections.discard(connection)
        self._connection_limits.release(connection.peer)

    def on_buffered(self, more_bytes: int) -> None:
        """Free buffers above the limit: first the header caches, then those of the peers that buffer most."""
        self._buffered_bytes += more_bytes
        if more_bytes <= 0 or self._buffered_bytes <= self._limits.max_unfinished_bytes:
            return
        for connection in self._connections:
            connection.clear_header_cache()  # free caches before closing a connection
        # If that frees little, the limit would soon be exceeded again, and each time all connections are scanned.
        if self._buffered_bytes > self._limits.max_unfinished_bytes * ROOM_SHARE:
            self._close_largest()

    def _close_largest(self) -> None:
        """Close the largest connection of the peer that buffers most, and so on until there is room.

        Not the largest of all connections: many that buffer a little each would have another client's closed. Frees a
        tenth of the limit at once, because this scans all connections.
        """
        groups: dict[str, list[GrpcProtocol]] = {}
        for connection in self._connections:
            groups.setdefault(connection.peer_group, []).append(connection)
        for members in groups.values():
            members.sort(key=lambda connection: connection.buffered_bytes)
        heap = [(-sum(one.buffered_bytes for one in members), group) for group, members in groups.items()]
        heapify(heap)
        while heap and self._buffered_bytes > self._limits.max_unfinished_bytes * ROOM_SHARE:
            negative_bytes, group = heap[0]
            largest = groups[group].pop()
            negative_bytes += largest.buffered_bytes
            largest.disconnect(Abuse.UNFINISHED_BYTES, "the server buffers too much, and this peer has the most")
            if groups[group]:
                heapreplace(heap, (negative_bytes, group))
            else:
                heappop(heap)

    def check(self) -> None:
        """Close or reset what makes no progress, and keep the number of streams within its limit. Call it once a
        second."""
        now_s = monotonic()
        for connection in list(self._connections):
            try:
                connection.check_timeouts(now_s)
            except Exception:  # concerns this connection alone
                _log.exception("connection_check_failed")
                connection.abort()
        self._share_streams()

    def _share_streams(self) -> None:
        """Keep the streams of the process within their limit.

        Resets streams that wait for their clients first, on the connections with the most of them. While there are
        still too many, limits each connection to an equal share, and announces it.
        """
        if self._expiring:
            return
        count = sum([connection.open_streams for connection in self._connections])
        if count > self._limits.max_streams:
            count -= self._expire_streams(count - self._limits.max_streams)
        if count > self._limits.max_streams:
            share = max(MIN_STREAMS, self._limits.max_streams // len(self._connections))
            if self._config.max_streams == self._max_concurrent_streams:
                self._abuse.record(Abuse.TOO_MANY_STREAMS, "all")
            if share <= self._config.max_streams * SMALLER_SHARE:
                self._allow_streams(share)
        elif count < self._limits.max_streams // 2 and self._config.max_streams < self._max_concurrent_streams:
            self._allow_streams(self._max_concurrent_streams)

    def _expire_streams(self, too_many: int) -> int:
        """Begin to reset up to `too_many` streams that wait for their clients, and return the maximum number of resets.

        Each connection keeps the same number of such streams, or all if it has fewer. Its oldest streams are reset.
        """
        waiting = sorted([(one.unfinished_streams, one) for one in self._connections], key=itemgetter(0))
        room = sum([count for count, _ in waiting]) - too_many
        expired = 0
        for number, (count, connection) in enumerate(waiting):
            kept = min(count, max(room // (len(waiting) - number), 1))
            room -= kept
            if kept < count:
                expired += count - kept
                self._expiring.append((connection, count - kept))
        self._go_on_expiring()
        return expired

    def _go_on_expiring(self) -> None:
        """Reset streams for at most EXPIRE_S, and continue in the next iteration."""
        until_s = monotonic() + EXPIRE_S
        while self._expiring and monotonic() < until_s:
            connection, count = self._expiring.pop()
            connection.expire(count, Abuse.TOO_MANY_STREAMS)
        if self._expiring:
            asyncio.get_running_loop().call_soon(self._go_on_expiring)

    def _allow_streams(self, max_streams: int) -> None:
        """Set the stream limit of every connection, and announce it."""
        before, self._config.max_streams = self._config.max_streams, max_streams
        now_s = monotonic()
        for connection in self._connections:
            connection.announce_streams(before, now_s)
