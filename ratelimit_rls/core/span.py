"""How long something lasts, as people write it and as Go reads it: 250ms, 90s, 1h30m. In whole microseconds."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

_PART = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h)")

_UNIT_NS = {
    "ns": 1,
    "us": 1_000,
    "µs": 1_000,  # micro sign
    "μs": 1_000,  # Greek mu
    "ms": 1_000_000,
    "s": 1_000_000_000,
    "m": 60_000_000_000,
    "h": 3_600_000_000_000,
}

LONGEST_SPAN_NS = 2**63 - 1
"""About 292 years: what Go's time.Duration holds."""


def parse_span(text: str) -> int:
    """Microseconds, rounded up. Raises ValueError with the second half of a sentence."""
    unsigned = text.removeprefix("+")
    if unsigned == "0":
        return 0
    if unsigned.startswith("-"):
        raise ValueError("is negative; a duration must not be")
    total_ns, at = Fraction(0), 0
    while found := _PART.match(unsigned, at):
        total_ns += Fraction(found[1]) * _UNIT_NS[found[2]]
        at = found.end()
    if at == 0 or at != len(unsigned):
        raise ValueError("is not a duration; use a number with a unit such as 150us, 3s or 24h")
    if total_ns > LONGEST_SPAN_NS:
        raise ValueError("is too long a duration; the longest is about 292 years")
    return -int(-total_ns // 1_000)


def span_within(least_us: int, most_us: int) -> Callable[[str], int]:
    """A parse_span that takes nothing shorter or longer."""

    def parse(text: str) -> int:
        us = parse_span(text)
        if not least_us <= us <= most_us:
            raise ValueError(f"is not between {format_span(least_us)} and {format_span(most_us)}")
        return us

    return parse


def format_span(us: int) -> str:
    """The shortest exact text that parses back to the same, in one unit: 90s, 250ms, 24h; 0s for nothing."""
    if us == 0:
        return "0s"
    for unit in ("h", "m", "s", "ms"):
        each = _UNIT_NS[unit] // 1_000
        if us % each == 0:
            return f"{us // each}{unit}"
    return f"{us}us"
