"""Whoever cannot wait for the store any longer is answered in time: one timer for all batches of a transport.

A batch that ends in time costs an entry that comes and goes. The timer is not taken back then: it rings about once per
deadline, finds what is left, and is set for the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from math import inf
from time import monotonic
from typing import Generic, TypeVar

from ratelimit_rls.transport.grpc.door import Asked, Failure
from ratelimit_rls.transport.grpc.waiting import CallLater, Timer

EARLY_S = 0.001
"""Timers of the loop are set in whole milliseconds. Rounded down, one may ring by so much too early, and whoever is due
by then is answered: the margin before a deadline is not for our own timer."""

ROUNDED = 0.01
"""Clients tell a second and more as a number of few digits, rounded up by this share of it at most."""

Batch = TypeVar("Batch", bound=Hashable)


def deadline_s(now_s: float, left_s: float | None) -> float:
    """When a caller stops waiting, on the clock of `now_s`; never later than it really does."""
    if left_s is None:
        return inf
    return now_s + left_s if left_s < 1 else now_s + left_s * (1 - ROUNDED)


class Deadlines(Generic[Batch]):
    """Guarantee: a watched batch is asked for what is due when it is due, to the millisecond, if the loop is free."""

    def __init__(
        self,
        settle: Callable[[Batch, int, bytes | Failure], object],
        *,
        clock: Callable[[], float] = monotonic,
        call_later: CallLater | None = None,
    ) -> None:
        """`settle` is given each answer that is due, with its batch and its number there.

        `call_later` is the running loop's unless given.
        """
        self._settle = settle
        self._clock = clock
        self._call_later = call_later or _loop_call_later
        self._under_way: dict[Batch, Asked] = {}
        self._timer: Timer | None = None
        self._rings_s = inf

    def watch(self, batch: Batch, asked: Asked) -> None:
        """From now until `forget`. What is due already is settled at once."""
        due_s = asked.due_s
        if due_s < 0:
            self._settle_due(batch, asked, self._clock())
            due_s = asked.due_s
        if due_s < inf:
            self._under_way[batch] = asked
            if due_s < self._rings_s:
                self._set(due_s)

    def forget(self, batch: Batch) -> None:
        self._under_way.pop(batch, None)

    def close(self) -> None:
        self._under_way.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _set(self, due_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._rings_s = due_s
        self._timer = self._call_later(max(0.0, due_s - self._clock()), self._ring)

    def _ring(self) -> None:
        self._timer, self._rings_s = None, inf
        by_s = self._clock() + EARLY_S
        next_s = inf
        for batch, asked in list(self._under_way.items()):
            if asked.due_s <= by_s:
                self._settle_due(batch, asked, by_s)
            if asked.due_s < next_s:
                next_s = asked.due_s
        if next_s < inf:
            self._set(next_s)

    def _settle_due(self, batch: Batch, asked: Asked, now_s: float) -> None:
        for number, answer in asked.due(now_s):
            self._settle(batch, number, answer)


def _loop_call_later(delay_s: float, callback: Callable[[], None]) -> Timer:
    return asyncio.get_running_loop().call_later(int(delay_s * 1000) / 1000, callback)
