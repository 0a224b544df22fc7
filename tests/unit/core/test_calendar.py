"""Calendar windows: days, weeks, months and years of a time zone."""

from __future__ import annotations

from datetime import datetime
from zoneinfo import ZoneInfo

import pytest

from ratelimit_rls.core.calendar import bounds
from ratelimit_rls.core.model import Unit

HOUR_US = 3_600_000_000


@pytest.mark.parametrize(
    ("unit", "zone", "moment", "starts", "hours"),
    [
        # clocks go forward at two, back at three: the day has 23 or 25 hours
        (Unit.DAY, "Europe/Berlin", "2026-03-29T12:00", ["2026-03-29", "2026-03-30", "2026-03-31"], [23, 24]),
        (Unit.DAY, "Europe/Berlin", "2026-10-24T23:59", ["2026-10-24", "2026-10-25", "2026-10-26"], [24, 25]),
        # midnight is skipped, or repeated
        (Unit.DAY, "America/Sao_Paulo", "2018-11-03T12:00", ["2018-11-03", "2018-11-04T01:00", "2018-11-05"], [24, 23]),
        (Unit.DAY, "America/Havana", "2024-11-03T00:30", ["2024-11-03", "2024-11-04", "2024-11-05"], [25, 24]),
        (Unit.WEEK, "UTC", "2026-11-15T23:59", ["2026-11-09", "2026-11-16", "2026-11-23"], [168, 168]),
        (Unit.MONTH, "Asia/Tokyo", "2024-02-29T23:59", ["2024-02-01", "2024-03-01", "2024-04-01"], [29 * 24, 31 * 24]),
        (Unit.MONTH, "Europe/Berlin", "2026-03-31T23:59", ["2026-03-01", "2026-04-01", "2026-05-01"], [743, 720]),
        (Unit.MONTH, "America/New_York", "2023-12-31T23:59", ["2023-12-01", "2024-01-01", "2024-02-01"], [744, 744]),
        (Unit.YEAR, "UTC", "2024-12-31T23:59", ["2024-01-01", "2025-01-01", "2026-01-01"], [366 * 24, 365 * 24]),
    ],
)
def test_calendar_window_bounds(unit: Unit, zone: str, moment: str, starts: list[str], hours: list[int]) -> None:
    def us(text: str) -> int:
        return int(datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp()) * 1_000_000

    found = bounds(unit, zone, us(moment))

    assert list(found) == [us(start) for start in starts]
    assert [(found[1] - found[0]) // HOUR_US, (found[2] - found[1]) // HOUR_US] == hours
    assert found.start_us <= us(moment) < found.next_us
