"""The row budget during floods, and with clocks that jump."""

from __future__ import annotations

import pytest

from ratelimit_rls.telemetry.row_budget import ROW_TEXT_BYTES, RowBudget


def rows(budget: RowBudget, now_s: float, text_bytes: int = 0, tried: int = 1000) -> int:
    recorded = 0
    for _ in range(tried):
        if budget.admits(now_s):
            budget.spend(text_bytes)
            recorded += 1
    return recorded


def test_a_burst_of_a_minute_and_then_the_steady_rate() -> None:
    budget = RowBudget(60)
    assert [rows(budget, at_s) for at_s in (0.0, 0.5, 1.0, 11.0, 1000.0, 1000.0)] == [60, 0, 1, 10, 60, 0]
    assert budget.left_out == 6000 - 131


def test_zero_means_unlimited() -> None:
    budget = RowBudget(0)
    assert rows(budget, 0.0, text_bytes=10_000) == 1000
    assert budget.left_out == 0


@pytest.mark.parametrize(
    ("text_bytes", "each"), [(ROW_TEXT_BYTES - 1, 1), (ROW_TEXT_BYTES, 2), (10 * ROW_TEXT_BYTES, 11)]
)
def test_long_rows_cost_several_tokens(text_bytes: int, each: int) -> None:
    budget = RowBudget(660)
    rows(budget, 0.0, text_bytes)
    recorded = sum(rows(budget, at_s, text_bytes) for at_s in range(1, 601))
    assert recorded == pytest.approx(6600 / each, abs=1)


def test_setting_the_clock_back_adds_no_tokens() -> None:
    budget = RowBudget(60)
    assert [rows(budget, at_s) for at_s in (1000.0, 10.0, 20.0, 1e9)] == [60, 0, 10, 60]
