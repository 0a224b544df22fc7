"""Memory and p99 of a million distinct callers are judged, and each caller calls once."""

from __future__ import annotations

import subprocess
import sys
from itertools import islice

import pytest

from bench.distinct_callers import CallersMeasurement, Interval, distinct_calls, main
from bench.latency import Latencies

MB = 1_000_000


def measured(p99_ms: list[float], rss_mb: list[int]) -> CallersMeasurement:
    intervals = [
        Interval(Latencies.of([ms / 1e3] * 10, per_s=100), mb * MB) for ms, mb in zip(p99_ms, rss_mb, strict=True)
    ]
    return CallersMeasurement(90 * MB, 1_200.4, 40, tuple(intervals))


def test_memory_and_p99_are_judged() -> None:
    well, grown = measured([4, 2, 2, 2], [150, 240, 250, 249]), measured([2, 2, 3, 4], [150, 251, 240, 240])
    assert well.lines() == [
        "40 distinct callers: RSS 90 MB at start, 249 at the end, never more than 250 (at most 250: met),"
        " 1,200 bytes per cached request",
        "  p99 of the second half ÷ the first: 0.67 (at most 1.25: met); ms: 4.0, 2.0, 2.0, 2.0",
    ]
    assert "never more than 251 (at most 250: MISSED)" in grown.lines()[0]
    assert "1.75 (at most 1.25: MISSED)" in grown.lines()[1]
    assert (well.is_within_target, grown.is_within_target) == (True, False)


def test_no_call_is_repeated() -> None:
    calls = [*islice(distinct_calls(), 5_000)]
    assert len({*calls}) == len(calls)


@pytest.mark.parametrize("option", [["--callers", "4000"], ["--seconds", "0"], ["--intervals", "0"]])
def test_invalid_options_are_rejected(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(option)
    assert "more than 4000 callers, some time and an interval are needed" in capsys.readouterr().err


@pytest.mark.slow
def test_run_prints_intervals_and_verdicts() -> None:
    command = [
        sys.executable,
        "-m",
        "bench.distinct_callers",
        "--callers",
        "6000",
        "--seconds",
        "2",
        "--intervals",
        "2",
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    *intervals, memory, p99 = run.stdout.splitlines()
    assert len(intervals) == 2, run.stderr
    assert memory.startswith("6,000 distinct callers: RSS ")
    assert p99.startswith("  p99 of the second half ÷ the first: ")
