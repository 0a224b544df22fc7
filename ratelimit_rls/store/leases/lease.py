"""Lease of one hot counter in one process: hits that are already spent in the store, and the demand for more.

Guarantee: a hit is used within its lease, and a hit of a window before that window ends by the store's clock. Times are
microseconds of the process's own clock unless stated otherwise.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence

from ratelimit_rls.core.model import Algorithm, Limit, Reading, StoreResult
from ratelimit_rls.errors import StoreError
from ratelimit_rls.store.base import PreparedPlan

MIN_BATCHES_PER_LEASE = 4
"""A counter that occurs in fewer batches within a lease is not leased: a lease would hardly save a call."""

WINDOW_MARGIN_US = 1_000
"""Hits of a window are no longer used this long before it ends, plus a thousandth of the lease. The end is an early
estimate, as it is counted from when the store was asked; the margin covers clocks that drift apart."""

PAUSES_PER_LEASE = 4
"""While a continuously refilling counter is used up as it fills, hits are requested once per lease divided by this.
In between, calls are denied here: the store would deny them, too, except for the few hits that refill meanwhile."""

PAUSES_PER_WINDOW = 100
"""The pause is at most a window divided by this for sliding windows, where hits used later become free later."""

MAX_REQUESTED_HITS = 2**32 - 1

_NEVER_US = 2**63


class Grant:
    """Hits that the store granted together."""

    __slots__ = ("charged_at_us", "expires_us", "hits")

    def __init__(self, hits: int, charged_at_us: int, expires_us: int) -> None:
        self.hits = hits
        self.charged_at_us = charged_at_us  # on the store's clock
        self.expires_us = expires_us


TakenHits = Sequence[tuple[Grant, int]]
"""Pairs of a grant and the number of hits taken from it."""


class Demand:
    """Demand in the current lease period, and a decaying average: each period weighs half as much as the next one."""

    __slots__ = ("_batches", "_hits", "_last_batch", "_lease_us", "_period_ends_us", "_usual_batches", "_usual_hits")

    def __init__(self, lease_us: int) -> None:
        self._lease_us = lease_us
        self._period_ends_us = 0
        self._last_batch = -1
        self._batches = self._hits = 0
        self._usual_batches = self._usual_hits = 0.0

    def add(self, hits: int, batch_number: int, now_us: int) -> None:
        """Record a call of the batch with this number."""
        if now_us >= self._period_ends_us:
            self._end_period(now_us)
        self._hits += hits
        if batch_number != self._last_batch:
            self._last_batch = batch_number
            self._batches += 1

    def _end_period(self, now_us: int) -> None:
        silent = (now_us - self._period_ends_us) // self._lease_us
        share = 0.5 ** min(1 + silent, 64)
        self._usual_batches = (self._usual_batches + self._batches) * share
        self._usual_hits = (self._usual_hits + self._hits) * share
        self._batches = self._hits = 0
        self._period_ends_us = now_us + self._lease_us

    @property
    def is_high(self) -> bool:
        return max(self._usual_batches, self._batches) >= MIN_BATCHES_PER_LEASE

    def expected(self, duration_us: int) -> int:
        """Return the hits expected in this time, as if those of the current period had taken all of the period."""
        return int(max(self._usual_hits, self._hits) * duration_us / self._lease_us)


class Lease:
    __slots__ = (
        "__weakref__",
        "_exhausted_until_us",
        "_grants",
        "_last_states",
        "_last_store_us",
        "_lease_us",
        "_limits",
        "_paused_until_us",
        "_received_us",
        "_sent_us",
        "_window_ends_us",
        "available",
        "demand",
        "expires_us",
        "pending_request",
        "plan",
    )

    def __init__(self, plan: PreparedPlan, limits: Sequence[Limit], lease_us: int) -> None:
        """`plan` is the prepared plan of the counter's descriptor alone."""
        self.plan = plan
        self.demand = Demand(lease_us)
        self.available = 0
        self.expires_us = _NEVER_US  # of the earliest available grant
        self.pending_request: asyncio.Future[StoreError | None] | None = None  # while a request for more is in flight
        self._limits = limits
        self._lease_us = lease_us
        self._grants: deque[Grant] = deque()
        self._exhausted_until_us = 0
        self._paused_until_us = 0
        # The last result, on the store's clock, and when the request was sent and received on our own.
        self._last_states: tuple[Reading, ...] = ()
        self._last_store_us = 0
        self._sent_us = self._received_us = 0
        self._window_ends_us = 0

    def should_request(self, now_us: int) -> bool:
        """Return True if it is worth requesting more than is needed immediately."""
        return self.demand.is_high and now_us >= self._exhausted_until_us

    def request_size(self, wanted: int, now_us: int) -> int:
        """Return the hits to request: those needed immediately, and those expected until the lease ends.

        Available hits are deducted from the expected ones only: other calls may use them before these do.
        """
        duration_us = self._lease_us
        if now_us < self._window_ends_us:
            duration_us = min(duration_us, self._window_ends_us - now_us)
        return min(wanted + max(0, self.demand.expected(duration_us) - self.available), MAX_REQUESTED_HITS)

    def add(self, result: StoreResult, requested: int, sent_us: int, now_us: int) -> None:
        """Add the hits that the store granted for a request of `requested` hits."""
        self._last_states, self._last_store_us = result.readings, result.now_us
        self._sent_us, self._received_us = sent_us, now_us
        window_us = min(map(_window_left_us, self._limits, result.readings))
        self._window_ends_us = sent_us + window_us - WINDOW_MARGIN_US - self._lease_us // 1000
        if result.granted < requested:
            self.note_shortage(result.readings, now_us)
        if result.granted:
            expires_us = min(sent_us + self._lease_us, self._window_ends_us)
            self._grants.append(Grant(result.granted, result.now_us, expires_us))
            self.available += result.granted
            self.expires_us = min(self.expires_us, expires_us)

    def note_shortage(self, readings: Iterable[Reading], now_us: int) -> None:
        """Record that the store had too little. A fixed window has no more until it ends; others refill continuously.

        A call with many hits may be denied while there is enough left for others.
        """
        usual = self.demand.expected(self._lease_us)
        pauses_us = []
        for limit, reading in zip(self._limits, readings, strict=True):
            left, retry_us, reset_us = reading
            if left > 0 and (not retry_us or left >= usual):
                continue
            if limit.algorithm is Algorithm.FIXED_WINDOW:
                exhausted_us, pause_us = reset_us, 0
            else:
                pause_us = self._pause_us(limit, reading)
                exhausted_us = max(retry_us, pause_us)
            self._exhausted_until_us = max(self._exhausted_until_us, now_us + exhausted_us)
            pauses_us.append(pause_us if left <= 0 else 0)
        self._paused_until_us = now_us + min(pauses_us, default=0)

    def _pause_us(self, limit: Limit, reading: Reading) -> int:
        """Return a pause short enough that a bucket does not fill up meanwhile."""
        full_us = reading.reset_us // 4 if limit.algorithm.has_burst else limit.window_us // PAUSES_PER_WINDOW
        return min(self._lease_us // PAUSES_PER_LEASE, full_us)

    def denies_for_us(self, now_us: int) -> int:
        """Return how long calls for more than the available hits are denied here; 0 if the store must decide."""
        return max(0, self._paused_until_us - now_us) if self._last_states and self.demand.is_high else 0

    def take(self, hits: int) -> TakenHits:
        """Take hits, oldest first. As many must be available, and expired grants must have been released."""
        self.available -= hits
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

    def put_back(self, taken: TakenHits) -> None:
        """Return hits that were not used."""
        for grant, hits in reversed(taken):
            if not grant.hits:
                self._grants.appendleft(grant)
            grant.hits += hits
            self.available += hits
            self.expires_us = min(self.expires_us, grant.expires_us)

    def release(self, now_us: int = _NEVER_US) -> list[PreparedPlan]:
        """Return plans that refund the hits of leases that have expired by `now_us`; by default all hits."""
        ended = [grant for grant in self._grants if grant.expires_us <= now_us]
        self._grants = deque(grant for grant in self._grants if grant.expires_us > now_us)
        self.expires_us = min((grant.expires_us for grant in self._grants), default=_NEVER_US)
        refunds = [self.plan.refund(grant.hits, grant.charged_at_us) for grant in ended]
        for grant in ended:
            self.available -= grant.hits
            grant.hits = 0
        return refunds

    def readings(self, now_us: int) -> list[Reading]:
        """Estimate the limit states: those last reported, plus the available hits, with the elapsed time subtracted."""
        ago_us = now_us - self._sent_us
        return [Reading(left + self.available, 0, max(0, reset_us - ago_us)) for left, _, reset_us in self._last_states]

    def store_time_us(self, now_us: int, taken: TakenHits = ()) -> int:
        """Estimate the store's time: not after now, and not before the hits were charged, so in the same window."""
        about_us = self._last_store_us + now_us - self._received_us
        return max(taken[-1][0].charged_at_us, about_us) if taken else about_us


def _window_left_us(limit: Limit, reading: Reading) -> int:
    """Return the time until the window ends in which hits were just counted."""
    if limit.algorithm is Algorithm.FIXED_WINDOW:
        return reading.reset_us
    if limit.algorithm is Algorithm.SLIDING_WINDOW:  # reset is reported as when it has slid out, a window later
        return reading.reset_us - limit.window_us if reading.reset_us > limit.window_us else reading.reset_us
    return _NEVER_US
