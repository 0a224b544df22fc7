"""Splitting a time range into days, hours and minutes: each minute once, and no interval with a pending rollup."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ratelimit_rls.database.usage.queries import split_interval
from ratelimit_rls.database.usage.tables import SECONDS, Month

HOUR_S, DAY_S = 3600, 86_400
HOURS = st.sets(st.integers(0, 100).map(lambda number: float(number * HOUR_S)), max_size=8)
DAYS = st.sets(st.integers(0, 4).map(lambda number: float(number * DAY_S)), max_size=2)


@given(st.floats(0, 4 * DAY_S), st.floats(0, 4 * DAY_S), HOURS, DAYS, st.sampled_from(["minute", "hour", "day"]))
def test_every_minute_is_covered_exactly_once(
    since_s: float, until_s: float, hours: set[float], days: set[float], coarsest: str
) -> None:
    parts = split_interval(since_s, until_s, hours, days, coarsest)
    covered: list[float] = []
    for granularity, from_s, to_s in parts:
        assert from_s % SECONDS[granularity] == to_s % SECONDS[granularity] == 0
        assert SECONDS[granularity] <= SECONDS[coarsest]
        covered += [from_s + number * 60 for number in range(round((to_s - from_s) / 60))]
        if granularity == "hour":
            assert not any(from_s <= hour < to_s for hour in hours)
        if granularity == "day":
            assert not any(from_s <= at_s < to_s for at_s in (*hours, *days))
    first, after = int(since_s // 60), int(-(-until_s // 60))
    assert covered == [60.0 * minute for minute in range(first, after)] or since_s >= until_s


def test_coarsest_fitting_granularity_is_used() -> None:
    noon = 12 * HOUR_S
    assert split_interval(noon - 60, 3 * DAY_S + 90, {2.0 * DAY_S}, set()) == [
        ("minute", noon - 60, noon),
        ("hour", noon, DAY_S),
        ("day", DAY_S, 2 * DAY_S),
        ("minute", 2 * DAY_S, 2 * DAY_S + HOUR_S),
        ("hour", 2 * DAY_S + HOUR_S, 3 * DAY_S),
        ("minute", 3 * DAY_S, 3 * DAY_S + 120),
    ]


def test_month_arithmetic_crosses_years() -> None:
    assert Month.of(Month(2024, 2).ends_s - 1) == Month(2024, 2)
    assert Month(2023, 12).later() == Month(2024, 1)
    assert Month(2024, 1).later(-1) == Month(2023, 12)
    assert (Month(2024, 2).ends_s - Month(2024, 2).begins_s) / DAY_S == 29
    assert str(Month(2024, 2)) == "2024-02"
