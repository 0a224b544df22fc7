from __future__ import annotations

import pytest

from bench.patterns import SETS, VALUES, PatternSet, lookups, main


@pytest.mark.parametrize("patterns", SETS, ids=lambda patterns: patterns.name)
@pytest.mark.parametrize("matching", [True, False])
def test_values_match_or_do_not(patterns: PatternSet, matching: bool) -> None:
    measured = lookups(patterns, 20, matching=matching)

    assert len(measured.entries) > VALUES / 2
    assert measured.time_ns() > 0


def test_all_kinds_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--many", "12", "--rounds", "1"]) == 0

    heading, *rows = capsys.readouterr().out.splitlines()
    assert heading.startswith("ns a lookup")
    assert all(" 12 " in row for row in rows)
    assert len(rows) == 2 * len(SETS)
