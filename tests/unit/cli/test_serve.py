"""`serve`: its options are the settings."""

from __future__ import annotations

import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.cli.serve import serve, settings_from_flags
from ratelimit_rls.settings import Settings
from ratelimit_rls.settings.catalogue import VARIABLES, Variable

if TYPE_CHECKING:
    from tests.unit.cli.conftest import Run

ROOT = Path(__file__).parents[3]

SAMPLES = {
    "bool": [],
    "number": ["1"],
    "duration": ["1s"],
    "text": ["x"],
    "secret": ["x"],
    "list": ["a,b"],
    "map": ["a:b"],
}


def settings(*arguments: str) -> Settings:
    return settings_from_flags(serve.make_context("serve", list(arguments)).params)


def test_help_lists_flag_variable_and_default_of_every_setting(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    output = "".join(run("serve", "--help").out.split())
    for variable in VARIABLES:
        flag = variable.flag if variable.kind != "bool" else f"--[no-]{variable.flag[2:]}"
        default = f"; default: {variable.effective_default}" if variable.effective_default else ""
        assert flag in output
        assert "".join(f"{variable.description} [{variable.name}{default}]".split()) in output


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda variable: variable.flag)
def test_every_setting_flag_is_accepted(run: Run, variable: Variable) -> None:
    sample = SAMPLES.get(variable.kind, [variable.default])
    assert serve.make_context("serve", [variable.flag, *sample]).params[variable.field] == (sample or [True])[0]  # type: ignore[list-item]


def test_flag_overrides_its_variable(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPC_PORT", "1")
    monkeypatch.setenv("PORT", "2")
    monkeypatch.setenv("SHADOW_MODE", "true")
    found = settings("--grpc-port", "3", "--no-shadow-mode", "--drain-delay", "150ms", "--quota-mode")
    assert (found.grpc_port, found.port, found.shadow_mode, found.quota_mode) == (3, 2, False, True)
    assert found.rls_drain_delay == timedelta(milliseconds=150)


def test_unset_settings_are_not_given(run: Run) -> None:
    assert settings("--workers", "1").model_fields_set == {"rls_workers"}


def test_every_invalid_setting_is_reported(run: Run) -> None:
    ended = run("serve", "--grpc-port", "x", "--redis-type", "ring")
    assert (ended.code, ended.out) == (ExitCode.BAD, "")
    assert ended.err.splitlines() == [
        "Error: GRPC_PORT='x' is not a whole number; use digits such as 8081",
        "Error: REDIS_TYPE='ring': Unrecognized redis type ring; use SINGLE, CLUSTER or SENTINEL",
    ]


def test_unknown_flag_is_a_usage_error(run: Run) -> None:
    ended = run("serve", "--grpc-prot", "1")
    assert ended.code == ExitCode.USAGE
    assert "--grpc-port" in ended.err


def test_serve_runs_until_stopped(run: Run, rules: Path) -> None:
    socket = rules.absolute().parent / "rls.sock"
    flags = (
        "--rules",
        rules.absolute(),
        "--grpc-uds",
        socket,
        "--port",
        "0",
        "--debug-port",
        "0",
        "--drain-delay",
        "0",
    )
    command = [sys.executable, "-m", "ratelimit_rls", "serve", *map(str, flags)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            assert any("msg=serving" in line for line in process.stderr)
            ended = run("ask", "--server", f"unix:{socket}", "--domain", "edge", "--descriptor", "plan=free,user=alice")
            process.send_signal(signal.SIGTERM)
            out, _ = process.communicate(timeout=20)
        finally:
            process.kill()
    assert ended.out.startswith("OK\n  plan=free, user=alice  OK  10/minute, 4 left")
    assert (process.returncode, out) == (ExitCode.DONE, "")


@pytest.mark.slow
def test_redis_library_is_not_imported_without_redis() -> None:
    program = "import sys, ratelimit_rls.server; print('redis' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout == "False\n"
