"""All hands of a process: how many there may be, and when what is left in them is given back to the store.

Leases that end go back with the next calls that ask the store anyhow, or by a timer, together.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from math import ceil
from typing import Protocol
from weakref import WeakValueDictionary

from ratelimit_rls.core.model import Answer
from ratelimit_rls.errors import StoreError
from ratelimit_rls.store.base import Prepared, Store
from ratelimit_rls.store.leases.hand import Hand

MOST_HANDS = 10_000
"""Counters whose demand is known, or of which something is in hand, at about a kilobyte each. Hot ones are few; this is
for rules that call every user hot. Whoever was asked for longest ago is forgotten first."""

FLUSH_US = 20_000
"""So long after its end, at most, a lease that nobody asks for any more is given back."""

MOST_RETURNED_WITH_CALLS = 16
"""Leases that are given back on the way of calls, which wait for it."""

_log = logging.getLogger(__name__)


class Timer(Protocol):
    def cancel(self) -> None: ...


CallLater = Callable[[float, Callable[[], None]], Timer]


class Hands:
    def __init__(
        self, store: Store, now_us: Callable[[], int], call_later: CallLater | None = None, most: int = MOST_HANDS
    ) -> None:
        """`call_later` is the running loop's unless given."""
        self._store = store
        self._now_us = now_us
        self._call_later = call_later or _loop_call_later
        self._most = most
        self._by_name: WeakValueDictionary[Hashable, Hand] = WeakValueDictionary()
        self._used: OrderedDict[Hand, None] = OrderedDict()  # the last one last
        self._holding: dict[Hand, None] = {}  # those that may have something in hand
        self._owed: deque[Prepared] = deque()
        self._returning: asyncio.Task[None] | None = None
        self._timer: Timer | None = None
        self._timer_us = 0
        self._returned_total = 0

    def gauges(self) -> Iterator[tuple[str, int]]:
        yield "ratelimit.leases.counters", len(self._used)
        yield "ratelimit.leases.hits_in_hand", sum(hand.in_hand for hand in self._holding)
        yield "ratelimit.leases.returned_total", self._returned_total

    def named(self, name: Hashable, make: Callable[[], Hand]) -> Hand:
        """The one hand of that name, for as long as a plan or a lease keeps it."""
        hand = self._by_name.get(name)
        if hand is None:
            hand = self._by_name[name] = make()
        return hand

    def use(self, hand: Hand, now_us: int) -> None:
        """Call this before looking at what is in it: then there is nothing whose lease has ended."""
        if now_us >= hand.ends_us:
            self.owe(hand.let_go(now_us))
        if hand in self._used:
            self._used.move_to_end(hand)
            return
        self._used[hand] = None
        if len(self._used) > self._most:
            forgotten, _ = self._used.popitem(last=False)
            self.owe(forgotten.let_go())

    def hold(self, hand: Hand) -> None:
        """It has been given something."""
        if hand.in_hand:
            self._holding[hand] = None
            self._ring_at(hand.ends_us + FLUSH_US)

    def owe(self, returned: Iterable[Prepared]) -> None:
        before = len(self._owed)
        self._owed.extend(returned)
        if len(self._owed) > before:
            self._ring_at(self._now_us() + FLUSH_US)

    def owed_now(self) -> list[Prepared]:
        """To be given back with calls; what comes of it must be told (`returned`)."""
        return [self._owed.popleft() for _ in range(min(len(self._owed), MOST_RETURNED_WITH_CALLS))]

    def returned(self, told: Sequence[Answer | StoreError]) -> None:
        """What was not taken back stays spent until it wears off; it may have been, so it is not sent again."""
        self._returned_total += len(told)
        lost = [answer for answer in told if isinstance(answer, StoreError)]
        if lost:
            _log.warning("%d lease(s) may not have been given back: %s", len(lost), lost[0])

    def _ring_at(self, at_us: int) -> None:
        if self._timer is not None:
            if self._timer_us <= at_us:
                return
            self._timer.cancel()
        self._timer_us = at_us
        self._timer = self._call_later(max(0, at_us - self._now_us()) / 1e6, self._ring)

    def _ring(self) -> None:
        self._timer = None
        now_us = self._now_us()
        for hand in list(self._holding):
            if now_us >= hand.ends_us:
                self._owed.extend(hand.let_go(now_us))
            if not hand.in_hand:
                del self._holding[hand]
        if self._owed:
            if self._returning is None or self._returning.done():
                self._returning = asyncio.get_running_loop().create_task(self._give_back())
            else:
                self._ring_at(now_us + FLUSH_US)
        if self._holding:
            self._ring_at(min(hand.ends_us for hand in self._holding) + FLUSH_US)

    async def _give_back(self) -> None:
        owed, self._owed = list(self._owed), deque()
        if owed:
            self.returned(await self._store.spend(owed))

    async def close(self) -> None:
        """Give back all there is, that which is still on its way to us included."""
        if under_way := [hand.asking for hand in self._by_name.values() if hand.asking is not None]:
            await asyncio.wait(under_way)
        if self._returning is not None:
            await self._returning
        for hand in self._holding:
            self._owed.extend(hand.let_go())
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        await self._give_back()


def _loop_call_later(delay_s: float, callback: Callable[[], None]) -> Timer:
    """uvloop counts in whole milliseconds: rounded down it would ring before the time."""
    return asyncio.get_running_loop().call_later(ceil(delay_s * 1000) / 1000, callback)
