"""Parsing and formatting of timestamps."""

from __future__ import annotations

import math

import pytest

from ratelimit_rls.simulation.clock import DEFAULT_START_US, format_timestamp, parse_timestamp, timestamp_from_number

WRITTEN = {
    "2024-01-01T00:00:00Z": DEFAULT_START_US,
    "2024-01-01T00:00:00": DEFAULT_START_US,
    "2024-01-01": DEFAULT_START_US,
    "2024-01-01T01:00:00.25+01:00": DEFAULT_START_US + 250_000,
    "1704067200": DEFAULT_START_US,
    "1704067200.000001": DEFAULT_START_US + 1,
    "1704067200123": DEFAULT_START_US + 123_000,
    "1704067200123456": DEFAULT_START_US + 123_456,
    "0": 0,
}


@pytest.mark.parametrize("text", WRITTEN)
def test_timestamp_is_parsed_to_the_microsecond(text: str) -> None:
    assert parse_timestamp(text) == WRITTEN[text]


@pytest.mark.parametrize("text", ["", "now", "1969-12-31T23:59:59Z", "-1", "nan", "inf", "1e30", "12:30"])
def test_invalid_timestamp_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"timestamp|between 1970 and 9999"):
        parse_timestamp(text)


def test_timestamp_unit_depends_on_the_magnitude() -> None:
    assert (
        timestamp_from_number(1_704_067_200)
        == timestamp_from_number(1_704_067_200.0)
        == timestamp_from_number(1_704_067_200_000)
        == DEFAULT_START_US
    )
    for number in (-5, math.nan, math.inf, 10**30):
        with pytest.raises(ValueError, match=r"timestamp|between 1970 and 9999"):
            timestamp_from_number(number)


def test_formatted_timestamp_parses_to_the_same_value() -> None:
    for us in (0, DEFAULT_START_US, DEFAULT_START_US + 1, DEFAULT_START_US + 250_000):
        assert parse_timestamp(format_timestamp(us)) == us
    assert format_timestamp(DEFAULT_START_US + 250_000) == "2024-01-01T00:00:00.25Z"
