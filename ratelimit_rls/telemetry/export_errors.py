"""Rate limit for warnings of OpenTelemetry's exporters: a collector that is down for a night is one fact."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import structlog

WARNING_INTERVAL_S = 60.0

_LOGGER_PREFIXES = ("opentelemetry.exporter", "opentelemetry.sdk")


class ThrottledWarnings(logging.Handler):
    """A handler for a library's logger that passes on the first message per minute of each child logger."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(logging.WARNING)
        self._clock = clock
        self._logged_at_s: dict[str, float] = {}  # by logger; a library has few
        self._suppressed = 0

    def emit(self, record: logging.LogRecord) -> None:
        if not record.name.startswith(_LOGGER_PREFIXES):
            return  # for example messages that quote a header sent by a client
        now = self._clock()
        before = self._logged_at_s.get(record.name)
        if before is not None and now - before < WARNING_INTERVAL_S:
            self._suppressed += 1
            return
        self._logged_at_s[record.name] = now
        suppressed, self._suppressed = self._suppressed, 0
        structlog.get_logger().warning(
            "telemetry_export_failed", error=record.getMessage(), source=record.name, not_repeated=suppressed
        )


def throttle_export_warnings() -> None:
    """Rate limit everything under `opentelemetry` from now on. Calling it again has no effect."""
    logger = logging.getLogger("opentelemetry")
    if not any(isinstance(handler, ThrottledWarnings) for handler in logger.handlers):
        logger.addHandler(ThrottledWarnings())
        logger.propagate = False
