"""Formatting of several values of one quantity."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median


def spread(values: Iterable[float], form: str) -> str:
    """Format the median, with minimum and maximum in brackets if there are several values."""
    ordered = sorted(values)
    middle = format(median(ordered), form)
    return middle if len(ordered) == 1 else f"{middle} ({ordered[0]:{form}}..{ordered[-1]:{form}})"
