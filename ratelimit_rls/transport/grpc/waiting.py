"""Where the answers of `action: throttle` wait for their slots: one room for a process, with one timer.

Slots are not tied to calls. A queue has so many calls and as many slots, both in order, and at each slot the first call
is answered. So when a caller leaves, wherever it stood, everybody behind it moves up by taking the last slot away, and
ten thousand callers that leave at once cost ten thousand small steps. That last slot goes back to the store.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Hashable, Iterator
from heapq import heapify, heappop, heappush
from math import ceil
from time import monotonic
from typing import Any, Protocol, TypeVar

from ratelimit_rls.transport.grpc.door import Held
from ratelimit_rls.transport.grpc.drain import until_none

MOST_RETURNED_AT_ONCE = 256
"""Slots given back to the store together: a connection that breaks may leave thousands."""

_log = logging.getLogger(__name__)

Token = TypeVar("Token", bound=Hashable)


class Timer(Protocol):
    def cancel(self) -> None: ...


CallLater = Callable[[float, Callable[[], None]], Timer]


class _Queue:
    """As many calls as slots, at least one. A queue that runs empty is not used again."""

    __slots__ = ("calls", "name", "slots")

    def __init__(self, name: Hashable) -> None:
        self.name = name
        self.calls: OrderedDict[Hashable, tuple[Held, Callable[[Any, bytes], object]]] = OrderedDict()
        self.slots: deque[float] = deque()  # when, on the room's clock; in order


class WaitingRoom:
    """Guarantees, for the calls it holds:

    * at each slot one call is answered and not before, those of one queue in the order in which they came;
    * no more than `most` are held, counting those under way that may have to be;
    * whoever leaves, or is still here at the end, has its slot given back.
    """

    def __init__(
        self,
        most: int,
        margin_s: float,
        *,
        clock: Callable[[], float] = monotonic,
        call_later: CallLater | None = None,
    ) -> None:
        """`margin_s` before its deadline a caller has its answer; `call_later` is the running loop's unless given."""
        self.margin_s = margin_s
        self._most = most
        self._clock = clock
        self._call_later = call_later or _loop_call_later
        self._reserved = 0
        self._where: dict[Hashable, _Queue] = {}
        self._queues: dict[Hashable, _Queue] = {}
        self._firsts: list[tuple[float, int, _Queue]] = []  # a heap of every first slot, and of what was one
        self._pushed = 0
        self._timer: Timer | None = None
        self._timer_s = 0.0
        self._owed: list[Callable[[], Awaitable[None]]] = []
        self._returning: asyncio.Task[None] | None = None
        self._held_total = 0
        self._left_total = 0
        self._room_full_total = 0

    @property
    def held(self) -> int:
        return len(self._where)

    def gauges(self) -> Iterator[tuple[str, int]]:
        yield "ratelimit.throttle.held", self.held
        yield "ratelimit.throttle.held_total", self._held_total
        yield "ratelimit.throttle.left_total", self._left_total
        yield "ratelimit.throttle.room_full_total", self._room_full_total

    def reserve(self, time_left_s: float | None) -> int | None:
        """How many microseconds a call that is about to be checked can be held; None: as long as the rules like.

        Anything but 0 has taken a place, to be released when the call was checked.
        """
        if len(self._where) + self._reserved >= self._most:
            self._room_full_total += 1
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
        """The calls they were reserved for are checked, and held in this same turn of the loop if they have to be."""
        self._reserved -= places

    def hold(self, token: Token, held: Held, send: Callable[[Token, bytes], object]) -> None:
        """Answer with `send(token, answer)` when the slot comes. The token tells this call from all others here."""
        now_s = self._clock()
        due_s = now_s + held.wait_s
        queue = self._queues.get(held.queue)
        if queue is not None and queue.slots[-1] > now_s + held.latest_s:
            queue = None  # order is not worth a missed deadline: it waits by itself
        self._held_total += 1
        if queue is None:
            name = held.queue if held.queue not in self._queues else object()
            queue = self._queues[name] = _Queue(name)
        # Its slot may lie before those of others: somebody who took several at once has left, or the answer of the one
        # before it took longer to arrive. Then everybody moves up by it, and the newcomer has the last.
        place = bisect_right(queue.slots, due_s)
        queue.slots.insert(place, due_s)
        queue.calls[token] = held, send
        self._where[token] = queue
        if place == 0:
            self._push(queue)
            self._arm(now_s)

    def leave(self, token: Hashable) -> bool:
        """The caller is gone: those behind it move up. False: it is not held here (any more), and nothing is done."""
        queue = self._where.pop(token, None)
        if queue is None:
            return False
        held, _ = queue.calls.pop(token)
        queue.slots.pop()
        if not queue.slots:
            del self._queues[queue.name]
        self.decline(held)
        return True

    def decline(self, held: Held) -> None:
        """The caller was gone before its answer came to be held."""
        self._left_total += 1
        self._owe(held)

    async def drain(self, timeout_s: float) -> None:
        """Wait until nobody is held, at most so long."""
        await until_none(lambda: self.held, timeout_s)

    async def close(self) -> None:
        """Give back the slots of those who are still here; nobody answers them any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for queue in self._queues.values():
            for held, _ in queue.calls.values():
                self._owe(held)
        self._where.clear()
        self._queues.clear()
        self._firsts.clear()
        if self._returning is not None:
            await self._returning

    def _push(self, queue: _Queue) -> None:
        if len(self._firsts) > 2 * len(self._queues) + MOST_RETURNED_AT_ONCE:
            # Callers that come and leave at once must not pile up until their slots would have come.
            self._firsts = [entry for entry in self._firsts if _is_first(entry)]
            heapify(self._firsts)
        self._pushed += 1
        heappush(self._firsts, (queue.slots[0], self._pushed, queue))

    def _arm(self, now_s: float) -> None:
        """Have the timer ring for the earliest slot."""
        due_s = self._firsts[0][0]
        if self._timer is not None:
            if self._timer_s <= due_s:
                return
            self._timer.cancel()
        self._timer_s = due_s
        self._timer = self._call_later(due_s - now_s, self._ring)

    def _ring(self) -> None:
        self._timer = None
        now_s = self._clock()
        while self._firsts and self._firsts[0][0] <= now_s:
            entry = heappop(self._firsts)
            if _is_first(entry):
                self._answer_first(entry[2])
        if self._firsts:
            self._arm(now_s)

    def _answer_first(self, queue: _Queue) -> None:
        queue.slots.popleft()
        token, (held, send) = queue.calls.popitem(last=False)
        del self._where[token]
        if queue.slots:
            self._push(queue)
        else:
            del self._queues[queue.name]
        try:
            send(token, held.answer)
        except Exception:
            _log.exception("a held answer could not be sent")

    def _owe(self, held: Held) -> None:
        self._owed.append(held.give_back)
        if self._returning is None or self._returning.done():
            self._returning = asyncio.get_running_loop().create_task(self._give_back())

    async def _give_back(self) -> None:
        """Until nothing is owed. What the store does not take back stays charged until it wears off."""
        while self._owed:
            now, self._owed = self._owed[:MOST_RETURNED_AT_ONCE], self._owed[MOST_RETURNED_AT_ONCE:]
            ended = await asyncio.gather(*(give_back() for give_back in now), return_exceptions=True)
            faults = [fault for fault in ended if isinstance(fault, BaseException)]
            if faults:
                _log.warning("%d slot(s) of callers that left were not given back: %s", len(faults), faults[0])


def _is_first(entry: tuple[float, int, _Queue]) -> bool:
    """Not if its queue is no more, or was given an earlier slot since, which then has an entry of its own."""
    due_s, _, queue = entry
    return bool(queue.slots) and queue.slots[0] == due_s


def _loop_call_later(delay_s: float, callback: Callable[[], None]) -> Timer:
    """uvloop counts in whole milliseconds: rounded down it would ring again and again before the slot."""
    return asyncio.get_running_loop().call_later(ceil(delay_s * 1000) / 1000, callback)
