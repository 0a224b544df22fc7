"""What limits and windows are called, and that no two are called the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratelimit_rls.core.model import Algorithm, Limit, Unit
from ratelimit_rls.transport.answers.words import distinct, limit_names, printable, visible, window, window_labels

MINUTE = Limit(10, Unit.MINUTE)
BUCKET = Limit(10, Unit.MINUTE, Algorithm.TOKEN_BUCKET)
MONTH = Limit(10, Unit.MONTH)
BERLIN, UTC = Limit(10, Unit.MONTH, timezone="Europe/Berlin"), Limit(10, Unit.MONTH, timezone="UTC")


@pytest.mark.parametrize(
    ("limit", "words", "label"),
    [(Limit(1, unit), unit.name.lower(), unit.name.capitalize()) for unit in Unit if unit]
    + [(Limit(1, Unit.MINUTE, unit_multiplier=5), "5 minutes", "5-Minutes"), (BERLIN, "month", "Month")],
)
def test_a_window_is_called(limit: Limit, words: str, label: str) -> None:
    assert (window(limit), window_labels([limit])) == (words, (label,))


@pytest.mark.parametrize(
    ("limits", "labels"),
    [
        ([MINUTE, BUCKET], ("Minute-Fixed-Window", "Minute-Token-Bucket")),
        ([BERLIN, UTC], ("Month-Fixed-Window-Europe-Berlin", "Month-Fixed-Window-UTC")),
        ([MONTH, BERLIN], ("Month", "Month-Fixed-Window-Europe-Berlin")),
        ([MINUTE, Limit(1, Unit.SECOND, unit_multiplier=60)], ("Minute", "60-Seconds")),
    ],
    ids=["algorithms", "calendars", "a calendar and none", "lengths"],
)
def test_windows_of_one_name_are_told_apart(limits: list[Limit], labels: tuple[str, ...]) -> None:
    assert window_labels(limits) == labels


NAMED = Limit(10, Unit.MINUTE, name="per-user")


@pytest.mark.parametrize(
    ("limits", "names"),
    [
        ([("edge.a", NAMED), ("edge.a", MINUTE)], ("per-user", "edge.a:minute")),
        ([("edge.a", NAMED), ("edge.b", NAMED)], ("edge.a:per-user", "edge.b:per-user")),
        ([("edge.a", MINUTE), ("edge.a", BUCKET)], ("edge.a:minute:fixed_window", "edge.a:minute:token_bucket")),
        ([("edge.a", MINUTE)] * 3, ("edge.a:minute", "edge.a:minute#2", "edge.a:minute#3")),
        ([("edge.ä\n", MINUTE)], ("edge.%C3%A4%0A:minute",)),
        ([("edge.a", Limit(1, Unit.HOUR, unit_multiplier=12))], ("edge.a:12-hours",)),
    ],
    ids=["named", "one name, two rules", "one window", "one rule met often", "not printable", "multiplied"],
)
def test_limits_are_called(limits: list[tuple[str, Limit]], names: tuple[str, ...]) -> None:
    assert limit_names(limits) == names


@given(
    st.lists(st.lists(st.sampled_from(["a", "b", "a#2", "b#2", "a#3"]), min_size=1, max_size=3).map(tuple), max_size=8)
)
def test_no_two_are_called_the_same(choices: list[tuple[str, ...]]) -> None:
    chosen = distinct(choices, "#")
    assert len(set(chosen)) == len(chosen) == len(choices)


@given(st.text())
def test_what_is_printable_can_stand_in_a_header(text: str) -> None:
    for written in (printable(text), visible(text)):
        assert all(" " <= char <= "~" for char in written)
    assert " " not in visible(text)
    if text.isascii() and text.isprintable():
        assert printable(text) == text
