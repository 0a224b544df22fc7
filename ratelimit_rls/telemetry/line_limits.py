"""Rate limit on log lines that a library writes because of client input."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

MAX_LINES_PER_MINUTE = 5

_WINDOW_S = 60.0


class LineLimit(logging.Filter):
    """Logging filter that passes MAX_LINES_PER_MINUTE lines. The first line after a gap says how many were dropped."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._begun_s = clock()
        self._lines_left = MAX_LINES_PER_MINUTE
        self._unlogged = 0

    def filter(self, record: logging.LogRecord) -> bool:
        now_s = self._clock()
        if now_s - self._begun_s >= _WINDOW_S:
            self._begun_s, self._lines_left = now_s, MAX_LINES_PER_MINUTE
        if not self._lines_left:
            self._unlogged += 1
            return False
        self._lines_left -= 1
        if self._unlogged:
            record.msg = f"{record.getMessage()} ({self._unlogged} earlier lines were not logged)"
            record.args = ()
            self._unlogged = 0
        return True


def limit_lines(logger_name: str) -> None:
    """Limit the lines of this logger. Repeated calls have no further effect."""
    logger = logging.getLogger(logger_name)
    if not any(isinstance(one, LineLimit) for one in logger.filters):
        logger.addFilter(LineLimit())
