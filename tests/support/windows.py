"""Fixed windows on the real clock: tests must not fail because one ends between two of their calls."""

from __future__ import annotations

import re
import time

MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86_400

MIN_LEFT_S = 15.0
"""Seconds that a short test may take on a busy machine."""


def with_yearly_limits(rules: str) -> str:
    """Return the text of rules with yearly limits, whose windows do not end during a test."""
    return re.sub(r"\bunit: (minute|hour|day)\b", "unit: year", rules)


def wait_for_time_left(window_s: int, min_left_s: float = MIN_LEFT_S) -> None:
    """Wait for the next window unless the current one lasts at least `min_left_s` longer.

    For examples whose unit is part of what they show. Other tests use yearly limits or a manual clock.
    """
    while (left_s := window_s - time.time() % window_s) < min_left_s:
        time.sleep(left_s)
