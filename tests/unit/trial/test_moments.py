"""Moments and durations, written the ways logs and people write them."""

from __future__ import annotations

import math

import pytest

from ratelimit_rls.core.span import format_span, parse_span
from ratelimit_rls.trial.moments import START_US, format_moment, moment_of, parse_moment

WRITTEN = {
    "2024-01-01T00:00:00Z": START_US,
    "2024-01-01T00:00:00": START_US,
    "2024-01-01": START_US,
    "2024-01-01T01:00:00.25+01:00": START_US + 250_000,
    "1704067200": START_US,
    "1704067200.000001": START_US + 1,
    "1704067200123": START_US + 123_000,
    "1704067200123456": START_US + 123_456,
    "0": 0,
}


@pytest.mark.parametrize("text", WRITTEN)
def test_a_moment_is_read_to_the_microsecond(text: str) -> None:
    assert parse_moment(text) == WRITTEN[text]


@pytest.mark.parametrize("text", ["", "now", "1969-12-31T23:59:59Z", "-1", "nan", "inf", "1e30", "12:30"])
def test_what_is_no_moment_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="moment"):
        parse_moment(text)


def test_a_number_is_seconds_milliseconds_or_microseconds_by_its_size() -> None:
    assert moment_of(1_704_067_200) == moment_of(1_704_067_200.0) == moment_of(1_704_067_200_000) == START_US
    for number in (-5, math.nan, math.inf, 10**30):
        with pytest.raises(ValueError, match="moment"):
            moment_of(number)


def test_what_is_formatted_reads_back_the_same() -> None:
    for us in (0, START_US, START_US + 1, START_US + 250_000):
        assert parse_moment(format_moment(us)) == us
    for us in (0, 1, 90_000_000, 1_500_000, 86_400_000_000):
        assert parse_span(format_span(us)) == us
    assert format_moment(START_US + 250_000) == "2024-01-01T00:00:00.25Z"
    assert (format_span(0), format_span(90_000_000)) == ("0s", "90s")
