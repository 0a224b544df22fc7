"""How many calls ended how, and how long they took: exact, and small enough to be kept for every caller of a minute."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from ratelimit_rls.telemetry.histogram import BUCKETS

OTHER = "(other)"
"""In place of the caller and the endpoint: of all that are one too many to be counted apart."""


class Word(Enum):
    """What became of a call. The value is what records call it."""

    ALLOWED = "allowed"
    THROTTLED = "throttled"
    BLOCKED = "blocked"  # by who calls, not by how often
    UNDECIDED = "undecided"  # the store did not say, nor do the rules; counted, but no decision to be recorded


_WORDS = tuple(Word)
_MISS, _HIT, _NO_LIMIT = range(3)
"""Whether a refusal that was remembered answered; where no limit applies, none could."""

UNTIMED = BUCKETS
_KIND = BUCKETS + 1
"""A call is counted under one number: its word, what the memory of refusals had to do with it, and its bucket.

An admitted call with a limit has the smallest ones, which Python does not make anew.
"""


def _code(word: Word, memory: int) -> int:
    return (_WORDS.index(word) * 3 + memory) * _KIND


ALLOWED, ALLOWED_HIT, ALLOWED_FREE = (_code(Word.ALLOWED, memory) for memory in (_MISS, _HIT, _NO_LIMIT))
THROTTLED, THROTTLED_HIT = _code(Word.THROTTLED, _MISS), _code(Word.THROTTLED, _HIT)
BLOCKED = _code(Word.BLOCKED, _NO_LIMIT)
UNDECIDED = _code(Word.UNDECIDED, _MISS)


class UsageKey(NamedTuple):
    """Whose calls of one minute are counted together."""

    domain: str
    rule: str
    user: str
    endpoint: str


ALL_OTHERS = UsageKey(OTHER, OTHER, OTHER, OTHER)


class Sums(NamedTuple):
    """Of calls that are counted together. Those that were not decided are in the total and none of the next three."""

    total: int
    allowed: int
    throttled: int
    blocked: int
    cache_hits: int
    cache_misses: int
    latencies: dict[int, int]  # a histogram (telemetry/histogram.py)


class Counts:
    """Of calls that are counted together."""

    __slots__ = ("codes",)

    def __init__(self) -> None:
        self.codes: dict[int, int] = {}

    def add(self, other: Counts) -> None:
        mine = self.codes
        for code, count in other.codes.items():
            mine[code] = mine.get(code, 0) + count

    def clear(self) -> None:
        """What it takes, too: lines that are not used for long may still hold it."""
        self.codes.clear()

    @property
    def total(self) -> int:
        return sum(self.codes.values())

    @property
    def sums(self) -> Sums:
        words, memories = [0] * len(_WORDS), [0] * 3
        latencies: dict[int, int] = {}
        for code, count in self.codes.items():
            kind, bucket = divmod(code, _KIND)
            word, memory = divmod(kind, 3)
            words[word] += count
            memories[memory] += count
            if bucket != UNTIMED:
                latencies[bucket] = latencies.get(bucket, 0) + count
        allowed, throttled, blocked, undecided = words
        total = allowed + throttled + blocked + undecided
        return Sums(total, allowed, throttled, blocked, memories[_HIT], memories[_MISS], latencies)


class Usage(NamedTuple):
    """What was counted in one minute."""

    minute_s: int
    cells: dict[UsageKey, Counts]
