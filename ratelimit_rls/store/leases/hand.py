"""What one process holds of one hot counter: hits that are spent in the store already, and how many it will want next.

Guarantee: a hit is used within its lease, and one of a window before that window ends by the store's clock. Times are
microseconds of the process's own clock, except where they are said to be the store's.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence

from ratelimit_rls.core.model import Algorithm, Answer, Limit, Reading
from ratelimit_rls.errors import StoreError
from ratelimit_rls.store.base import Prepared

FEW_TIMES = 4
"""A counter that comes in fewer batches within a lease is asked for as it comes: a lease would hardly spare a call."""

MARGIN_US = 1_000
"""So long before a window ends its hits are used no more, and a thousandth of the lease besides. The end is known on
the safe side, as it is counted from when the store was asked; this is for two clocks that do not run alike."""

PAUSE_PARTS = 4
"""While a counter that fills up evenly is used up as it fills, it is asked for more once in a lease divided by this. In
between whoever comes is refused here: each of them would be told the same, but for the few hits that come in."""

SLIDING_PAUSE_PARTS = 100
"""That pause is not above a window divided by this, where what is used later is free again later."""

MOST_ASKED = 2**32 - 1

_NEVER_US = 2**63


class Grant:
    """Hits taken together."""

    __slots__ = ("charged_at_us", "ends_us", "hits")

    def __init__(self, hits: int, charged_at_us: int, ends_us: int) -> None:
        self.hits = hits
        self.charged_at_us = charged_at_us  # on the store's clock
        self.ends_us = ends_us


Taken = Sequence[tuple[Grant, int]]
"""Of which grants, and how many hits of each."""


class Demand:
    """How much is asked for in the time of a lease: in the one that is on, and usually, where the last counts half."""

    __slots__ = ("_hits", "_lease_us", "_period_ends_us", "_times", "_turn", "_usual_hits", "_usual_times")

    def __init__(self, lease_us: int) -> None:
        self._lease_us = lease_us
        self._period_ends_us = 0
        self._turn = -1
        self._times = self._hits = 0
        self._usual_times = self._usual_hits = 0.0

    def add(self, hits: int, turn: int, now_us: int) -> None:
        """A call of the batch that has this number."""
        if now_us >= self._period_ends_us:
            self._end_period(now_us)
        self._hits += hits
        if turn != self._turn:
            self._turn = turn
            self._times += 1

    def _end_period(self, now_us: int) -> None:
        silent = (now_us - self._period_ends_us) // self._lease_us
        share = 0.5 ** min(1 + silent, 64)
        self._usual_times = (self._usual_times + self._times) * share
        self._usual_hits = (self._usual_hits + self._hits) * share
        self._times = self._hits = 0
        self._period_ends_us = now_us + self._lease_us

    @property
    def is_high(self) -> bool:
        return max(self._usual_times, self._times) >= FEW_TIMES

    def expected(self, span_us: int) -> int:
        """Hits in the next so long. What has come since the period began is counted as if it had taken all of it."""
        return int(max(self._usual_hits, self._hits) * span_us / self._lease_us)


class Hand:
    __slots__ = (
        "__weakref__",
        "_dry_until_us",
        "_grants",
        "_lease_us",
        "_limits",
        "_paused_until_us",
        "_sent_us",
        "_store_us",
        "_told",
        "_told_us",
        "_window_ends_us",
        "asking",
        "demand",
        "ends_us",
        "in_hand",
        "part",
    )

    def __init__(self, part: Prepared, limits: Sequence[Limit], lease_us: int) -> None:
        """`part` is the descriptor of the counter alone, prepared."""
        self.part = part
        self.demand = Demand(lease_us)
        self.in_hand = 0
        self.ends_us = _NEVER_US  # when the first of what is in hand does
        self.asking: asyncio.Future[StoreError | None] | None = None  # while a request for more is under way
        self._limits = limits
        self._lease_us = lease_us
        self._grants: deque[Grant] = deque()
        self._dry_until_us = 0
        self._paused_until_us = 0
        # What was told last, by the store's clock, and between which moments of our own that was.
        self._told: tuple[Reading, ...] = ()
        self._store_us = 0
        self._sent_us = self._told_us = 0
        self._window_ends_us = 0

    def wants_more(self, now_us: int) -> bool:
        """Whether it is worth asking for more than what is wanted at once."""
        return self.demand.is_high and now_us >= self._dry_until_us

    def to_ask(self, wanted: int, now_us: int) -> int:
        """What is wanted at once, and what will be until the lease ends, of which some may be in hand.

        None of that is counted on for what is wanted at once: others may use it meanwhile.
        """
        span_us = self._lease_us
        if now_us < self._window_ends_us:
            span_us = min(span_us, self._window_ends_us - now_us)
        return min(wanted + max(0, self.demand.expected(span_us) - self.in_hand), MOST_ASKED)

    def add(self, answer: Answer, asked: int, sent_us: int, now_us: int) -> None:
        """What the store granted of what it was asked for."""
        self._told, self._store_us = answer.readings, answer.now_us
        self._sent_us, self._told_us = sent_us, now_us
        window_us = min(map(_window_left_us, self._limits, answer.readings))
        self._window_ends_us = sent_us + window_us - MARGIN_US - self._lease_us // 1000
        if answer.granted < asked:
            self.was_short(answer.readings, now_us)
        if answer.granted:
            ends_us = min(sent_us + self._lease_us, self._window_ends_us)
            self._grants.append(Grant(answer.granted, answer.now_us, ends_us))
            self.in_hand += answer.granted
            self.ends_us = min(self.ends_us, ends_us)

    def was_short(self, readings: Iterable[Reading], now_us: int) -> None:
        """The store had too little. A fixed window has no more until it ends; others have a little all the time.

        A call that wants much may be refused while there is enough left for others.
        """
        usual = self.demand.expected(self._lease_us)
        pauses_us = []
        for limit, reading in zip(self._limits, readings, strict=True):
            left, retry_us, reset_us = reading
            if left > 0 and (not retry_us or left >= usual):
                continue
            if limit.algorithm is Algorithm.FIXED_WINDOW:
                dry_us, pause_us = reset_us, 0
            else:
                pause_us = self._pause_us(limit, reading)
                dry_us = max(retry_us, pause_us)
            self._dry_until_us = max(self._dry_until_us, now_us + dry_us)
            pauses_us.append(pause_us if left <= 0 else 0)
        self._paused_until_us = now_us + min(pauses_us, default=0)

    def _pause_us(self, limit: Limit, reading: Reading) -> int:
        """Short enough that a bucket does not fill up meanwhile."""
        full_us = reading.reset_us // 4 if limit.algorithm.has_burst else limit.window_us // SLIDING_PAUSE_PARTS
        return min(self._lease_us // PAUSE_PARTS, full_us)

    def refuses_for_us(self, now_us: int) -> int:
        """For how long whoever wants more than is in hand need not ask; 0: the store must say it."""
        return max(0, self._paused_until_us - now_us) if self._told and self.demand.is_high else 0

    def take(self, hits: int) -> Taken:
        """So many, the oldest first; there are as many in hand, and none of a lease that has ended."""
        self.in_hand -= hits
        taken = []
        while hits:
            grant = self._grants[0]
            some = min(hits, grant.hits)
            grant.hits -= some
            hits -= some
            taken.append((grant, some))
            if not grant.hits:
                self._grants.popleft()
        return taken

    def put_back(self, taken: Taken) -> None:
        """They were not used after all."""
        for grant, hits in reversed(taken):
            if not grant.hits:
                self._grants.appendleft(grant)
            grant.hits += hits
            self.in_hand += hits
            self.ends_us = min(self.ends_us, grant.ends_us)

    def let_go(self, now_us: int = _NEVER_US) -> list[Prepared]:
        """What gives back the hits whose lease has ended by then; without a moment, all."""
        ended = [grant for grant in self._grants if grant.ends_us <= now_us]
        self._grants = deque(grant for grant in self._grants if grant.ends_us > now_us)
        self.ends_us = min((grant.ends_us for grant in self._grants), default=_NEVER_US)
        returned = [self.part.returned(grant.hits, grant.charged_at_us) for grant in ended]
        for grant in ended:
            self.in_hand -= grant.hits
            grant.hits = 0
        return returned

    def readings(self, now_us: int) -> list[Reading]:
        """About how the limits stand: as was told last, with what is in hand, and as much later as it is now."""
        ago_us = now_us - self._sent_us
        return [Reading(left + self.in_hand, 0, max(0, reset_us - ago_us)) for left, _, reset_us in self._told]

    def moment_us(self, now_us: int, taken: Taken = ()) -> int:
        """On the store's clock, not after now and not before the hits were charged, so of the same window as these."""
        about_us = self._store_us + now_us - self._told_us
        return max(taken[-1][0].charged_at_us, about_us) if taken else about_us


def _window_left_us(limit: Limit, reading: Reading) -> int:
    """Until the window ends in which hits were just counted."""
    if limit.algorithm is Algorithm.FIXED_WINDOW:
        return reading.reset_us
    if limit.algorithm is Algorithm.SLIDING_WINDOW:  # it is told of until it has slid out, a window later
        return reading.reset_us - limit.window_us if reading.reset_us > limit.window_us else reading.reset_us
    return _NEVER_US
