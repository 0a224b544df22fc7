"""Log output: compatible field names, one line per event, for our own logs and those of libraries."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator
from datetime import datetime

import pytest
import structlog

from ratelimit_rls.settings.validation import LOG_LEVELS
from ratelimit_rls.telemetry import logs


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    structlog.reset_defaults()
    root.handlers[:], root.level = handlers, level


def logged(level: str, log_format: str, stream: io.StringIO | None = None) -> list[str]:
    """Return the output of one event at each of our levels, then one of a library."""
    out = io.StringIO() if stream is None else stream
    logs.configure(level, log_format, out)
    log = structlog.get_logger()
    for method in (log.debug, log.info, log.warning, log.error, log.critical):
        method("serving", grpc_port=8081)
    logging.getLogger("uvicorn").warning("hello %s", "there")
    return out.getvalue().splitlines()


def test_json_has_compatible_field_names() -> None:
    first = json.loads(logged("info", "json")[0])
    assert set(first) == {"@timestamp", "@message", "level", "grpc_port"}
    assert (first["@message"], first["level"], first["grpc_port"]) == ("serving", "info", 8081)
    assert datetime.fromisoformat(first["@timestamp"]).utcoffset() is not None


def test_json_of_a_library_has_the_same_field_names() -> None:
    last = json.loads(logged("info", "JSON")[-1])
    assert (last["@message"], last["level"], last["logger"]) == ("hello there", "warning", "uvicorn")


def test_text_is_key_value_pairs() -> None:
    line = logged("info", "text")[0]
    assert re.fullmatch(r"time=\S+Z level=info msg=serving grpc_port=8081", line)


@pytest.mark.parametrize(
    ("level", "expected"),
    [("panic", 1), ("fatal", 1), ("error", 2), ("warn", 3), ("WARNING", 3), ("info", 4), ("debug", 5), ("Trace", 5)],
)
def test_every_log_level_passes_its_own_messages(level: str, expected: int) -> None:
    assert level.lower() in LOG_LEVELS
    assert sum("msg=serving" in line for line in logged(level, "text")) == expected


def test_critical_is_called_fatal() -> None:
    assert "level=fatal" in logged("fatal", "text")[0]


@pytest.mark.parametrize(("level", "appears"), [("info", False), ("debug", False), ("trace", True)])
def test_library_messages_below_warning_appear_only_at_trace(level: str, appears: bool) -> None:
    out = io.StringIO()
    logs.configure(level, "text", out)
    logging.getLogger("grpc").debug("noise")
    logging.getLogger("alembic").info("more noise")
    assert out.getvalue().count("noise") == 2 * appears


def test_a_terminal_gets_colour_unless_no_color_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" in logged("info", "text", Terminal())[0]
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in "".join(logged("info", "text", Terminal()))


@pytest.mark.parametrize(
    ("log_format", "stream"), [("json", io.StringIO()), ("text", io.StringIO()), ("text", Terminal())]
)
def test_a_traceback_shows_no_local_variables(log_format: str, stream: io.StringIO) -> None:
    logs.configure("info", log_format, stream)
    password = "-".join(["hush"] * 2)
    try:
        raise ValueError(len(password))
    except ValueError:
        structlog.get_logger().exception("failed")
        logging.getLogger("library").exception("failed")
    assert stream.getvalue().count("ValueError: 9") == 2
    assert "hush-hush" not in stream.getvalue()
