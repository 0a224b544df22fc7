"""Limits on the connections, time and bytes that clients of the HTTP ports can use."""

from __future__ import annotations

from dataclasses import dataclass

MAX_HEAD_BYTES = 16 * 1024
"""Maximum size of the request line and header fields."""

MAX_HEADER_FIELDS = 100
"""Maximum number of header fields, as in Envoy."""

MAX_BUFFERED_BYTES = 16 * 2**20
"""Maximum size of unanswered requests, on all HTTP ports of a process."""

FREE_BYTES = 4096
"""Bytes of each connection that do not count towards MAX_BUFFERED_BYTES, so that probes are answered when it is used
up."""

MAX_DRAINED_BYTES = 8 * 2**20
"""Bytes of a body that are read and discarded after its response was sent. Closing at once could lose the response."""

MAX_REJECTED_CONNECTIONS = 64
"""Connections over the limit that receive a 503 response. Further ones are closed without a response."""

MAX_COMPARED_CONNECTIONS = 64
"""Connections that are compared to select one for eviction."""


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits of one port. Times are in seconds."""

    max_connections: int = 1024  # 0: no limit
    max_connections_per_peer: int = 256  # 0: no limit
    head_s: float = 10.0  # from the connection, or the previous response, to the end of the request head
    body_idle_s: float = 10.0  # without a byte of the body
    body_s: float = 30.0  # for the whole body
    drain_s: float = 5.0  # for the rest of a body whose response was sent before its end
    keep_alive_s: float = 5.0  # between a response and the first byte of the next request
    write_stall_s: float = 30.0  # during which the client reads nothing of a response
    linger_s: float = 2.0  # for the client to read the last response before the connection is aborted
    tick_s: float = 1.0  # interval of the checks, and so the precision of the times above


class BufferBudget:
    """Budget of buffered bytes that all HTTP ports of a process share."""

    def __init__(self, max_bytes: int = MAX_BUFFERED_BYTES) -> None:
        self._max_bytes = max_bytes
        self.used_bytes = 0

    def take(self, size: int) -> bool:
        """Reserve `size` bytes. Return False, and reserve nothing, if they do not fit."""
        if self.used_bytes + size > self._max_bytes:
            return False
        self.used_bytes += size
        return True

    def give_back(self, size: int) -> None:
        self.used_bytes -= size
