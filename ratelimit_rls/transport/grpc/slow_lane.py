"""Slow lane: a scheduler that shares the event loop fairly, by CPU time, between connections with expensive input.

Ordinary calls never enter it. Without it, each of N flooding connections would be read before any other connection.
There is a second one for connections that send much at once, which is blocked while many calls wait to be decided.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from time import monotonic
from typing import Protocol

import structlog

LANE_SLICE_S = 0.002
"""CPU time that the lane uses in one event loop iteration."""

INLINE_BURST_S = 0.004
INLINE_SHARE = 0.25
"""Slow input is read immediately, outside the lane, up to this share of a core. Most slow input comes from well-behaved
clients: a new header block, a message in two frames, or many calls at once."""

BLOCKED_INTERVAL_S = 0.02
"""Interval at which a blocked lane reads one connection all the same: other clients cannot stop it for good."""

MAX_DEBT_S = 0.01
"""Maximum delay of a connection behind the others for CPU time that it used before, inline included."""


_log = structlog.get_logger()


class SlowReader(Protocol):
    """A connection that the lane can schedule."""

    slow_s: float
    """CPU time spent on slow input, relative to the lane's own zero."""

    def continue_reading(self) -> None:
        """Continue reading for one slice of time. Enqueues itself again if there is more to read."""
        ...

    def abort(self) -> None:
        """Close the connection without sending what is buffered."""
        ...


class SlowLane:
    """Queue of connections, ordered by the CPU time that each has used."""

    def __init__(
        self, call_soon: Callable[[Callable[[], None]], object], is_blocked: Callable[[], bool] = lambda: False
    ) -> None:
        """While `is_blocked` returns True, one connection is read every BLOCKED_INTERVAL_S."""
        self._call_soon = call_soon
        self.is_blocked = is_blocked
        self._run_s = 0.0  # when connections were last read
        self._queue: list[tuple[float, int, SlowReader]] = []
        self._entries = 0  # makes heap entries unique, and equal ones first in, first out
        self._floor_s = 0.0  # lowest CPU time in the queue; idle connections accumulate no credit below it
        self._is_scheduled = False
        self._inline_s = INLINE_BURST_S
        self._refilled_s = monotonic()

    def __len__(self) -> int:
        return len(self._queue)

    def has_inline_time(self, now_s: float) -> bool:
        """Return whether slow input may be read immediately."""
        refill_s = INLINE_SHARE * (now_s - self._refilled_s)
        self._inline_s = min(self._inline_s + refill_s, INLINE_BURST_S)
        self._refilled_s = now_s
        return self._inline_s > 0.0

    def charge_inline(self, spent_s: float) -> None:
        """Subtract time spent outside the lane. A pause of the process is not owed for longer than a burst."""
        self._inline_s = max(self._inline_s - spent_s, -INLINE_BURST_S)

    def enqueue(self, connection: SlowReader) -> None:
        connection.slow_s = min(max(connection.slow_s, self._floor_s), self._floor_s + MAX_DEBT_S)
        self._entries += 1
        heappush(self._queue, (connection.slow_s, self._entries, connection))
        self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._call_soon(self._run)

    def _run(self) -> None:
        self._is_scheduled = False
        now_s = monotonic()
        is_blocked = self.is_blocked()
        if is_blocked and now_s - self._run_s < BLOCKED_INTERVAL_S:
            self._schedule()
            return
        self._run_s = now_s
        until_s = now_s + LANE_SLICE_S
        # Connections that enqueue themselves again wait for the next iteration.
        for _ in range(1 if is_blocked else len(self._queue)):
            self._floor_s, _, connection = heappop(self._queue)
            try:
                connection.continue_reading()
            except Exception:  # concerns this connection alone
                _log.exception("slow_input_failed")
                connection.abort()
            if monotonic() >= until_s:
                break
        if self._queue:
            self._schedule()
