"""Histogram of durations in buckets that each are a fifth wider than the previous one, so that any two can be added.

Adding is exact; a percentile is off by at most a tenth, however many histograms were added. Percentiles themselves
cannot be added, which is why they are never the only thing stored.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence

_GROWTH = 1.2

BUCKETS = 100
"""The first bucket is for less than a microsecond, the last for 57 s and more."""

_BOUNDS_US = tuple(_GROWTH**number for number in range(BUCKETS - 1))
"""Bucket n has values below bound n and not below bound n - 1."""

_VALUES_US = (0.0, *(2 * low * low * _GROWTH / (low + low * _GROWTH) for low in _BOUNDS_US))
"""The value that represents a bucket: both bounds differ from it by the same proportion (a tenth)."""

Histogram = Mapping[int, int]
"""Counts by bucket number; empty buckets are omitted."""


def bucket_of(us: float) -> int:
    return bisect_right(_BOUNDS_US, us)


def merge_histograms(histograms: Iterable[Histogram]) -> dict[int, int]:
    total: dict[int, int] = {}
    for histogram in histograms:
        add(total, histogram)
    return total


def add(total: dict[int, int], more: Histogram) -> None:
    for bucket, count in more.items():
        total[bucket] = total.get(bucket, 0) + count


def percentiles_us(histogram: Histogram, percents: Sequence[float]) -> list[float | None]:
    """Return the percentiles, within a tenth; None for an empty histogram. `percents` must be in ascending order."""
    total, passed = sum(histogram.values()), 0
    percentiles: list[float | None] = []
    for bucket in sorted(histogram):
        passed += histogram[bucket]
        while len(percentiles) < len(percents) and passed >= total * percents[len(percentiles)] / 100:
            percentiles.append(_VALUES_US[bucket])
    return percentiles or [None] * len(percents)


def to_text(histogram: Histogram) -> str:
    """Format for a database column: `31:120 32:44`. Equal histograms have equal texts."""
    return " ".join([f"{bucket}:{histogram[bucket]}" for bucket in sorted(histogram) if histogram[bucket]])


def parse_or_empty(text: str) -> dict[int, int]:
    """Parse a text, or return an empty histogram: a row with foreign content must not hide all others."""
    try:
        return from_text(text)
    except ValueError:
        return {}


def from_text(text: str) -> dict[int, int]:
    """Parse the format of `to_text`. Raises ValueError."""
    histogram: dict[int, int] = {}
    for part in text.split():
        bucket, _, count = part.partition(":")
        if not 0 <= int(bucket) < BUCKETS or int(count) < 1:
            raise ValueError(f"{part!r} is no bucket of a histogram with a count")
        add(histogram, {int(bucket): int(count)})
    return histogram
