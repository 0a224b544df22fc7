"""Words for people."""

from __future__ import annotations

import pytest

from ratelimit_rls.cli.words import counted, plural, wait_words


@pytest.mark.parametrize(
    ("us", "words"),
    [
        (1, "1ms"),
        (1_001, "2ms"),
        (9_999_000, "9999ms"),
        (9_999_001, "10s"),
        (10_000_000, "10s"),
        (10_000_001, "11s"),
        (44_119_669_747, "44120s"),
        (7_199_000_001, "2h"),
    ],
)
def test_what_is_left_of_a_wait_is_rounded_up_and_never_nothing(us: int, words: str) -> None:
    assert wait_words(us) == words


def test_one_is_not_several() -> None:
    assert [counted(number, "rule") for number in (0, 1, 2)] == ["0 rules", "1 rule", "2 rules"]
    assert [plural(number, "row") for number in (0, 1, 2)] == ["rows", "row", "rows"]
