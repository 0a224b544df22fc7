"""Eviction of connections: which one makes room, and how buffers above their limit are freed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from ratelimit_rls.h2.call_headers import CallHeadersParser
from ratelimit_rls.h2.config import Config
from ratelimit_rls.telemetry.abuse import Abuse, AbuseLog
from ratelimit_rls.transport.grpc.open_connections import MIN_LATE_S, OpenConnections
from ratelimit_rls.transport.grpc.options import ServerLimits
from ratelimit_rls.transport.grpc.protocol import GrpcProtocol


@dataclass(eq=False)
class FakeConnection:
    """A connection with the attributes and methods that `OpenConnections` uses."""

    peer: str = "192.0.2.1"
    is_idle: bool = True
    idle_order: tuple[bool, float] = (True, 0.0)
    late: float = 0.0
    waits_for_client: bool = False
    buffered_bytes: int = 0
    cache_bytes: int = 0
    scans: int = 0
    evicted: bool = False
    disconnected: list[Abuse] = field(default_factory=list)
    owner: Any = None

    @property
    def peer_group(self) -> str:
        return self.peer

    def late_s(self, now_s: float) -> float:
        return self.late

    def close_idle(self) -> None:
        self.evicted = True
        self.owner.remove(self)

    def clear_header_cache(self) -> None:
        self.scans += 1
        freed, self.cache_bytes = self.cache_bytes, 0
        self.buffered_bytes -= freed
        self.owner.on_buffered(-freed)

    def disconnect(self, reason: Abuse, message: str) -> None:
        self.disconnected.append(reason)
        freed, self.buffered_bytes = self.buffered_bytes, 0
        self.owner.on_buffered(-freed)


def open_connections(
    *connections: FakeConnection,
    max_connections: int = 0,
    max_connections_per_peer: int = 0,
    max_unfinished_bytes: int = 2**20,
) -> OpenConnections:
    config = Config(CallHeadersParser({}, "", {}))
    limits = ServerLimits(max_connections, max_connections_per_peer, max_unfinished_bytes=max_unfinished_bytes)
    opened = OpenConnections(limits, config, AbuseLog())
    for connection in connections:
        connection.owner = opened
        assert opened.admit(cast("GrpcProtocol", connection)) is None
        opened.on_buffered(connection.buffered_bytes)
    return opened


def admit(opened: OpenConnections, peer: str = "192.0.2.1") -> Abuse | None:
    return opened.admit(cast("GrpcProtocol", FakeConnection(peer, owner=opened)))


@pytest.mark.parametrize(
    ("connections", "evicted"),
    [
        ([FakeConnection(idle_order=(True, 1.0)), FakeConnection(idle_order=(True, 2.0))], 0),
        ([FakeConnection(), FakeConnection(is_idle=False, late=2 * MIN_LATE_S)], 1),
        ([FakeConnection(), FakeConnection(is_idle=False, late=MIN_LATE_S / 2)], 0),
        ([FakeConnection(is_idle=False, late=2.0), FakeConnection(is_idle=False, late=3.0)], 1),
        ([FakeConnection(is_idle=False, late=2.0), FakeConnection(idle_order=(False, 9.0))], 1),
        ([FakeConnection(is_idle=False), FakeConnection(is_idle=False, waits_for_client=True)], 1),
    ],
    ids=["silent for longest", "late", "hardly late", "latest", "never called", "unfinished"],
)
def test_place_of_a_peer_is_made_by(connections: list[FakeConnection], evicted: int) -> None:
    opened = open_connections(*connections, max_connections_per_peer=2)

    assert admit(opened) is None

    assert [one.evicted for one in connections] == [number == evicted for number in range(2)]


def test_connection_is_rejected_if_none_can_be_evicted() -> None:
    busy = FakeConnection(is_idle=False)
    opened = open_connections(busy, max_connections_per_peer=1)

    assert admit(opened) is Abuse.TOO_MANY_CONNECTIONS_OF_PEER
    assert not busy.evicted


def test_late_connection_of_a_peer_that_has_no_more_than_others_is_kept() -> None:
    late, other = FakeConnection(is_idle=False, late=9.0), FakeConnection("192.0.2.2", is_idle=False)
    opened = open_connections(late, other, max_connections=2)

    assert admit(opened, "192.0.2.3") is Abuse.TOO_MANY_CONNECTIONS
    assert not late.evicted


def test_caches_are_cleared_before_a_connection_is_closed() -> None:
    cached = FakeConnection(buffered_bytes=900, cache_bytes=800)
    opened = open_connections(cached, FakeConnection(), max_unfinished_bytes=1000)

    opened.on_buffered(200)

    assert not cached.disconnected
    assert opened._buffered_bytes == 300


def test_clearing_caches_that_frees_little_is_not_repeated_with_every_byte() -> None:
    large, small = FakeConnection(buffered_bytes=990, cache_bytes=10), FakeConnection(peer="192.0.2.2")
    opened = open_connections(large, small, max_unfinished_bytes=1000)
    for _ in range(20):
        small.buffered_bytes += 11
        opened.on_buffered(11)

    assert large.disconnected == [Abuse.UNFINISHED_BYTES]
    assert small.scans == 1
