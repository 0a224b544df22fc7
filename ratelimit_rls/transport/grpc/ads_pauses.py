"""How long to wait between two attempts to reach a management server."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

SHORTEST_S = 0.1
"""Whatever the settings say: an attempt is not free, for the server least of all."""

DOUBLED = 2.0


class Pauses:
    """Longer and longer, until something was worth the attempt.

    With `jitter` each is cut by up to a half, at random, so that replicas that lost one server do not return as one.
    """

    def __init__(
        self,
        first_s: float,
        longest_s: float,
        growth: float = DOUBLED,
        *,
        jitter: bool = True,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """A `growth` that would not let them grow is taken for doubling."""
        self._first_s = min(first_s, longest_s)
        self._longest_s = longest_s
        self._growth = growth if growth > 1 else DOUBLED
        self._jitter = jitter
        self._chance = chance
        self._next_s = self._first_s

    def next_s(self, most_s: float = math.inf) -> float:
        """How long to wait now, at most `most_s`."""
        pause_s = min(self._next_s, most_s)
        self._next_s = min(max(self._next_s, SHORTEST_S) * self._growth, self._longest_s)
        return max(SHORTEST_S, pause_s * (1 - self._chance() / 2) if self._jitter else pause_s)

    def reset(self) -> None:
        self._next_s = self._first_s
