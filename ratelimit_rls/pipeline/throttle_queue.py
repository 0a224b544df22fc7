"""Queues of responses delayed by `action: throttle` until their slots: one object per process, with one timer.

Slots are not tied to calls. A queue has as many slots as calls, both in order, and at each slot the first call gets its
response. So when a caller disconnects, wherever it is in the queue, all calls behind it move up by removing the last
slot, and ten thousand callers that disconnect at once cost ten thousand small steps. That last slot is refunded to the
store.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Hashable, Iterator
from heapq import heapify, heappop, heappush
from time import monotonic
from typing import Any, TypeVar

import structlog

from ratelimit_rls.common.timers import CallLater, Timer, call_not_before
from ratelimit_rls.pipeline.batch import DelayedResponse
from ratelimit_rls.pipeline.drain import wait_until_zero

MAX_REFUNDS_AT_ONCE = 256
"""Maximum number of slots refunded to the store together: a broken connection may leave thousands."""

_log = structlog.get_logger()

Token = TypeVar("Token", bound=Hashable)


class _Queue:
    """A queue with as many calls as slots, at least one. A queue that becomes empty is not used again."""

    __slots__ = ("calls", "name", "slots")

    def __init__(self, name: Hashable) -> None:
        self.name = name
        self.calls: OrderedDict[Hashable, tuple[DelayedResponse, Callable[[Any, bytes], object]]] = OrderedDict()
        self.slots: deque[float] = deque()  # times, on the clock of the ThrottleQueue; sorted


class ThrottleQueue:
    """The delayed responses of a process.

    Guarantees:

    * at each slot one response is sent and not before, those of one queue in the order in which they were added;
    * at most `max_delayed` calls are delayed, including calls in flight that may have to be;
    * the slot of a caller that disconnects, or is still waiting at the end, is refunded.
    """

    def __init__(
        self,
        max_delayed: int,
        margin_s: float,
        *,
        clock: Callable[[], float] = monotonic,
        call_later: CallLater | None = None,
    ) -> None:
        """A caller gets its response `margin_s` before its deadline; `call_later` defaults to the running loop's."""
        self.margin_s = margin_s
        self._max_delayed = max_delayed
        self._clock = clock
        self._call_later = call_later or call_not_before
        self._reserved = 0
        self._queue_of: dict[Hashable, _Queue] = {}
        self._queues: dict[Hashable, _Queue] = {}
        self._firsts: list[tuple[float, int, _Queue]] = []  # heap of every queue's first slot, and of stale entries
        self._pushed = 0
        self._timer: Timer | None = None
        self._timer_s = 0.0
        self._pending_refunds: list[Callable[[], Awaitable[None]]] = []
        self._refund_task: asyncio.Task[None] | None = None
        self._delayed_total = 0
        self._cancelled_total = 0
        self._queue_full_total = 0

    @property
    def delayed(self) -> int:
        return len(self._queue_of)

    def gauges(self) -> Iterator[tuple[str, int]]:
        yield "ratelimit.throttle.queue_length", self.delayed
        yield "ratelimit.throttle.delayed", self._delayed_total
        yield "ratelimit.throttle.cancelled", self._cancelled_total
        yield "ratelimit.throttle.queue_full", self._queue_full_total

    def reserve(self, time_left_s: float | None) -> int | None:
        """Return how many microseconds a call can be delayed that is about to be checked; None: as rules allow.

        Any result but 0 has reserved a place, to be released when the call was checked.
        """
        if len(self._queue_of) + self._reserved >= self._max_delayed:
            self._queue_full_total += 1
            return 0
        if time_left_s is None:
            self._reserved += 1
            return None
        wait_us = int((time_left_s - self.margin_s) * 1e6)
        if wait_us <= 0:
            return 0
        self._reserved += 1
        return wait_us

    def release(self, places: int) -> None:
        """Release places: their calls were checked, and are added in this event loop iteration if necessary."""
        self._reserved -= places

    def hold(self, token: Token, delayed: DelayedResponse, send: Callable[[Token, bytes], object]) -> None:
        """Call `send(token, response)` when the slot comes. The token identifies the call."""
        now_s = self._clock()
        due_s = now_s + delayed.wait_s
        queue = self._queues.get(delayed.queue)
        if queue is not None and queue.slots[-1] > now_s + delayed.latest_s:
            queue = None  # order is not worth a missed deadline: use a queue of its own
        self._delayed_total += 1
        if queue is None:
            name = delayed.queue if delayed.queue not in self._queues else object()
            queue = self._queues[name] = _Queue(name)
        # Its slot may be before those of others: a caller that took several at once has disconnected, or the result of
        # the previous call took longer to arrive. Then all calls move up by one, and the new call gets the last slot.
        position = bisect_right(queue.slots, due_s)
        queue.slots.insert(position, due_s)
        queue.calls[token] = delayed, send
        self._queue_of[token] = queue
        if position == 0:
            self._push(queue)
            self._schedule(now_s)

    def leave(self, token: Hashable) -> bool:
        """Remove a disconnected caller, so that those behind it move up. Return False if it is not here."""
        queue = self._queue_of.pop(token, None)
        if queue is None:
            return False
        delayed, _ = queue.calls.pop(token)
        queue.slots.pop()
        if not queue.slots:
            del self._queues[queue.name]
        self.decline(delayed)
        return True

    def decline(self, delayed: DelayedResponse) -> None:
        """Refund the slot of a caller that disconnected before its response was added."""
        self._cancelled_total += 1
        self._queue_refund(delayed)

    async def drain(self, timeout_s: float) -> None:
        """Wait until no response is delayed, at most this long."""
        await wait_until_zero(lambda: self.delayed, timeout_s)

    async def close(self) -> None:
        """Refund the slots of all remaining calls; they get no response."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for queue in self._queues.values():
            for delayed, _ in queue.calls.values():
                self._queue_refund(delayed)
        self._queue_of.clear()
        self._queues.clear()
        self._firsts.clear()
        if self._refund_task is not None:
            await self._refund_task

    def _push(self, queue: _Queue) -> None:
        if len(self._firsts) > 2 * len(self._queues) + MAX_REFUNDS_AT_ONCE:
            # Callers that disconnect quickly must not accumulate until their slots would have come.
            self._firsts = [entry for entry in self._firsts if _is_current(entry)]
            heapify(self._firsts)
        self._pushed += 1
        heappush(self._firsts, (queue.slots[0], self._pushed, queue))

    def _schedule(self, now_s: float) -> None:
        """Set the timer for the earliest slot."""
        due_s = self._firsts[0][0]
        if self._timer is not None:
            if self._timer_s <= due_s:
                return
            self._timer.cancel()
        self._timer_s = due_s
        self._timer = self._call_later(due_s - now_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        now_s = self._clock()
        while self._firsts and self._firsts[0][0] <= now_s:
            entry = heappop(self._firsts)
            if _is_current(entry):
                self._respond_first(entry[2])
        if self._firsts:
            self._schedule(now_s)

    def _respond_first(self, queue: _Queue) -> None:
        queue.slots.popleft()
        token, (delayed, send) = queue.calls.popitem(last=False)
        del self._queue_of[token]
        if queue.slots:
            self._push(queue)
        else:
            del self._queues[queue.name]
        try:
            send(token, delayed.message)
        except Exception:
            _log.exception("delayed_response_failed")

    def _queue_refund(self, delayed: DelayedResponse) -> None:
        self._pending_refunds.append(delayed.give_back)
        if self._refund_task is None or self._refund_task.done():
            self._refund_task = asyncio.get_running_loop().create_task(self._send_refunds())

    async def _send_refunds(self) -> None:
        """Refund until nothing is pending. If a refund fails, the slot stays charged until it expires."""
        while self._pending_refunds:
            batch, self._pending_refunds = (
                self._pending_refunds[:MAX_REFUNDS_AT_ONCE],
                self._pending_refunds[MAX_REFUNDS_AT_ONCE:],
            )
            results = await asyncio.gather(*(give_back() for give_back in batch), return_exceptions=True)
            errors = [error for error in results if isinstance(error, BaseException)]
            if errors:
                _log.warning("throttle_refund_failed", slots=len(errors), error=str(errors[0]))


def _is_current(entry: tuple[float, int, _Queue]) -> bool:
    """Return False for stale heap entries: the queue is empty, or a newer entry covers its earlier slot."""
    due_s, _, queue = entry
    return bool(queue.slots) and queue.slots[0] == due_s
