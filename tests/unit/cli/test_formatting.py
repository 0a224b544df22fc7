"""Text formatting of the CLI."""

from __future__ import annotations

import pytest

from ratelimit_rls.cli.formatting import format_bytes, format_count, format_wait, plural


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
def test_remaining_wait_is_rounded_up_and_never_zero(us: int, words: str) -> None:
    assert format_wait(us) == words


def test_plural_is_not_used_for_one() -> None:
    assert [format_count(number, "rule") for number in (0, 1, 2)] == ["0 rules", "1 rule", "2 rules"]
    assert [plural(number, "row") for number in (0, 1, 2)] == ["rows", "row", "rows"]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 KiB"),
        (1_572_864, "1.5 MiB"),
        (300 * 2**20, "300 MiB"),
        (2**40, "1.0 TiB"),
        (2**60, "1048576 TiB"),
    ],
)
def test_bytes_have_the_largest_fitting_unit(number: int, text: str) -> None:
    assert format_bytes(number) == text
