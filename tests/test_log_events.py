"""Log events are stable snake_case identifiers of one library, and causes have the key `error`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "ratelimit_rls"
MODULES = sorted(PACKAGE.rglob("*.py"))
LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}
OTHER_NAMES_OF_A_CAUSE = {"cause", "err", "exc", "exception", "failure", "problem"}
OTHER_NAMES_OF_AN_ADDRESS = {"addr", "endpoint", "host", "server", "target"}

STANDARD_LIBRARY = {
    "client/results.py",  # a library leaves the output to its application
    "telemetry/export_errors.py",  # receives what libraries log
    "telemetry/line_limits.py",
    "transport/http/connection.py",  # the logger of uvicorn
}


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def log_calls(path: Path) -> Iterator[ast.Call]:
    """Yield the calls `_log.info(…)` and `structlog.get_logger().error(…)` of a module."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="_log"), attr=level)) if level in LEVELS:
                yield node
            case ast.Call(func=ast.Attribute(value=ast.Call(func=ast.Attribute(attr="get_logger")), attr=level)):
                assert level in LEVELS
                yield node


@cache
def all_log_calls() -> list[tuple[Path, ast.Call]]:
    return [(path, call) for path in MODULES if name_of(path) not in STANDARD_LIBRARY for call in log_calls(path)]


def test_only_adapters_of_libraries_use_the_standard_library() -> None:
    assert {name_of(path) for path in MODULES if "getLogger(" in path.read_text()} == STANDARD_LIBRARY


def test_the_logger_of_a_module_is_private() -> None:
    names = {
        (name_of(path), ast.unparse(node.targets[0]))
        for path in MODULES
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign) and "structlog.get_logger(" in ast.unparse(node.value)
    }
    assert [found for found in names if found[1] != "_log"] == []
    assert len(names) > 30


def test_every_event_is_a_stable_identifier() -> None:
    assert len(all_log_calls()) > 50
    events = [(name_of(path), call.lineno, ast.unparse(call.args[0])) for path, call in all_log_calls()]
    assert [event for event in events if not re.fullmatch(r"'[a-z][a-z0-9]*(_[a-z0-9]+)*'", event[2])] == []
    assert [(name_of(path), call.lineno) for path, call in all_log_calls() if len(call.args) != 1] == []


def test_a_cause_has_the_key_error() -> None:
    keys = [(name_of(path), call.lineno, key.arg) for path, call in all_log_calls() for key in call.keywords]
    assert [key for key in keys if key[2] in OTHER_NAMES_OF_A_CAUSE] == []
    assert [key[0] for key in keys if key[2] == "reason"] == ["telemetry/abuse.py"], "a kind of abuse is no cause"


def test_an_address_has_the_key_address() -> None:
    keys = [(name_of(path), call.lineno, key.arg) for path, call in all_log_calls() for key in call.keywords]
    assert [key for key in keys if key[2] in OTHER_NAMES_OF_AN_ADDRESS] == []


def test_an_error_of_a_connection_names_its_address() -> None:
    calls = [call for path, call in all_log_calls() if ast.literal_eval(call.args[0]) == "redis_connect_failed"]
    assert calls
    assert [call.lineno for call in calls if "address" not in {key.arg for key in call.keywords}] == []
