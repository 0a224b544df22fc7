"""`simulate`: report as table, JSON and SVG."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

from ratelimit_rls.cli.exit_codes import ExitCode

if TYPE_CHECKING:
    from tests.unit.cli.conftest import Run

PROFILE = ("--rate", "2/s", "--for", "10s", "--domain", "edge", "--descriptor", "plan=free,user=%caller%")


@pytest.fixture
def log(rules: Path) -> Path:
    path = Path("access.log")
    lines = [
        {"start_time": f"2024-03-01T12:00:{second:02}.000Z", "x_user": user, "path": "/v1/a"}
        for second in range(10)
        for user in ("alice", "bob")
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + "garbage\n")
    return path


def test_replayed_log_is_reported_per_rule(run: Run, rules: Path, log: Path) -> None:
    mapped = ("--domain", "edge", "--descriptor", "plan=free,user=%x_user%", "--descriptor", "path=%path%")
    ended = run("simulate", rules, "--traffic", log, *mapped)
    assert (ended.code, ended.err) == (ExitCode.DONE, "")
    first, invalid, where, _, verdict, head, *table = ended.out.splitlines()
    assert first.startswith("20 requests, 2024-03-01T12:00:00Z to 2024-03-01T12:00:09Z; replayed in ")
    assert (invalid, where) == ("1 of 21 lines is invalid and was skipped:", "  line 21: not JSON")
    assert verdict == "api.yaml: 12 admitted, 8 denied (40.0%)"
    assert head.split()[:4] == ["rule", "calls", "hits", "denied"]
    assert [row.split() for row in table] == [
        ["edge.plan_free.user", "20", "20", "8", "2024-03-01T12:00:05Z", "2024-03-01T12:00:09Z", "2/s"],
        ["edge.path_/v1/*", "20", "20", "0", "–", "–", "2/s"],
    ]


def test_invalid_line_is_an_error_with_strict(run: Run, rules: Path, log: Path) -> None:
    ended = run("simulate", rules, "--traffic", log, "--domain", "edge", "--descriptor", "path=%path%", "--strict")
    assert (ended.code, ended.err) == (ExitCode.BAD, "access.log:21:1: error: not JSON\n")


def test_against_compares_two_rule_sets(run: Run, rules: Path) -> None:
    new = Path("new.yaml")
    new.write_text(rules.read_text().replace("burst: 5", "burst: 10"))
    ended = run("simulate", new, "--against", rules, *PROFILE)
    assert ended.code == ExitCode.DONE
    *_, verdict, head, row = ended.out.splitlines()
    assert verdict == "new.yaml compared with api.yaml: 0 requests newly denied, 5 newly admitted"
    assert head.split() == ["rule", "denied", "before", "now", "change"]
    assert row.split() == ["edge.plan_free.user", "14", "9", "-5"]


def test_json_report_is_complete_and_svg_is_written(run: Run, rules: Path) -> None:
    ended = run("simulate", rules, *PROFILE, "--bucket", "2s", "--format", "json", "--picture", "out.svg")
    result = json.loads(ended.out)
    (rule_set,) = result["rule_sets"]
    assert (result["calls"], rule_set["admitted"], rule_set["denied"]) == (20, 6, 14)
    assert rule_set["over_time"] == {
        "start": "2024-01-01T00:00:00Z",
        "bucket_s": 2.0,
        "admitted": [4, 1, 0, 1, 0],
        "denied": [0, 3, 4, 3, 4],
    }
    assert rule_set["per_rule"][0]["first_over"] == "2024-01-01T00:00:02.5Z"
    assert ElementTree.parse("out.svg").getroot().tag == "{http://www.w3.org/2000/svg}svg"


def test_delayed_calls_are_admitted_and_reported(run: Run, rules: Path) -> None:
    queue = Path("queue.yaml")
    queue.write_text(
        "domain: edge\ndescriptors:\n- {key: plan, value: free, descriptors: [{key: user, action: throttle, "
        "max_delay: 1500ms, rate_limit: {unit: second, requests_per_unit: 1}}]}\n"
    )
    ended = run("simulate", queue, *PROFILE)
    *_, verdict, head, row = ended.out.splitlines()
    assert verdict == "queue.yaml: 12 admitted, 8 denied (40.0%)"
    assert head.split()[:6] == ["rule", "calls", "hits", "denied", "delayed", "longest"]
    assert row.split()[:7] == ["edge.plan_free.user", "20", "20", "8", "11", "1.5", "s"]


WRONG = {
    "neither": (),
    "both": (*PROFILE, "--traffic", "api.yaml"),
    "rate": ("--rate", "fast", "--for", "1s"),
    "zero": ("--rate", "0/s", "--for", "1s"),
    "alone": ("--rate", "1/s"),
    "length": ("--rate", "1/s", "--for", "long"),
    "start": (*PROFILE, "--start", "soon"),
    "picture": (*PROFILE, "--picture", "out.png"),
    "picture without an ending": (*PROFILE, "--picture", "svg"),
}


@pytest.mark.parametrize("arguments", WRONG.values(), ids=WRONG)
def test_invalid_traffic_options_are_usage_errors(run: Run, rules: Path, arguments: tuple[str, ...]) -> None:
    ended = run("simulate", rules, *arguments)
    assert (ended.code, ended.out) == (ExitCode.USAGE, "")
    assert not any(Path(name).exists() for name in ("out.png", "svg"))


@pytest.mark.parametrize(
    ("descriptor", "why"),
    [
        (("--domain", "edge", "--descriptor", "user=%x_usr%,path=%path%"), "no line has %x_usr%;"),
        (("--descriptor", "user=%x_usr%"), "no line has %domain%, %x_usr%;"),
        (("--domain", "edge"), "no line has %descriptor%;"),
        (("--domain", "edge", "--time", "when"), "no line could be read; line 1: no moment in 'when'"),
    ],
)
def test_log_without_descriptors_names_the_missing_fields(
    run: Run, rules: Path, log: Path, descriptor: tuple[str, ...], why: str
) -> None:
    for form in ("text", "json"):
        ended = run("simulate", rules, "--traffic", log, *descriptor, "--format", form)
        assert ended.code == ExitCode.BAD
        assert ended.err.startswith(f"Error: nothing was replayed: {why}")
        assert ended.out.startswith("0 requests" if form == "text" else '{\n  "calls": 0')


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ("", "there is no line of traffic"),
        ("\x00\x01\nelse\n", "no line could be read; line 1: not JSON"),
        ('{"start_time": 1, "a": "x"}\n{"start_time": 1, "b": "y"}\n', "no line has all the fields of a descriptor"),
        ('{"start_time": 1, "a": "x", "b": "y", "hits": "many"}\n', "no line makes sense; line 1: hits 'many'"),
    ],
)
def test_file_without_traffic_is_reported(run: Run, rules: Path, lines: str, why: str) -> None:
    Path("some.log").write_text(lines)
    ended = run("simulate", rules, "--traffic", "some.log", "--domain", "edge", "--descriptor", "a=%a%,b=%b%")
    assert ended.code == ExitCode.BAD
    assert ended.err.startswith(f"Error: nothing was replayed: {why}")


def test_missing_field_in_generated_traffic_is_reported(run: Run, rules: Path) -> None:
    ended = run("simulate", rules, *PROFILE[:-1], "user=%callr%")
    assert (ended.code, ended.err.count("no line has %callr%")) == (ExitCode.BAD, 1)


def test_unwritable_svg_path_is_reported(run: Run, rules: Path) -> None:
    ended = run("simulate", rules, *PROFILE, "--picture", "nowhere/out.svg")
    assert ended.code == ExitCode.BAD
    assert "--picture nowhere/out.svg cannot be written" in ended.err


def test_progress_is_one_line_on_terminals_and_is_cleared(
    run: Run, rules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr(sys.modules["ratelimit_rls.cli.simulate"], "PROGRESS_INTERVAL_S", 0)
    ended = run("simulate", rules, *PROFILE)
    *updates, last = ended.err.split("\r")[1:]
    assert " a second, " in updates[-1]
    assert " left" in updates[-1]
    assert "\n" not in ended.err
    assert last.strip("\x1b[K") == ""
