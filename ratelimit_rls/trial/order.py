"""Lines in the order of their moments, many at a time, with bounded memory.

Envoy writes a line when a request has ended, so requests that took long stand below later ones. A fixed number of lines
is held back and put in order; what is later still is taken at the moment of the line before it, and counted. Sorting
the whole was rejected: it would need the whole in memory, or on disk. A heap was, too: sorting what is nearly sorted
takes a fraction of its time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from ratelimit_rls.trial.traffic import Line

HELD_LINES = 10_000
"""Held back, at least."""

CHUNK_LINES = 2_000
"""Read before what is held is put in order again."""


class InOrder:
    def __init__(self, lines: Iterable[Line], held: int = HELD_LINES, chunk: int = CHUNK_LINES) -> None:
        self._lines = lines
        self._held = held
        self._chunk = chunk
        self._now_us = 0
        self.late = 0
        """Lines too far from their place."""

    def __iter__(self) -> Iterator[list[Line]]:
        lines = iter(self._lines)
        held: list[Line] = []
        while more := list(islice(lines, self._chunk)):
            held += more
            held.sort()
            free = len(held) - self._held
            if free > 0:
                yield self._in_time(held[:free])
                del held[:free]
        for start in range(0, len(held), self._chunk):
            yield self._in_time(held[start : start + self._chunk])

    def _in_time(self, lines: list[Line]) -> list[Line]:
        """Nothing before what went out before; the lines are in order, so what is late stands first."""
        for place, (at_us, number, values) in enumerate(lines):
            if at_us >= self._now_us:
                break
            self.late += 1
            lines[place] = (self._now_us, number, values)
        self._now_us = lines[-1][0]
        return lines
