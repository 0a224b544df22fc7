"""Health of writes to a database.

Reads may succeed while writes fail: full disk, standby, lock of another process.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

_log = structlog.get_logger()


class WriteHealth:
    """Outcome of the last write transaction."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.on_change: Callable[[], None] = lambda: None
        """Called when writes begin to fail and when they succeed again."""
        self._clock = clock
        self._last_s = clock()
        self.error = ""
        """Error of the last write; "" if it succeeded."""

    @property
    def writes_succeed(self) -> bool:
        return not self.error

    @property
    def idle_s(self) -> float:
        """Seconds since the last success or failure."""
        return self._clock() - self._last_s

    def succeeded(self) -> None:
        had_failed, self.error = bool(self.error), ""
        self._last_s = self._clock()
        if had_failed:
            _log.info("database_writes_recovered")
            self.on_change()

    def failed(self, error: str) -> None:
        had_failed, self.error = bool(self.error), error
        self._last_s = self._clock()
        if not had_failed:
            _log.error("database_writes_failed", error=error)
            self.on_change()
