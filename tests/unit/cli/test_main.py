"""Behaviour common to all verbs: help, exit codes, streams, and import time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest

from ratelimit_rls import __version__, cli
from ratelimit_rls.cli.exit_codes import LEGEND, ExitCode
from ratelimit_rls.errors import StoreUnavailable

if TYPE_CHECKING:
    from tests.unit.cli.conftest import Run

VERBS = ("serve", "check", "show", "explain", "test", "simulate", "ask")
ROOT = Path(__file__).parents[3]


def python(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False
    )


def test_help_lists_every_verb_and_exit_code(run: Run) -> None:
    ended = run("--help")
    assert ended.code == ExitCode.DONE
    for verb in VERBS:
        assert f"\n  {verb} " in ended.out
    for code in ExitCode:
        assert f"{code.value} " in LEGEND


@pytest.mark.parametrize("verb", VERBS)
def test_verb_help_ends_with_two_examples(run: Run, verb: str) -> None:
    ended = run(verb, "--help")
    assert ended.code == ExitCode.DONE
    examples = ended.out.split("Examples:")[1].splitlines()
    assert sum(line.startswith("    $ ") for line in examples) == 2
    assert sum(line.startswith("    # ") for line in examples) == 2


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "serve"])
def test_verb_help_fits_one_screen(run: Run, verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert len(run(verb, "--help").out.splitlines()) <= 40


def all_commands(group: click.Group = cli.commands, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        yield (*path, name)
        if isinstance(command, click.Group):
            yield from all_commands(command, (*path, name))


@pytest.mark.parametrize("columns", ["80", "100", "120"])
@pytest.mark.parametrize("group", [(), ("db",), ("rules",), ("users",), ("keys",), ("tokens",)], ids=" ".join)
def test_summaries_are_not_cut(run: Run, monkeypatch: pytest.MonkeyPatch, group: tuple[str, ...], columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    summaries = run(*group, "--help").out.split("Commands:")[1].split("\n\n")[0].splitlines()[1:]
    assert summaries
    for line in summaries:
        assert line.startswith("  ")
        assert not line.startswith("   ")  # the summary has one line
        assert line.endswith(".")
        assert not line.endswith("...")


@pytest.mark.parametrize("path", [path for path in all_commands() if path != ("serve",)], ids=" ".join)
def test_help_shows_every_default(path: tuple[str, ...]) -> None:
    command: click.Command = cli.commands
    for name in path:
        assert isinstance(command, click.Group)
        command = command.commands[name]
    context = click.Context(command)
    for option in command.params:
        default = option.default
        if isinstance(option, click.Option) and not option.is_flag and isinstance(default, str | int) and default:
            record = option.get_help_record(context)
            assert record is not None
            assert f"[default: {default}" in record[1], option.opts


def test_version(run: Run) -> None:
    assert run("--version").out == f"ratelimit-rls {__version__} (pure Python)\n"


@pytest.mark.parametrize(
    "arguments",
    [("serv",), ("check",), ("check", "no-such-file.yaml"), ("show", "--format", "xml", "."), ("ask", "--hits", "-1")],
)
def test_usage_errors_go_to_stderr(run: Run, arguments: tuple[str, ...]) -> None:
    ended = run(*arguments)
    assert ended.code == ExitCode.USAGE
    assert ended.out == ""
    assert "Error: " in ended.err


@pytest.mark.parametrize(
    ("fault", "code"), [(KeyboardInterrupt(), ExitCode.INTERRUPTED), (StoreUnavailable("no"), ExitCode.UNREACHABLE)]
)
def test_exceptions_become_exit_codes(
    run: Run, monkeypatch: pytest.MonkeyPatch, fault: BaseException, code: int
) -> None:
    @click.command()
    def failing() -> None:
        raise fault

    monkeypatch.setitem(cli.commands.commands, "failing", failing)
    assert run("failing").code == code


@pytest.mark.slow
def test_python_m_runs_the_same_command(rules: Path) -> None:
    done = python("-m", "ratelimit_rls", "check", rules.absolute())
    assert (done.returncode, done.stdout, done.stderr) == (0, "1 file, 4 rules: ok\n", "")


@pytest.mark.slow
def test_help_and_check_import_no_heavy_modules(rules: Path) -> None:
    program = (
        "import sys; from ratelimit_rls.cli import main; main(['--help']); main(['check', sys.argv[1]]);"
        "heavy = {'grpc', 'redis', 'lupa', 'pydantic', 'google.protobuf', 'starlette', 'uvicorn'};"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    assert python("-c", program, rules.absolute()).stderr == "[]\n"


@pytest.mark.slow
def test_closed_stdout_prints_no_traceback(rules: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "ratelimit_rls", "show", str(rules.absolute())],
            cwd=ROOT,
            stdout=writing,
            stderr=subprocess.PIPE,
            timeout=30,
            check=False,
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (ExitCode.BAD, b"")


def test_interrupted_command_exits_with_130() -> None:
    program = (
        "import os, signal, sys; from ratelimit_rls import cli; import click\n"
        "@click.command()\n"
        "def wait(): os.kill(os.getpid(), signal.SIGINT); signal.pause()\n"
        "cli.commands.add_command(wait); sys.exit(cli.main(['wait']))"
    )
    done = python("-c", program)
    assert done.returncode == ExitCode.INTERRUPTED == 128 + signal.SIGINT
    assert "Traceback" not in done.stderr
