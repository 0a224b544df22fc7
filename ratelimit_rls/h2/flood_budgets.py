"""Budgets for frames that cost the server work and the client nothing (CVE-2019-9511 to 9518, CVE-2023-44487).

Each kind of frame has a leaky bucket: it allows a burst, and beyond that a number of frames per call and per second.
The allowances are chosen, not measured. grpc-go, grpc-js, grpcio, h2load and Envoy with 5,000 concurrent calls stay
within them.
"""

from __future__ import annotations

from typing import NamedTuple

from ratelimit_rls.h2.frames import ErrorCode, Http2ConnectionError
from ratelimit_rls.h2.reasons import Reason


class Allowance(NamedTuple):
    """Parameters of a leaky bucket."""

    burst: float  # frames allowed at once
    per_call: float  # additional frames for each call
    per_second: float  # additional frames for each second


ALLOWANCES: dict[Reason, Allowance] = {
    # gRPC clients measure the bandwidth-delay product with at most one PING per round trip.
    Reason.PING_FLOOD: Allowance(200, 1, 10),
    Reason.SETTINGS_FLOOD: Allowance(50, 0, 1),
    Reason.PRIORITY_FLOOD: Allowance(200, 2, 10),
    # Clients may update the windows of the stream and of the connection with every call.
    Reason.WINDOW_UPDATE_FLOOD: Allowance(500, 4, 100),
    # Tiny frames without END_STREAM. Some clients send the prefix of a message in a separate frame.
    Reason.EMPTY_DATA_FLOOD: Allowance(1000, 2, 100),
    Reason.UNKNOWN_FRAME_FLOOD: Allowance(200, 1, 10),
    # Calls cancelled before they could be answered. Only answered calls add to this budget: at most half may be wasted.
    Reason.RAPID_RESET: Allowance(2500, 1, 50),
    # Streams that the server had to reset: malformed, too large, or more than MAX_CONCURRENT_STREAMS.
    Reason.RESETS_PROVOKED: Allowance(2500, 1, 50),
    # Header fields that had to be decoded, in blocks that were not in the cache.
    Reason.HPACK_FLOOD: Allowance(20_000, 200, 1000),
}


MAX_SAVED_CALLS = 2048
"""Calls whose allowance can accumulate: a client may send frames for all streams of a connection at once."""


class FloodError(Http2ConnectionError):
    """Connection error ENHANCE_YOUR_CALM: the client sends more frames of a kind than its budget allows."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(ErrorCode.ENHANCE_YOUR_CALM, f"flood of frames ({reason.value})", reason)


class FloodBudget:
    """Leaky buckets of one connection."""

    __slots__ = ("_levels",)

    def __init__(self) -> None:
        self._levels: dict[Reason, tuple[float, float, int]] = {}  # level, time and number of calls at the last update

    def spend(self, reason: Reason, now_s: float, calls: int, cost: float = 1) -> None:
        """Charge a frame. `calls` is the number of calls of the connection so far. Raises FloodError over budget."""
        allowance = ALLOWANCES[reason]
        level, then_s, calls_then = self._levels.get(reason, (0.0, now_s, 0))
        level = max(level - allowance.per_second * (now_s - then_s), min(level, 0.0))
        level = max(level - allowance.per_call * (calls - calls_then), -allowance.per_call * MAX_SAVED_CALLS) + cost
        self._levels[reason] = level, now_s, calls
        if level > allowance.burst:
            raise FloodError(reason)
