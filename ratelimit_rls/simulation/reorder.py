"""Reordering of lines by timestamp, in chunks, with bounded memory.

Envoy writes a line when a request has ended, so slow requests appear after later ones. A fixed number of lines is
buffered and sorted. A line that is later still gets the timestamp of the line before it, and is counted. Rejected:
sorting everything, which needs everything in memory or on disk; and a heap, since sorting nearly sorted lines takes a
fraction of its time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from ratelimit_rls.simulation.traffic import Line

BUFFERED_LINES = 10_000
"""Minimum number of buffered lines."""

CHUNK_LINES = 2_000
"""Lines read before the buffer is sorted again."""


class ReorderBuffer:
    def __init__(self, lines: Iterable[Line], min_buffered: int = BUFFERED_LINES, chunk: int = CHUNK_LINES) -> None:
        self._lines = lines
        self._min_buffered = min_buffered
        self._chunk = chunk
        self._now_us = 0
        self.late = 0
        """Lines too far out of order for the buffer."""

    def __iter__(self) -> Iterator[list[Line]]:
        lines = iter(self._lines)
        buffered: list[Line] = []
        while more := list(islice(lines, self._chunk)):
            buffered += more
            buffered.sort()
            free = len(buffered) - self._min_buffered
            if free > 0:
                yield self._in_time(buffered[:free])
                del buffered[:free]
        for start in range(0, len(buffered), self._chunk):
            yield self._in_time(buffered[start : start + self._chunk])

    def _in_time(self, lines: list[Line]) -> list[Line]:
        """Raise timestamps to that of the last line yielded. The lines are sorted, so late ones come first."""
        for place, (at_us, number, values) in enumerate(lines):
            if at_us >= self._now_us:
                break
            self.late += 1
            lines[place] = (self._now_us, number, values)
        self._now_us = lines[-1][0]
        return lines
