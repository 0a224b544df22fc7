"""The helpers for fixed windows wait only at the end of one, and change every short unit."""

from __future__ import annotations

import time

import pytest

from tests.support.windows import HOUR_S, MINUTE_S, wait_for_time_left, with_yearly_limits


@pytest.mark.parametrize(
    ("now_s", "window_s", "then_s"),
    [
        (600.0, MINUTE_S, 600.0),
        (649.9, MINUTE_S, 649.9),
        (650.5, MINUTE_S, 660.0),
        (659.0, MINUTE_S, 660.0),
        (659.0, HOUR_S, 659.0),
        (3595.0, HOUR_S, 3600.0),
    ],
)
def test_wait_ends_when_a_window_has_enough_time_left(
    monkeypatch: pytest.MonkeyPatch, now_s: float, window_s: int, then_s: float
) -> None:
    clock = [now_s]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: clock.append(clock.pop() + seconds))
    wait_for_time_left(window_s, min_left_s=10)
    assert clock == [then_s]


def test_yearly_limits_replace_short_ones() -> None:
    rules = "rate_limit: {unit: minute, requests_per_unit: 5}\nrate_limit:\n  unit: hour\nlimits: [{unit: day}]\n"
    expected = "rate_limit: {unit: year, requests_per_unit: 5}\nrate_limit:\n  unit: year\nlimits: [{unit: year}]\n"
    assert with_yearly_limits(rules) == expected
