"""Test files are read strictly: every error is reported with its position and a remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratelimit_rls.core.model import Code, Descriptor, Entry, WarningState
from ratelimit_rls.errors import RulesError
from ratelimit_rls.simulation.case import NEVER_US, Expected, Suite
from ratelimit_rls.simulation.case_step import MAX_TIMES
from ratelimit_rls.simulation.clock import DEFAULT_START_US
from ratelimit_rls.simulation.suite import find_files, load_suites, read_suite

RULES = "domain: edge\ndescriptors: [{key: user, rate_limit: {unit: minute, requests_per_unit: 2}}]\n"
HEAD = "descriptors: rules.yaml\ndomain: edge\ntests:\n  - name: one\n    steps:\n"
S_US = 1_000_000


def read(directory: Path, text: str) -> Suite:
    (directory / "rules.yaml").write_text(RULES)
    file = directory / "a.test.yaml"
    file.write_text(text)
    return read_suite(file)


def problems(directory: Path, text: str) -> list[str]:
    with pytest.raises(RulesError) as raised:
        read(directory, text)
    return [f"{one.line}:{one.column} {one.message}" for one in raised.value.problems]


def test_every_step_key_is_read(tmp_path: Path) -> None:
    text = (
        "descriptors: [rules.yaml]\ndomain: edge\nstart: 2024-02-28T23:59:50Z\ntests:\n  - name: one\n    steps:\n"
        "      - {at: 1m30s, descriptor: {user: a, path: /x}, times: 3, every: 1s, hits: 2, refund: true,\n"
        "         expect: {ok: 2, over_limit: 1}, remaining: 4, retry_after: 1.5s, rule: edge.user, delay: 10ms}\n"
        "      - {descriptors: [{user: a}, {user: b}], hits: [1, 0], expect: over_limit,\n"
        "         statuses: [{expect: ok, rule: none}, {expect: over_limit, retry_after: never}]}\n"
        "      - {at: '2024-02-29T00:00:00Z', descriptor: {user: a}, expect: ok, state: warning, violations: 0}\n"
    )

    (case,) = read(tmp_path, text).cases
    first, second, third = case.steps

    assert first.at_us == case.start_us + 90 * S_US
    assert first.descriptors == (Descriptor((Entry("user", "a"), Entry("path", "/x")), hits=2, is_refund=True),)
    assert (first.times, first.every_us, first.passes) == (3, S_US, 2)
    assert first.statuses == (Expected(None, 4, 1_500_000, "edge.user"),)
    assert first.delay_us == 10_000
    assert second.at_us == first.at_us
    assert [descriptor.hits for descriptor in second.descriptors] == [1, 0]
    assert (second.passes, second.delay_us) == (0, None)
    assert second.statuses == (Expected(Code.OK, rule=""), Expected(Code.OVER_LIMIT, retry_us=NEVER_US))
    assert third.at_us == case.start_us + 10 * S_US
    assert third.statuses == (Expected(state=WarningState.WARNING, violations=0),)
    assert str(third.position).endswith("a.test.yaml:11:9")


def test_case_start_defaults_to_2024_01_01(tmp_path: Path) -> None:
    step = "      - {descriptor: {user: a}, expect: ok}\n"
    own = f"  - name: two\n    start: 2024-02-28\n    domain: other\n    steps:\n{step}"

    one, two = read(tmp_path, HEAD + step + own).cases

    assert (one.start_us, one.domain) == (DEFAULT_START_US, "edge")
    assert two.start_us == DEFAULT_START_US + 58 * 86_400 * S_US
    assert two.domain == "other"


def test_descriptor_may_repeat_a_key(tmp_path: Path) -> None:
    (case,) = read(tmp_path, HEAD + "      - {descriptor: {user: a, user: b}, expect: ok}\n").cases
    assert case.steps[0].descriptors[0].entries == (("user", "a"), ("user", "b"))


STEPS = {
    "{descriptor: {user: a}}": "6:9 'expect' is missing",
    "{descriptor: {user: a}, expect: okay}": "6:41 expect: okay is not one of ok, over_limit",
    "{descriptor: {user: a}, expect: ok, remainig: 1}": "6:45 config error, unknown key 'remainig'; did you mean",
    "{descriptor: {user: a}, expect: ok, expect: ok}": "6:45 'expect' is written twice",
    "{expect: ok}": "6:9 a step has either 'descriptor",
    "{descriptor: {user: a}, descriptors: [{user: a}], expect: ok}": "6:9 a step has either 'descriptor",
    "{descriptors: [], expect: ok}": "6:23 'descriptors' is empty",
    "{descriptor: alice, expect: ok}": "6:22 alice is not a descriptor",
    "{descriptor: {user: [a]}, expect: ok}": "6:29 a list is not the value of an entry",
    "{at: soon, descriptor: {user: a}, expect: ok}": "6:14 at: soon is not a duration",
    "{at: '2020-01-01T00:00:00Z', descriptor: {user: a}, expect: ok}": "6:14 at: 2020-01-01T00:00:00Z is before",
    "{descriptor: {user: a}, times: 0, expect: ok}": "6:40 times: 0 is not a whole number from 1 on",
    f"{{descriptor: {{user: a}}, times: {MAX_TIMES + 1}, expect: ok}}": "6:9 100,001 times; at most 100,000",
    "{descriptor: {user: a}, times: 3, expect: {ok: 1, over_limit: 1}}": "6:51 expect: 1 ok and 1 over_limit are",
    "{descriptor: {user: a}, expect: {ok: 0}}": "6:41 expect: there are no calls",
    "{descriptors: [{user: a}, {user: b}], hits: [1], expect: ok}": "6:53 hits: 1",
    "{descriptor: {user: a}, hits: 4294967296, expect: ok}": "6:39 hits: at most 4294967295",
    "{descriptors: [{user: a}, {user: b}], expect: ok, rule: x}": "6:9 'rule' for which descriptor?",
    "{descriptor: {user: a}, expect: ok, remaining: 1, statuses: [{}]}": "6:9 'remaining' beside 'statuses'",
    "{descriptors: [{user: a}, {user: b}], expect: ok, statuses: [{}]}": "6:69 statuses: 1 for 2 descriptors",
    "{descriptor: {user: a}, refund: 1, expect: ok}": "6:41 refund: 1 is not true or false",
    "{descriptor: {user: a}, expect: ok, rule: {}}": "6:51 rule: a mapping is not text",
    "{descriptor: {user: a}, expect: ok, state: fine}": "6:52 state: fine is not one of normal, warning, throttled",
    "{descriptor: {user: a}, expect: ok, violations: -1}": "6:57 violations: -1 is not a whole number from 0 on",
    "{descriptor: {user: a}, expect: ok, delay: 10}": "6:52 delay: 10 is not a duration",
    "{descriptors: [{user: a}, {user: b}], expect: ok, state: normal}": "6:9 'state' for which descriptor?",
    "{descriptors: [{user: a}], expect: ok, statuses: [{delay: 1s}]}": "6:60 config error, unknown key 'delay'",
    "{descriptor: {user: a}, request: {path: /}, expect: ok}": "6:9 a step has either 'descriptor",
    "{request: {path: /}, expect: ok}": "6:19 the rules of domain 'edge' have no 'ext_authz'",
    "seven": "6:9 seven is not a mapping",
}


@pytest.mark.parametrize("step", STEPS)
def test_step_error_has_its_position(tmp_path: Path, step: str) -> None:
    assert problems(tmp_path, f"{HEAD}      - {step}\n")[0].startswith(STEPS[step])


FILES = {
    "": "1:1 the file is empty",
    "[]": "1:1 a list is not a mapping",
    "tests: [{name: a, domain: d, steps: [{descriptor: {a: b}, expect: ok}]}]": "1:1 'descriptors' is missing",
    "descriptors: rules.yaml": "1:1 'tests' is missing",
    "descriptors: rules.yaml\ntests: []": "2:8 'tests' is empty",
    "descriptors: nowhere.yaml\ntests: []": "1:14 descriptors: there is no file",
    "descriptors: [{}]\ntests: []": "1:15 descriptors: a mapping is not a file",
    "descriptors: rules.yaml\nstart: later\ntests: []": "2:8 start: later is not a timestamp",
    "descriptors: rules.yaml\ntests:\n  - {name: a, steps: []}": "3:5 'domain' is missing",
    "descriptors: rules.yaml\ndomain: d\ntests:\n  - {name: a, steps: []}": "4:22 'steps' is empty",
    "descriptors: rules.yaml\ndomain: d\ntests: {}": "3:8 tests: a mapping is not a list",
}


@pytest.mark.parametrize("text", FILES)
def test_suite_error_has_its_position(tmp_path: Path, text: str) -> None:
    assert problems(tmp_path, text)[0].startswith(FILES[text])


def test_all_errors_of_all_suites_are_reported_at_once(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("domain: edge\ndescriptors: [{kee: user}]\n")
    (tmp_path / "a.test.yaml").write_text(HEAD.replace("rules", "bad") + "      - {descriptor: {u: a}, expect: ok}\n")
    (tmp_path / "b.test.yaml").write_text("descriptors: bad.yaml\nsteps: 1\ntests: 2\n")

    with pytest.raises(RulesError) as raised:
        load_suites(find_files([tmp_path]))

    files = {Path(problem.file).name for problem in raised.value.problems}
    assert files == {"bad.yaml", "b.test.yaml"}
    assert len(raised.value.problems) >= 3


def test_find_files_is_recursive_without_duplicates(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("b.test.yaml", "a.test.yml", "rules.yaml", "deep/c.test.yaml"):
        (tmp_path / name).touch()

    found = find_files([tmp_path / "b.test.yaml", tmp_path])

    assert [file.name for file in found] == ["b.test.yaml", "a.test.yml", "c.test.yaml"]
