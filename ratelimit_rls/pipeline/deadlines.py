"""Timer for callers' deadlines: one for all pending batches, whose calls get a response in time if the store is late.

A batch that ends in time costs one insertion and one removal. The timer is not cancelled then: it fires about once per
deadline, handles what is left, and is set for the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from math import inf
from time import monotonic
from typing import Any, Protocol, TypeVar

import structlog

from ratelimit_rls.common.timers import CallLater, Timer, call_not_after

_log = structlog.get_logger()

TIMER_EARLY_S = 0.001
"""Event loop timers are set in whole milliseconds, rounded down, so one may fire this much too early. Calls due
by then get their response: the margin before a deadline must not be used up by our own timer."""


class Expiring(Hashable, Protocol):
    """A batch whose calls have deadlines."""

    @property
    def due_s(self) -> float:
        """The time at which a call of the batch becomes due, on the monotonic clock; inf: never."""
        ...


B = TypeVar("B", bound=Expiring)


class Deadlines:
    """The deadlines of pending batches.

    Guarantee: the callback of a watched batch is called when one of its calls is due, to the millisecond, if the event
    loop is free.
    """

    def __init__(self, *, clock: Callable[[], float] = monotonic, call_later: CallLater | None = None) -> None:
        """`call_later` defaults to that of the running loop."""
        self._clock = clock
        self._call_later = call_later or call_not_after
        self._pending: dict[Any, Callable[[Any, float], None]] = {}
        self._timer: Timer | None = None
        self._fires_s = inf

    def watch(self, pending: B, on_due: Callable[[B, float], None]) -> None:
        """Call `on_due(pending, now_s)` each time that calls are due, until `forget`."""
        due_s = pending.due_s
        if due_s < inf:
            self._pending[pending] = on_due
            if due_s < self._fires_s:
                self._schedule(due_s)

    def forget(self, pending: Expiring) -> None:
        self._pending.pop(pending, None)

    def close(self) -> None:
        self._pending.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _schedule(self, due_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._fires_s = due_s
        self._timer = self._call_later(max(0.0, due_s - self._clock()), self._on_timer)

    def _on_timer(self) -> None:
        self._timer, self._fires_s = None, inf
        by_s = self._clock() + TIMER_EARLY_S
        next_s = inf
        for pending, on_due in list(self._pending.items()):
            if pending.due_s <= by_s:
                try:
                    on_due(pending, by_s)
                except Exception:  # concerns this batch alone, which would be due again at once
                    _log.exception("deadline_failed")
                    self.forget(pending)
                    continue
            if pending.due_s < next_s:
                next_s = pending.due_s
        if next_s < inf:
            self._schedule(next_s)
