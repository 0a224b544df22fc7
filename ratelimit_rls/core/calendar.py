"""Calendar windows: days, weeks, months and years of a time zone.

A day lasts 23 or 25 hours when clocks change, and months differ in length. Lua cannot compute that, so it receives the
bounds of the windows around now and selects one by its own clock.
"""

from __future__ import annotations

from datetime import date, datetime, time, timedelta
from functools import lru_cache
from typing import NamedTuple
from zoneinfo import ZoneInfo

from ratelimit_rls.core.model import Unit

UNITS = (Unit.DAY, Unit.WEEK, Unit.MONTH, Unit.YEAR)
"""Units with calendar windows. Hours and shorter units are the same in every time zone."""


class Bounds(NamedTuple):
    """Start of the window around a time, start of the next window, and its end."""

    start_us: int
    next_us: int
    after_us: int


@lru_cache(1024)
def zone(name: str) -> ZoneInfo:
    """Return a time zone. Raises ZoneInfoNotFoundError or ValueError if there is none of that name."""
    return ZoneInfo(name)


def bounds(unit: Unit, timezone: str, now_us: int) -> Bounds:
    place = zone(timezone)
    today = datetime.fromtimestamp(now_us // 1_000_000, place).date()
    first = _first_day(unit, today)
    second = _next_first_day(unit, first)
    return Bounds(*(_midnight_us(day, place) for day in (first, second, _next_first_day(unit, second))))


def _first_day(unit: Unit, day: date) -> date:
    if unit is Unit.WEEK:
        return day - timedelta(days=day.weekday())  # Monday, as in ISO 8601
    if unit is Unit.MONTH:
        return day.replace(day=1)
    if unit is Unit.YEAR:
        return day.replace(month=1, day=1)
    return day


def _next_first_day(unit: Unit, first: date) -> date:
    longest = {Unit.DAY: 1, Unit.WEEK: 7, Unit.MONTH: 31, Unit.YEAR: 366}[unit]
    return _first_day(unit, first + timedelta(days=longest))


def _midnight_us(day: date, place: ZoneInfo) -> int:
    """Return the start of the day: after the gap if clocks skip midnight, the first occurrence if they repeat it."""
    return int(datetime.combine(day, time(), place).timestamp()) * 1_000_000
