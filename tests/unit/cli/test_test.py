"""`test`: results, failure details at the end, and exit codes for pipelines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

from ratelimit_rls.cli.exit_codes import ExitCode

if TYPE_CHECKING:
    from tests.unit.cli.conftest import Run

DESCRIPTORS = Path(__file__).parents[3] / "descriptors"

GOOD = """\
descriptors: api.yaml
domain: edge
tests:
  - name: five at once
    steps:
      - {descriptor: {plan: free, user: alice}, expect: {ok: 5, over_limit: 1}, retry_after: 6s}
  - name: staff is exempt
    steps:
      - {descriptor: {staff: bob}, times: 100, expect: ok}
"""
BAD = GOOD.replace("retry_after: 6s", "retry_after: 7s")


@pytest.fixture
def tests(rules: Path) -> Path:
    path = Path("api.test.yaml")
    path.write_text(GOOD)
    return path


def test_passing_tests_are_listed_and_counted(run: Run, tests: Path) -> None:
    ended = run("test", tests)
    assert ended.code == ExitCode.DONE
    assert ended.out.splitlines() == [
        "ok    api.test.yaml  five at once",
        "ok    api.test.yaml  staff is exempt",
        "1 file, 2 tests: ok",
    ]
    assert ended.err == ""


def test_failure_shows_step_descriptor_and_rule(run: Run, tests: Path) -> None:
    tests.write_text(BAD)
    ended = run("test", tests)
    assert ended.code == ExitCode.BAD
    assert ended.out.splitlines() == [
        "FAIL  api.test.yaml  five at once",
        "ok    api.test.yaml  staff is exempt",
        "",
        "FAIL  api.test.yaml  five at once",
        "  api.test.yaml:6:9: at 0s (2024-01-01T00:00:00Z), 6 times",
        "    expected  5 ok and 1 over_limit, retry_after 7s",
        "    got       5 ok and 1 over_limit, retry_after 6s",
        "    domain edge · descriptor (plan=free, user=alice)",
        "      matched edge.plan_free.user  10/minute gcra, burst 5, charge admitted  api.yaml:6:9",
        "      over_limit, 0 remaining, reset in 6s",
        "",
        "1 file, 2 tests: 1 failed",
    ]


def test_coverage_lists_unmatched_rules_with_positions(run: Run, tests: Path) -> None:
    ended = run("test", ".", "--fail-under", "60")
    assert ended.code == ExitCode.BAD
    assert ended.out.splitlines()[2:] == [
        "never met: edge.path_/v1/*  5/second fixed_window, charge always, shadow_mode, name five  api.yaml:8:5",
        "never met: edge.plan  100/minute fixed_window, charge always, replaces five  api.yaml:12:5",
        "coverage 50.0 %: 2 of 4 rules",
        "1 file, 2 tests: ok",
    ]
    assert ended.err == "Error: coverage is 50.0 %, less than 60 %\n"
    assert run("test", ".", "--fail-under", "50").code == ExitCode.DONE


def test_run_option_selects_tests_and_no_match_is_an_error(run: Run, tests: Path) -> None:
    assert run("test", tests, "--run", "^staff").out.splitlines()[-1] == "1 file, 1 test: ok"
    for pattern in ("nobody", "("):
        ended = run("test", tests, "--run", pattern)
        assert ended.code == ExitCode.USAGE
        assert pattern in ended.err


def test_json_and_junit_contain_the_results(run: Run, tests: Path) -> None:
    tests.write_text(BAD)
    ended = run("test", tests, "--format", "json", "--coverage", "--junit", "out.xml")
    result = json.loads(ended.out)
    assert (result["files"], result["tests"], result["failed"]) == (1, 2, 1)
    (difference,) = result["results"][0]["differences"]
    assert difference["position"] == "api.test.yaml:6:9"
    assert difference["statuses"][0]["rule"] == "edge.plan_free.user"
    assert result["coverage"]["percent"] == 50.0
    root = ElementTree.parse("out.xml").getroot()
    assert [case.get("name") for case in root.iter("testcase")] == ["five at once", "staff is exempt"]
    assert len(list(root.iter("failure"))) == 1


def test_invalid_test_file_is_reported_like_invalid_rules(run: Run, tests: Path) -> None:
    tests.write_text(GOOD.replace("expect: ok", "expct: ok"))
    ended = run("test", tests)
    assert (ended.code, ended.out) == (ExitCode.BAD, "")
    assert "api.test.yaml:9:48: error: config error, unknown key 'expct'; did you mean 'expect'?" in ended.err


def test_directory_without_tests_is_an_error(run: Run, rules: Path) -> None:
    ended = run("test", ".")
    assert ended.code == ExitCode.BAD
    assert "there is no *.test.yaml" in ended.err


def test_unwritable_junit_path_is_reported(run: Run, tests: Path) -> None:
    ended = run("test", tests, "--junit", "nowhere/out.xml")
    assert ended.code == ExitCode.BAD
    assert "--junit nowhere/out.xml cannot be written" in ended.err


def test_example_rules_pass_their_tests_with_full_coverage(run: Run) -> None:
    ended = run("test", DESCRIPTORS, "--fail-under", "100")
    assert ended.code == ExitCode.DONE, ended.out
