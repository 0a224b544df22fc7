"""Exponential back-off between attempts, for every connection and source that is tried again."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

DEFAULT_FACTOR = 2.0

HALF = 0.5
"""Usual jitter: each delay is shortened randomly by up to a half, so that replicas do not all return at once."""


class Backoff:
    """Growing delays between attempts, reset after a successful one."""

    def __init__(
        self,
        first_s: float,
        max_s: float,
        factor: float = DEFAULT_FACTOR,
        *,
        min_s: float = 0.0,
        jitter: float = 0.0,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """Set the delays.

        A `factor` of 1 or less is replaced by doubling. No delay is shorter than `min_s`, also with jitter: an attempt
        has a cost, especially for the server. `jitter` is the fraction by which a delay may be shortened.
        """
        self._first_s = min(first_s, max_s)
        self._max_s = max_s
        self._factor = factor if factor > 1 else DEFAULT_FACTOR
        self._min_s = min_s
        self._jitter = jitter
        self._chance = chance
        self.delay_s = self._first_s
        """The next delay, before jitter."""

    def next_s(self, max_s: float = math.inf) -> float:
        """Return the next delay in seconds, at most `max_s`; the delay after it is longer."""
        delay_s = min(self.delay_s, max_s)
        self.delay_s = min(max(self.delay_s, self._min_s) * self._factor, self._max_s)
        return max(self._min_s, delay_s * (1 - self._jitter * self._chance()))

    def reset(self) -> None:
        self.delay_s = self._first_s
