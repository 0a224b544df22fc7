"""Windows by the calendar of a place: its days, weeks, months and years, however long they are.

A day there lasts 23 or 25 hours when clocks are put forward or back, and a month as long as it lasts. Lua cannot know
that, so it is told where the windows around now begin and picks by its own clock.
"""

from __future__ import annotations

from datetime import date, datetime, time, timedelta
from functools import lru_cache
from typing import NamedTuple
from zoneinfo import ZoneInfo

from ratelimit_rls.core.model import Unit

UNITS = (Unit.DAY, Unit.WEEK, Unit.MONTH, Unit.YEAR)
"""Those that have a calendar: hours and less are the same everywhere."""


class Bounds(NamedTuple):
    """Where the window around a moment begins, where the next does, and where that one ends."""

    start_us: int
    next_us: int
    after_us: int


@lru_cache(1024)
def zone(name: str) -> ZoneInfo:
    """Raises ZoneInfoNotFoundError or ValueError if there is no such time zone."""
    return ZoneInfo(name)


def bounds(unit: Unit, timezone: str, now_us: int) -> Bounds:
    place = zone(timezone)
    today = datetime.fromtimestamp(now_us // 1_000_000, place).date()
    first = _first_day(unit, today)
    second = _next_first_day(unit, first)
    return Bounds(*(_midnight_us(day, place) for day in (first, second, _next_first_day(unit, second))))


def _first_day(unit: Unit, day: date) -> date:
    if unit is Unit.WEEK:
        return day - timedelta(days=day.weekday())  # Monday, as ISO 8601 has it
    if unit is Unit.MONTH:
        return day.replace(day=1)
    if unit is Unit.YEAR:
        return day.replace(month=1, day=1)
    return day


def _next_first_day(unit: Unit, first: date) -> date:
    longest = {Unit.DAY: 1, Unit.WEEK: 7, Unit.MONTH: 31, Unit.YEAR: 366}[unit]
    return _first_day(unit, first + timedelta(days=longest))


def _midnight_us(day: date, place: ZoneInfo) -> int:
    """The first moment of the day: where clocks skip midnight, when they have; where they repeat it, the first time."""
    return int(datetime.combine(day, time(), place).timestamp()) * 1_000_000
