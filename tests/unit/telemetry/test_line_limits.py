from __future__ import annotations

import logging

import pytest

from ratelimit_rls.telemetry.line_limits import MAX_LINES_PER_MINUTE, LineLimit, limit_lines


def record(number: int) -> logging.LogRecord:
    return logging.LogRecord("library", logging.ERROR, __file__, 1, "call %d failed", (number,), None)


def test_lines_above_the_limit_are_counted_in_the_next_minute() -> None:
    now_s = 0.0
    limit = LineLimit(clock=lambda: now_s)
    assert [limit.filter(record(number)) for number in range(100)].count(True) == MAX_LINES_PER_MINUTE
    now_s = 59.9
    assert not limit.filter(record(100))
    now_s = 60.0
    first, second = record(101), record(102)
    assert limit.filter(first)
    assert limit.filter(second)
    unlogged = 101 - MAX_LINES_PER_MINUTE
    assert first.getMessage() == f"call 101 failed ({unlogged} earlier lines were not logged)"
    assert second.getMessage() == "call 102 failed"


def test_a_logger_has_one_limit(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("a.library")
    for _ in range(3):
        limit_lines("a.library")
    try:
        for number in range(50):
            logger.error("call %d failed", number)
        assert len(logger.filters) == 1
        assert len(caplog.records) == MAX_LINES_PER_MINUTE
    finally:
        logger.filters.clear()
