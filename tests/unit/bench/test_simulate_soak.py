"""The soak of `simulate`: its verdict, and a short run of the real thing."""

from __future__ import annotations

import pytest

from bench import simulate_soak
from bench.simulate_soak import MOST_BYTES, Record, soak


def test_the_verdict_wants_every_line_and_memory_within_its_bound_that_stands_still() -> None:
    assert Record(10, 1, 10, 1.0, [80, 100, 100, 100]).well
    assert not Record(10, 1, 9, 1.0, [100, 100]).well
    assert not Record(10, 1, 10, 1.0, [100, 100, 106, 100]).well
    assert not Record(10, 1, 10, 1.0, [MOST_BYTES + 1, MOST_BYTES + 1]).well
    assert Record(10, 2, 10, 1.0, [MOST_BYTES + 1, MOST_BYTES + 1]).well


@pytest.mark.slow
def test_every_line_of_a_short_log_is_replayed_and_progress_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(simulate_soak, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(simulate_soak, "TELL_EVERY_S", 0.1)
    record = soak(2_000)
    assert record.calls == 2_000
    assert 0 < record.peak_bytes < MOST_BYTES
    assert " a minute" in capsys.readouterr().out
