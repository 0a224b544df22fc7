"""Exact counts of calls by outcome and duration, small enough to be kept for every caller of a minute."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from ratelimit_rls.telemetry.histogram import BUCKETS

OTHER = "(other)"
"""Replaces the caller and the endpoint of calls that are not counted separately."""


class DecisionOutcome(Enum):
    """The outcome of a call. The value is stored in the database."""

    ALLOWED = "allowed"
    THROTTLED = "throttled"  # denied by a limit; not `action: throttle`
    BLOCKED = "blocked"  # because of the caller, not of a limit
    UNDECIDED = "undecided"  # by neither store nor rules; counted, but not recorded as a decision


_OUTCOMES = tuple(DecisionOutcome)
_MISS, _HIT, _NO_LIMIT = range(3)
"""States of the denial cache: it did not answer, it did, or it is not applicable, as there is no limit."""

UNTIMED = BUCKETS
_KIND = BUCKETS + 1
"""A call is counted under one number: its outcome, whether the denial cache answered, and its duration bucket.

An admitted call with a limit has the smallest numbers, which Python caches.
"""


def _code(outcome: DecisionOutcome, memory: int) -> int:
    return (_OUTCOMES.index(outcome) * 3 + memory) * _KIND


ALLOWED, ALLOWED_HIT, ALLOWED_FREE = (_code(DecisionOutcome.ALLOWED, memory) for memory in (_MISS, _HIT, _NO_LIMIT))
THROTTLED, THROTTLED_HIT = _code(DecisionOutcome.THROTTLED, _MISS), _code(DecisionOutcome.THROTTLED, _HIT)
BLOCKED = _code(DecisionOutcome.BLOCKED, _NO_LIMIT)
UNDECIDED = _code(DecisionOutcome.UNDECIDED, _MISS)


class UsageKey(NamedTuple):
    """The key by which the calls of one minute are counted."""

    domain: str
    rule: str
    user: str
    endpoint: str


ALL_OTHERS = UsageKey(OTHER, OTHER, OTHER, OTHER)


class UsageTotals(NamedTuple):
    """Totals of calls that are counted together. Undecided ones are in `total` and in none of the next three."""

    total: int
    allowed: int
    throttled: int
    blocked: int
    cache_hits: int
    cache_misses: int
    latencies: dict[int, int]  # a histogram (telemetry/histogram.py)


class UsageCounts:
    """Counts of calls that are counted together."""

    __slots__ = ("codes",)

    def __init__(self) -> None:
        self.codes: dict[int, int] = {}

    def add(self, other: UsageCounts) -> None:
        own = self.codes
        for code, count in other.codes.items():
            own[code] = own.get(code, 0) + count

    def clear(self) -> None:
        """Clear and free the memory: entries that are not used for long may still reference it."""
        self.codes.clear()

    @property
    def total(self) -> int:
        return sum(self.codes.values())

    @property
    def sums(self) -> UsageTotals:
        outcomes, memories = [0] * len(_OUTCOMES), [0] * 3
        latencies: dict[int, int] = {}
        for code, count in self.codes.items():
            kind, bucket = divmod(code, _KIND)
            outcome, memory = divmod(kind, 3)
            outcomes[outcome] += count
            memories[memory] += count
            if bucket != UNTIMED:
                latencies[bucket] = latencies.get(bucket, 0) + count
        allowed, throttled, blocked, undecided = outcomes
        total = allowed + throttled + blocked + undecided
        return UsageTotals(total, allowed, throttled, blocked, memories[_HIT], memories[_MISS], latencies)


class MinuteUsage(NamedTuple):
    """The usage of one minute."""

    minute_s: int
    cells: dict[UsageKey, UsageCounts]
