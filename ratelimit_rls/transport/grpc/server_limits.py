"""Limits on what all clients of the gRPC port together may use."""

from __future__ import annotations

from typing import NamedTuple

from ratelimit_rls.h2.config import Timeouts


class ServerLimits(NamedTuple):
    """Limits of one process. For connections, 0 means no limit; bytes and streams are always limited."""

    max_connections: int = 4096
    max_connections_per_peer: int = 2048
    max_streams: int = 65_536
    max_unfinished_bytes: int = 32 * 2**20
    timeouts: Timeouts = Timeouts()
