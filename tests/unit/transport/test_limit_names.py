"""Names of limits and windows, and their uniqueness."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratelimit_rls.api.responses.formatting import limit_names, printable, unique_names, visible, window, window_labels
from ratelimit_rls.core.model import Algorithm, Limit, Unit

MINUTE = Limit(10, Unit.MINUTE)
BUCKET = Limit(10, Unit.MINUTE, Algorithm.TOKEN_BUCKET)
MONTH = Limit(10, Unit.MONTH)
BERLIN, UTC = Limit(10, Unit.MONTH, timezone="Europe/Berlin"), Limit(10, Unit.MONTH, timezone="UTC")


@pytest.mark.parametrize(
    ("limit", "words", "label"),
    [(Limit(1, unit), unit.name.lower(), unit.name.capitalize()) for unit in Unit if unit]
    + [(Limit(1, Unit.MINUTE, unit_multiplier=5), "5 minutes", "5-Minutes"), (BERLIN, "month", "Month")],
)
def test_window_names(limit: Limit, words: str, label: str) -> None:
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
def test_equal_windows_get_distinct_labels(limits: list[Limit], labels: tuple[str, ...]) -> None:
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
def test_limit_names(limits: list[tuple[str, Limit]], names: tuple[str, ...]) -> None:
    assert limit_names(limits) == names


@given(
    st.lists(st.lists(st.sampled_from(["a", "b", "a#2", "b#2", "a#3"]), min_size=1, max_size=3).map(tuple), max_size=8)
)
def test_names_are_unique(choices: list[tuple[str, ...]]) -> None:
    chosen = unique_names(choices, "#")
    assert len(set(chosen)) == len(chosen) == len(choices)


@given(st.text())
def test_printable_text_is_valid_in_a_header(text: str) -> None:
    for written in (printable(text), visible(text)):
        assert all(" " <= char <= "~" for char in written)
    assert " " not in visible(text)
    if text.isascii() and text.isprintable():
        assert printable(text) == text
