"""The one grammar of durations, for settings, rules, the admin API and commands: 250ms, 90s, 1h30m, 30d.

It is Go's syntax with days (24 hours) and weeks. Values are whole microseconds.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

_PART = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h|d|w)")

PATTERN = r"^\+?(([0-9]+\.?[0-9]*|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h|d|w))+$"
"""The grammar as a regular expression, for schemas. It does not have `0`, the only duration without a unit."""

_UNIT_NS = {
    "ns": 1,
    "us": 1_000,
    "µs": 1_000,  # micro sign
    "μs": 1_000,  # Greek mu
    "ms": 1_000_000,
    "s": 1_000_000_000,
    "m": 60_000_000_000,
    "h": 3_600_000_000_000,
    "d": 86_400_000_000_000,
    "w": 604_800_000_000_000,
}

_YEAR_US = 31_556_952_000_000  # mean Gregorian year

MAX_DURATION_US = -(-(2**63 - 1) // 1_000)
"""About 292 years: the maximum of Go's time.Duration, rounded up as every duration is."""

MAX_LIFETIME_US = 99_999 * 604_800_000_000
"""About 1,916 years: the maximum of `parse_lifetime_s`."""

MAX_CHARACTERS = 1_000
"""Longer texts are rejected unread: Python converts at most 4,300 digits to a number."""


def parse_duration_us(text: str, max_us: int = MAX_DURATION_US) -> int:
    """Return microseconds, rounded up. Raises ValueError with the second half of a sentence."""
    unsigned = text.removeprefix("+")
    if unsigned == "0":
        return 0
    if unsigned.startswith("-"):
        raise ValueError("is negative; a duration must be ≥ 0")
    total_ns, at = Fraction(0), 0
    while len(text) <= MAX_CHARACTERS and (found := _PART.match(unsigned, at)):
        total_ns += Fraction(found[1]) * _UNIT_NS[found[2]]
        at = found.end()
    if at == 0 or at != len(unsigned):
        raise ValueError("is not a duration; use a number with a unit, e.g. 250ms, 1h30m or 90d")
    us = -int(-total_ns // 1_000)
    if us > max_us:
        raise ValueError(f"is too long; a duration must be ≤ about {max_us // _YEAR_US} years")
    return us


def duration_parser(min_us: int, max_us: int) -> Callable[[str], int]:
    """Return a parser that rejects durations outside of the bounds."""

    def parse(text: str) -> int:
        us = parse_duration_us(text)
        if us == 0 and min_us == 1:
            raise ValueError("must be greater than 0")
        if not min_us <= us <= max_us:
            raise ValueError(f"is not between {format_duration_us(min_us)} and {format_duration_us(max_us)}")
        return us

    return parse


def parse_lifetime_s(text: str) -> float:
    """Return the seconds for which a key, token, override or block is valid. Raises ValueError like the others."""
    us = parse_duration_us(text, MAX_LIFETIME_US)
    if us < 1_000_000:
        raise ValueError("is too short; use at least 1s")
    return us / 1e6


def format_duration_us(us: int) -> str:
    """Return the shortest exact text that parses back to the same duration, in one unit: 90s, 250ms, 24h, 0s."""
    if us == 0:
        return "0s"
    for unit in ("h", "m", "s", "ms"):
        each = _UNIT_NS[unit] // 1_000
        if us % each == 0:
            return f"{us // each}{unit}"
    return f"{us}us"
