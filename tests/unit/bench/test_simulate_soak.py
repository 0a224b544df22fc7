"""The soak of `simulate`: its verdict, and a short real run."""

from __future__ import annotations

import pytest

from bench import simulate_soak
from bench.simulate_soak import MAX_BYTES, Record, soak


def test_verdict_requires_all_lines_and_bounded_flat_memory() -> None:
    assert Record(10, 1, 10, 1.0, [80, 100, 100, 100]).well
    assert not Record(10, 1, 9, 1.0, [100, 100]).well
    assert not Record(10, 1, 10, 1.0, [100, 100, 106, 100]).well
    assert not Record(10, 1, 10, 1.0, [MAX_BYTES + 1, MAX_BYTES + 1]).well
    assert Record(10, 2, 10, 1.0, [MAX_BYTES + 1, MAX_BYTES + 1]).well


@pytest.mark.slow
def test_short_log_is_replayed_completely_with_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(simulate_soak, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(simulate_soak, "REPORT_INTERVAL_S", 0.1)
    record = soak(2_000)
    assert record.calls == 2_000
    assert 0 < record.peak_bytes < MAX_BYTES
    assert " a minute" in capsys.readouterr().out
