"""The time that queued calls may wait for others, so that the store gets one batch instead of many.

Calls wait only while other calls of this process are being decided, so a lone call never does. They go on when these
are answered, when the window of the first of them ends, or when they are many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic

from ratelimit_rls.common.timers import CallLater, Timer, call_not_before
from ratelimit_rls.transport.grpc.protocol import GrpcQueuedCall

MAX_WAITING_CALLS = 128
"""Calls with which a batch goes on at once: a larger one saves Redis hardly anything."""

MIN_WINDOWS_LEFT = 5
"""A call waits only if its deadline, less the margin, is this many windows away: most of that time is for the store."""

TIMER_S = 0.001
"""Resolution of event loop timers. A shorter window ends after this time, unless something arrives meanwhile."""


class BatchWindow:
    """Decides how long queued calls wait. Calls of all methods share one window."""

    def __init__(
        self,
        window_s: float,
        margin_s: float,
        on_end: Callable[[], None],
        *,
        clock: Callable[[], float] = monotonic,
        call_later: CallLater = call_not_before,
    ) -> None:
        """`margin_s` is that before a caller's deadline. `on_end` is called when calls have waited long enough."""
        self._window_s = window_s
        self._min_time_left_s = margin_s + MIN_WINDOWS_LEFT * max(window_s, TIMER_S)
        self._on_end = on_end
        self._clock = clock
        self._call_later = call_later
        self._timer: Timer | None = None

    @property
    def is_open(self) -> bool:
        """Return True while calls wait."""
        return self._timer is not None

    def holds(self, calls: Sequence[GrpcQueuedCall]) -> bool:
        """Return True if these calls, in the order of their arrival, wait for more. `on_end` is called later then."""
        _, _, _, arrived_s, _ = calls[0]
        left_s = arrived_s + self._window_s - self._clock()
        if (
            left_s <= 0
            or len(calls) >= MAX_WAITING_CALLS
            or any(headers.deadline_in_s < self._min_time_left_s for _, _, _, _, headers in calls)
        ):
            return False
        if self._timer is None:
            self._timer = self._call_later(left_s, self._on_timer)
        return True

    def close(self) -> None:
        """End the window: nothing waits any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        self._timer = None
        self._on_end()
