"""Timestamps, and the virtual clock of simulations.

A timestamp is whole microseconds since 1970, UTC. Text is ISO 8601 (without a zone: UTC). A number is seconds since
1970, or milliseconds or microseconds if it is too large for that: 10^11 seconds is the year 5138.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

DEFAULT_START_US = 1_704_067_200_000_000
"""Default start, 2024-01-01T00:00:00Z: a Monday on which a week, a month and a year begin."""

_FIRST_MS = 10**11
_FIRST_US = 10**14
_LAST_US = 253_402_300_799_000_000  # the end of the year 9999, Python's last
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


class VirtualClock:
    """Clock for a store that stands still until it is advanced."""

    __slots__ = ("now_us",)

    def __init__(self, now_us: int = DEFAULT_START_US) -> None:
        self.now_us = now_us

    def __call__(self) -> int:
        return self.now_us

    def advance_to(self, now_us: int) -> None:
        self.now_us = now_us


def parse_timestamp(text: str) -> int:
    """Parse a timestamp. Raise ValueError with a message that completes a sentence starting with the text."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        return _parse_number(text)
    if at.tzinfo is None:
        at = at.replace(tzinfo=UTC)
    return _bounded((at - _EPOCH) // _MICROSECOND)


def timestamp_from_number(number: float) -> int:
    """Convert a JSON number to a timestamp. Raise ValueError as `parse_timestamp` does."""
    if not -1 < number < _LAST_US:  # false for NaN, too
        raise ValueError("is not between 1970 and 9999")
    scale = 1_000_000 if number < _FIRST_MS else 1_000 if number < _FIRST_US else 1
    return _bounded(number * scale if isinstance(number, int) else round(number * scale))


def _parse_number(text: str) -> int:
    try:
        return timestamp_from_number(int(text) if text.isdecimal() else float(text))
    except ValueError:
        raise ValueError("is not a timestamp; use e.g. 2024-01-31T12:00:00Z, or seconds since 1970") from None


def _bounded(us: int) -> int:
    if not 0 <= us <= _LAST_US:
        raise ValueError("is not between 1970 and 9999")
    return us


def format_timestamp(us: int) -> str:
    """Format a timestamp, as short as possible without loss, e.g. 2024-01-01T00:00:00Z or 2024-01-01T00:00:00.25Z."""
    at = _EPOCH + timedelta(microseconds=us)
    fraction = f".{at.microsecond:06}".rstrip("0") if at.microsecond else ""
    return f"{at:%Y-%m-%dT%H:%M:%S}{fraction}Z"
