"""Log configuration: one line per event on stderr, for our own logs and those of libraries.

    LOG_FORMAT=text   time=… level=info msg=serving grpc_port=8081   (on a terminal: aligned and coloured)
    LOG_FORMAT=json   {"@timestamp": "…", "level": "info", "@message": "serving", "grpc_port": 8081}

Field and level names are those of envoyproxy/ratelimit. Tracebacks never show local variables: they may hold secrets.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import MutableMapping
from typing import Any, TextIO

import structlog
from structlog.typing import Processor

from ratelimit_rls.telemetry.traces import current_ids

_LEVELS = {
    "panic": logging.CRITICAL,
    "fatal": logging.CRITICAL,
    "error": logging.ERROR,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "info": logging.INFO,
    "debug": logging.DEBUG,
    "trace": logging.NOTSET,
}


def configure(level: str, log_format: str, stream: TextIO | None = None) -> None:
    """Send all log output to `stream` (default: stderr) from now on. `level` is one of the settings' LOG_LEVELS."""
    out = sys.stderr if stream is None else stream
    threshold = _LEVELS[level.lower()]
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        _reference_level,
        _trace_ids,
    ]
    rendering = _json() if log_format.lower() == "json" else _terminal() if out.isatty() else _text()
    structlog.configure(
        processors=[*shared, *rendering],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.PrintLoggerFactory(out),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
        )
    )
    # info and debug are about this service; libraries' messages of these levels are shown at trace.
    libraries = max(threshold, logging.WARNING) if threshold != logging.NOTSET else logging.NOTSET
    logging.basicConfig(handlers=[handler], level=libraries, force=True)


def shows_info(level: str) -> bool:
    return _LEVELS[level.lower()] <= logging.INFO


def _json() -> list[Processor]:
    return [
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="@timestamp"),
        structlog.processors.format_exc_info,
        structlog.processors.EventRenamer("@message"),
        structlog.processors.JSONRenderer(ensure_ascii=False),
    ]


def _text() -> list[Processor]:
    return [
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
        structlog.processors.format_exc_info,
        structlog.processors.EventRenamer("msg"),
        structlog.processors.LogfmtRenderer(key_order=["time", "level", "msg"], bool_as_flag=False),
    ]


def _terminal() -> list[Processor]:
    colors = not os.environ.get("NO_COLOR")
    styles = structlog.dev.ConsoleRenderer.get_default_level_styles(colors)
    return [
        structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
        structlog.dev.ConsoleRenderer(
            colors=colors,
            level_styles={**styles, "fatal": styles["critical"]},
            exception_formatter=structlog.dev.plain_traceback,
        ),
    ]


def _trace_ids(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Add the trace ids of the current call, so that log lines can be found from its trace."""
    ids = current_ids()
    if ids is not None:
        event.setdefault("trace_id", ids.trace_id)
        event.setdefault("span_id", ids.span_id)
    return event


def _reference_level(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Rename Python's level critical to fatal, as in envoyproxy/ratelimit."""
    if event.get("level") == "critical":
        event["level"] = "fatal"
    return event
