"""The grammar of durations: what is read, what is rejected with which message, and what is written."""

from __future__ import annotations

import re

import click
import pytest

from ratelimit_rls.admin.http.schemas.requests import ApiKeyCreate
from ratelimit_rls.cli.duration_option import DurationType
from ratelimit_rls.core.duration import (
    MAX_DURATION_US,
    PATTERN,
    duration_parser,
    format_duration_us,
    parse_duration_us,
    parse_lifetime_s,
)

SECOND = 1_000_000
HOUR = 3600 * SECOND
DAY = 24 * HOUR

DURATIONS = {
    "150us": 150,
    "150µs": 150,
    "150μs": 150,
    "250ms": 250_000,
    "3s": 3 * SECOND,
    "24h": DAY,
    "30d": 30 * DAY,
    "2w": 14 * DAY,
    "1h30m": HOUR + 1800 * SECOND,
    "1d12h": 36 * HOUR,
    "1h2m3.5s": HOUR + 120 * SECOND + 3_500_000,
    "1.5d": 36 * HOUR,
    "1.s": SECOND,
    ".5s": 500_000,
    "+10ms": 10_000,
    "007s": 7 * SECOND,
    "30m1h": HOUR + 1800 * SECOND,
    "1ns": 1,
    "1001ns": 2,
    "0s": 0,
    "9223372036854775807ns": MAX_DURATION_US,
}


@pytest.mark.parametrize(("text", "us"), DURATIONS.items())
def test_durations(text: str, us: int) -> None:
    assert parse_duration_us(text) == us
    assert re.search(PATTERN, text)


def test_zero_needs_no_unit() -> None:
    assert parse_duration_us("0") == parse_duration_us("+0") == 0


NOT_DURATIONS = ["", "5", "5 s", "s", "1h5", "5S", "1y", "1,5h", "1e3s", "٣s", "++1s", "1h-5m", " 1s", "1s\n", "5D"]


@pytest.mark.parametrize("text", [*NOT_DURATIONS, "1" * 5_000 + "s", "0.1s" * 300])
def test_rejected_texts(text: str) -> None:
    with pytest.raises(ValueError, match=r"^is not a duration; use a number with a unit, e\.g\. 250ms, 1h30m or 90d$"):
        parse_duration_us(text)


def test_bounds() -> None:
    with pytest.raises(ValueError, match=r"^is negative; a duration must be ≥ 0$"):
        parse_duration_us("-3s")
    for text in ("9223372036854775808us", "300000000h", "15251w"):
        with pytest.raises(ValueError, match=r"^is too long; a duration must be ≤ about 292 years$"):
            parse_duration_us(text)
    parse = duration_parser(1_000, 30 * DAY)
    assert parse("30d") == 30 * DAY
    for text in ("999us", "0", "31d"):
        with pytest.raises(ValueError, match=r"^is not between 1ms and 720h$"):
            parse(text)
    with pytest.raises(ValueError, match=r"^must be greater than 0$"):
        duration_parser(1, MAX_DURATION_US)("0s")


def test_lifetimes_of_up_to_99999_weeks() -> None:
    assert parse_lifetime_s("90d") == 90 * 86_400
    assert parse_lifetime_s("1h30m") == 5_400
    assert parse_lifetime_s("99999w") == 99_999 * 604_800
    for text, why in {"100000w": "is too long; a duration must be ≤ about 1916 years", "999ms": "is too short"}.items():
        with pytest.raises(ValueError, match=f"^{why}"):
            parse_lifetime_s(text)


def test_bodies_and_options_have_the_grammar() -> None:
    assert ApiKeyCreate.model_validate({"user_id": "a", "expires_in": "1h30m"}).expires_in == 5_400
    assert DurationType().convert("1w2d", None, None) == 9 * DAY
    with pytest.raises(click.BadParameter, match="'2' is not a duration"):
        DurationType().convert("2", None, None)


@pytest.mark.parametrize(
    ("us", "text"),
    [(0, "0s"), (1, "1us"), (1_500_000, "1500ms"), (90 * SECOND, "90s"), (5400 * SECOND, "90m"), (DAY, "24h")],
)
def test_formatted_duration_parses_back(us: int, text: str) -> None:
    assert format_duration_us(us) == text
    assert parse_duration_us(text) == us
