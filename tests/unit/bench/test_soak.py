"""The soak fails on growing memory and failed calls, and a real run passes."""

from __future__ import annotations

import pytest

from bench.soak import Record, main, verdict

MIB = 2**20


@pytest.mark.parametrize(
    ("mib", "errors", "code"),
    [
        ([80, 120, 150, 151, 150, 152], 0, 0),
        ([80, 120, 150, 155, 160, 165], 0, 1),
        ([80, 120, 150, 151, 150, 152], 1, 1),
    ],
    ids=["warm and flat", "grows", "a call failed"],
)
def test_verdict_requires_flat_memory_and_no_errors(
    mib: list[int], errors: int, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verdict({"redis": Record([one * MIB for one in mib], errors)}) == code
    assert capsys.readouterr().out.endswith("NOT OK\n" if code else ": ok\n")


@pytest.mark.slow
def test_short_soak_passes_on_both_stores(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--minutes", "6", "--minute", "0.5", "--callers", "3000"]) == 0
    result = capsys.readouterr().out
    assert result.count("calls/s") == 12
    assert "redis: 0 errors" in result
    assert "embedded: 0 errors" in result
