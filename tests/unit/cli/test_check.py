"""`check`: problems and a summary on stdout, and exit codes for pipelines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ratelimit_rls.cli.exit_codes import ExitCode

if TYPE_CHECKING:
    from tests.unit.cli.conftest import Run

BAD = "domain: edge\ndescriptors:\n  - key: a\n    rate_limit: {unit: minut, requests_per_unit: 1}\n  - value: b\n"
# A limit of an enclosing level is no fallback, and shadow_mode without a rate_limit does nothing.
ODD = "domain: odd\ndescriptors:\n  - key: a\n    shadow_mode: true\n"


def test_valid_rules_are_ok(run: Run, rules: Path) -> None:
    assert (run("check", rules).code, run("check", "--strict", rules).out) == (ExitCode.DONE, "1 file, 4 rules: ok\n")


def test_each_error_is_one_line_with_position_and_summary_is_last(run: Run, rules: Path) -> None:
    Path("bad.yaml").write_text(BAD)
    ended = run("check", "bad.yaml", rules, "--merge-domains")
    *problems, verdict = ended.out.splitlines()
    assert ended.code == ExitCode.BAD
    assert [line.split(": ")[0] for line in problems] == ["bad.yaml:4:24", "bad.yaml:5:5"]
    assert all(": error: " in line for line in problems)
    assert verdict == "2 files: 2 errors"
    assert ended.err == ""


def test_limit_with_action_allow_is_a_warning(run: Run, rules: Path) -> None:
    Path("odd.yaml").write_text(
        "domain: odd\ndescriptors: [{key: a, action: allow, rate_limit: {unit: day, requests_per_unit: 1}}]"
    )
    ended = run("check", "odd.yaml", "--strict")
    assert (ended.code, ended.out.count("warning[no-effect]: 'rate_limit'")) == (ExitCode.WARNINGS, 1)


def test_unused_keys_are_warnings(run: Run, rules: Path) -> None:
    with rules.open("a") as file:
        file.write("---\ndomain: m2\ndescriptors: nonsense\n")
    line = len(rules.read_text().splitlines()) - 2
    ended = run("check", rules)
    assert (ended.code, ended.out.splitlines()[-1]) == (ExitCode.DONE, "1 file, 4 rules: 1 warning")
    assert ended.out.startswith(f"api.yaml:{line}:1: warning[unread]: nothing is read from here on")
    assert run("check", "--strict", rules).code == ExitCode.WARNINGS


def test_quoted_text_cannot_break_the_line(run: Run, rules: Path) -> None:
    Path("bad.yaml").write_text(
        'domain: edge\ndescriptors:\n  - {key: "a\\nb"}\n  - {key: "a\\nb"}\n'
        '  - {key: c, deny: {body: x, content_type: "a\\r\\nb"}}\n  - {key: d, answer: "\\e[31m"}\n'
    )
    *problems, _ = run("check", "bad.yaml").out.splitlines()
    assert [line.split(":")[1] for line in problems] == ["4", "5", "6"]
    for line, quoted in zip(problems, (r"'edge.a\nb'", r"'a\r\nb'", r"\x1b[31m"), strict=True):
        assert quoted in line


def test_warnings_exit_with_3_only_with_strict(run: Run, rules: Path) -> None:
    Path("odd.yaml").write_text(ODD)
    ended = run("check", ".")
    assert ended.code == ExitCode.DONE
    assert ended.out.splitlines()[-1] == "2 files, 4 rules: 1 warning"
    assert ": warning[" in ended.out
    assert run("check", "--strict", ".").code == ExitCode.WARNINGS


def test_json_format_contains_the_same_problems(run: Run, rules: Path) -> None:
    Path("bad.yaml").write_text(BAD)
    ended = run("check", "bad.yaml", "--format", "json")
    result = json.loads(ended.out)
    assert ended.code == ExitCode.BAD
    assert (result["files"], result["rules"], result["errors"], result["warnings"]) == (1, None, 2, 0)
    first = result["problems"][0]
    assert (first["file"], first["line"], first["column"], first["severity"]) == ("bad.yaml", 4, 24, "error")
    assert "minut" in first["message"]


def test_domain_in_two_files_needs_merge_domains(run: Run, rules: Path) -> None:
    Path("more.yaml").write_text(
        "domain: edge\ndescriptors: [{key: z, rate_limit: {unit: day, requests_per_unit: 1}}]\n"
    )
    assert run("check", ".").code == ExitCode.BAD
    assert run("check", ".", "--merge-domains").out == "2 files, 5 rules: ok\n"


def test_directory_without_rules_is_reported(run: Run, tmp_path: Path) -> None:
    ended = run("check", tmp_path)
    assert ended.code == ExitCode.BAD
    assert ended.err == f"Error: no rules in {tmp_path}: there is no *.yaml or *.yml file\n"


@pytest.mark.slow
@pytest.mark.parametrize(("environ", "is_coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_colour_is_used_only_on_terminals_without_no_color(
    run: Run, rules: Path, environ: dict[str, str], is_coloured: bool
) -> None:
    Path("bad.yaml").write_text(BAD)
    assert "\x1b" not in run("check", "bad.yaml").out
    terminal_end, child_end = os.openpty()
    with open(terminal_end, "rb", closefd=True) as terminal:
        others = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
        command = [sys.executable, "-m", "ratelimit_rls", "check", "bad.yaml"]
        path = {"PYTHONPATH": str(Path(__file__).parents[3])}
        done = subprocess.run(command, stdout=child_end, env={**others, **path, **environ}, timeout=30, check=False)
        os.close(child_end)
        output = terminal.read1()
    assert done.returncode == ExitCode.BAD
    assert b"2 errors" in output
    assert (b"\x1b[31merror" in output) is is_coloured
