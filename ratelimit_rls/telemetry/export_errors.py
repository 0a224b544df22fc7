"""What OpenTelemetry's exporters complain of, in our log and rarely: a collector away for a night is one fact."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import structlog

EVERY_S = 60.0

_EXPORTING = ("opentelemetry.exporter", "opentelemetry.sdk")


class RareWarnings(logging.Handler):
    """For the logger of a library: of each of its parts, the first message in a minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(logging.WARNING)
        self._clock = clock
        self._said: dict[str, float] = {}  # by logger, of which a library has few
        self._unsaid = 0

    def emit(self, record: logging.LogRecord) -> None:
        if not record.name.startswith(_EXPORTING):
            return  # such as what is wrong with a header that a client sent, in its own words
        now = self._clock()
        before = self._said.get(record.name)
        if before is not None and now - before < EVERY_S:
            self._unsaid += 1
            return
        self._said[record.name] = now
        unsaid, self._unsaid = self._unsaid, 0
        structlog.get_logger().warning(
            "telemetry is not exported", error=record.getMessage(), source=record.name, not_repeated=unsaid
        )


def warn_rarely() -> None:
    """From now on, of everything under `opentelemetry`. Called again, it changes nothing."""
    logger = logging.getLogger("opentelemetry")
    if not any(isinstance(handler, RareWarnings) for handler in logger.handlers):
        logger.addHandler(RareWarnings())
        logger.propagate = False
