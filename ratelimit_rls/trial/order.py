"""Lines in the order of their moments, with bounded memory.

Envoy writes a line when a request has ended, so requests that took long stand below later ones. A fixed number of lines
is held back and put in order; what is later still is taken at the moment of the line before it, and counted. Sorting
the whole was rejected: it would need the whole in memory, or on disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heappop, heappush, heappushpop

from ratelimit_rls.trial.traffic import Line

HELD_LINES = 10_000


class InOrder:
    def __init__(self, lines: Iterable[Line], held: int = HELD_LINES) -> None:
        self._lines = lines
        self._held = held
        self.late = 0
        """Lines too far from their place."""

    def __iter__(self) -> Iterator[Line]:
        heap: list[Line] = []  # never holds a line before `now_us`
        now_us = 0
        for line in self._lines:
            if len(heap) < self._held:
                heappush(heap, line)
                continue
            first = heappushpop(heap, line)
            if first.at_us < now_us:
                self.late += 1
                first = first._replace(at_us=now_us)
            now_us = first.at_us
            yield first
        while heap:
            yield heappop(heap)
