"""Counts over time in a bounded number of buckets, which widen when more would be needed."""

from __future__ import annotations

from itertools import pairwise

MAX_BUCKETS = 240

_SECOND_US = 1_000_000
# Each divides the next, so that a bucket is never split; beyond a day they double.
_WIDTHS_US = tuple(
    width_ms * 1000
    for width_ms in (
        *(100, 500, 1000, 5000, 10_000, 30_000),
        *(60_000, 300_000, 600_000, 1_800_000),
        *(3_600_000, 7_200_000, 21_600_000, 43_200_000, 86_400_000),
    )
)
_NEXT_US = dict(pairwise(_WIDTHS_US))


class TimeHistogram:
    """Admitted and denied calls over time. Calls are added in time order."""

    def __init__(self, width_us: int | None = None) -> None:
        self.width_us = width_us or _WIDTHS_US[0]
        self._may_choose = width_us is None
        self._buckets: dict[int, list[int]] = {}  # by bucket number since 1970: admitted, denied
        self._first = self._last = 0
        self._ends_us = -1  # end of the current bucket
        self._filling: list[int] = []

    def add(self, at_us: int, denied: bool) -> None:
        if at_us >= self._ends_us:
            self._begin(at_us)
        self._filling[denied] += 1

    def _begin(self, at_us: int) -> None:
        number = at_us // self.width_us
        if not self._buckets:
            self._first = number
        while number - self._first >= MAX_BUCKETS:
            self.widen(self._wider_us())
            number = at_us // self.width_us
        self._last = number
        self._filling = self._buckets.setdefault(number, [0, 0])
        self._ends_us = (number + 1) * self.width_us

    def _wider_us(self) -> int:
        return _NEXT_US.get(self.width_us, 2 * self.width_us) if self._may_choose else 2 * self.width_us

    def widen(self, width_us: int) -> None:
        """Widen the buckets to a multiple of the present width."""
        times = width_us // self.width_us
        wider: dict[int, list[int]] = {}
        for number, (admitted, denied) in self._buckets.items():
            bucket = wider.setdefault(number // times, [0, 0])
            bucket[0] += admitted
            bucket[1] += denied
        self.width_us, self._buckets, self._ends_us = width_us, wider, -1
        self._first, self._last = self._first // times, self._last // times

    @property
    def start_us(self) -> int:
        return self._first * self.width_us

    @property
    def buckets(self) -> list[tuple[int, int]]:
        """Buckets from the first to the last, including empty ones: admitted, denied."""
        if not self._buckets:
            return []
        found = (self._buckets.get(number, (0, 0)) for number in range(self._first, self._last + 1))
        return [(admitted, denied) for admitted, denied in found]
