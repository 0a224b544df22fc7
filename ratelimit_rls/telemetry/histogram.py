"""How long things took: counts per bucket, each a fifth wider than the one before, so that any two can be added.

Adding is exact; a percentile is off by at most a tenth, however many histograms were added to get it. Percentiles
themselves cannot be added, which is why they are never all that is kept.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence

_GROWTH = 1.2

BUCKETS = 100
"""The first is for less than a microsecond, the last for 57 s and more."""

_BOUNDS_US = tuple(_GROWTH**number for number in range(BUCKETS - 1))
"""Bucket n is for what is below bound n and not below the one before."""

_VALUES_US = (0.0, *(2 * low * low * _GROWTH / (low + low * _GROWTH) for low in _BOUNDS_US))
"""What a bucket stands for: the value from which both its bounds are equally far in proportion (a tenth)."""

Histogram = Mapping[int, int]
"""How many, by the number of the bucket; those without any are left out."""


def bucket_of(us: float) -> int:
    return bisect_right(_BOUNDS_US, us)


def added(histograms: Iterable[Histogram]) -> dict[int, int]:
    total: dict[int, int] = {}
    for histogram in histograms:
        add(total, histogram)
    return total


def add(total: dict[int, int], more: Histogram) -> None:
    for bucket, count in more.items():
        total[bucket] = total.get(bucket, 0) + count


def percentiles_us(histogram: Histogram, percents: Sequence[float]) -> list[float | None]:
    """What so many per cent of all do not exceed, within a tenth; None of nothing at all. The least comes first."""
    total, passed = sum(histogram.values()), 0
    told: list[float | None] = []
    for bucket in sorted(histogram):
        passed += histogram[bucket]
        while len(told) < len(percents) and passed >= total * percents[len(told)] / 100:
            told.append(_VALUES_US[bucket])
    return told or [None] * len(percents)


def to_text(histogram: Histogram) -> str:
    """For a column: `31:120 32:44`. Equal histograms have equal texts."""
    return " ".join([f"{bucket}:{histogram[bucket]}" for bucket in sorted(histogram) if histogram[bucket]])


def readable(text: str) -> dict[int, int]:
    """Nothing of a text that is none: what somebody else wrote into one row must not hide all others."""
    try:
        return from_text(text)
    except ValueError:
        return {}


def from_text(text: str) -> dict[int, int]:
    """Raises ValueError if it is no such text."""
    histogram: dict[int, int] = {}
    for part in text.split():
        bucket, _, count = part.partition(":")
        if not 0 <= int(bucket) < BUCKETS or int(count) < 1:
            raise ValueError(f"{part!r} is no bucket of a histogram with a count")
        add(histogram, {int(bucket): int(count)})
    return histogram
