"""Running of test cases: order of steps, differences, coverage and JUnit output."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from ratelimit_rls.simulation.coverage import measure
from ratelimit_rls.simulation.junit import junit_xml
from ratelimit_rls.simulation.runner import CaseResult, run_suite
from ratelimit_rls.simulation.suite import read_suite

RULES = """\
domain: edge
descriptors:
  - key: user
    rate_limit: {unit: minute, requests_per_unit: 2, name: per-user}
  - key: user
    value: staff
    rate_limit: {unlimited: true}
  - key: queue
    action: throttle
    rate_limit: {unit: second, requests_per_unit: 2}
  - key: watched
    penalty: {}
    warn_at: 0.5
    rate_limit: {unit: minute, requests_per_unit: 2}
"""
HEAD = 'descriptors: rules.yaml\ndomain: edge\ntests:\n  - name: "<one> & \\x01"\n    steps:\n'


async def run_steps(directory: Path, *steps: str) -> CaseResult:
    (directory / "rules.yaml").write_text(RULES)
    file = directory / "a.test.yaml"
    file.write_text(HEAD + "".join(f"      - {step}\n" for step in steps))
    (outcome,) = await run_suite(read_suite(file))
    return outcome


async def test_steps_run_in_time_order(tmp_path: Path) -> None:
    outcome = await run_steps(
        tmp_path,
        "{at: 60s, descriptor: {user: a}, expect: ok, remaining: 1}",
        "{at: 1s, descriptor: {user: a}, times: 2, every: 58s, expect: ok}",
        "{at: 59s, descriptor: {user: a}, expect: over_limit, retry_after: 1s}",
    )
    assert outcome.passed, outcome.differences


async def test_difference_lists_everything_expected_and_received(tmp_path: Path) -> None:
    outcome = await run_steps(
        tmp_path,
        "{descriptor: {user: a}, times: 3, expect: ok, remaining: 1, retry_after: 0s, rule: per-user}",
        "{descriptor: {user: b}, expect: ok}",
        "{descriptors: [{user: a}, {path: /}], expect: ok, statuses: [{expect: ok}, {rule: edge.path}]}",
    )

    first, second = outcome.differences

    assert first.expected == ("3 ok", "remaining 1", "retry_after 0s", "rule per-user")
    assert first.got == (
        "2 ok and 1 over_limit",
        "remaining 0",
        "retry_after 1m",
        "rule per-user",
    )
    assert second.expected == ("ok", "[0] ok", "[1] rule edge.path")
    assert second.got == ("over_limit", "[0] over_limit", "[1] rule none")
    assert [descriptor.entries for descriptor, _ in second.statuses] == [(("user", "a"),), (("path", "/"),)]


async def test_retry_after_never_is_reported(tmp_path: Path) -> None:
    outcome = await run_steps(tmp_path, "{descriptor: {user: a}, hits: 3, expect: over_limit, retry_after: 1m}")
    assert outcome.differences[0].got == ("over_limit", "retry_after never")


async def test_delayed_call_passes_and_its_delay_is_compared(tmp_path: Path) -> None:
    outcome = await run_steps(
        tmp_path,
        "{descriptor: {queue: q}, expect: ok, delay: 0s}",
        "{descriptor: {queue: q}, times: 2, expect: ok, delay: 1s, retry_after: 0s}",
        "{descriptor: {queue: q}, expect: over_limit, delay: 500ms}",
        "{descriptors: [{queue: z}, {user: a}], expect: ok, delay: 1ms}",
    )

    first, second = outcome.differences

    assert (first.expected, first.got) == (("over_limit", "delay 500ms"), ("over_limit", "delay 0s"))
    assert (second.expected, second.got) == (("ok", "delay 1ms"), ("ok", "delay 0s"))


async def test_states_and_violations_are_compared_for_each_descriptor(tmp_path: Path) -> None:
    outcome = await run_steps(
        tmp_path,
        "{descriptor: {watched: a}, times: 3, expect: {ok: 2, over_limit: 1}, state: throttled, violations: 1}",
        "{descriptors: [{watched: a}, {user: a}], expect: over_limit, statuses: [{state: normal, violations: 2}, "
        "{state: warning, violations: 0}]}",
    )

    (difference,) = outcome.differences

    assert difference.expected == (
        "over_limit",
        "[0] state normal",
        "[0] violations 2",
        "[1] state warning",
        "[1] violations 0",
    )
    assert difference.got == (
        "over_limit",
        "[0] state throttled",
        "[0] violations 1",
        "[1] state none",
        "[1] violations 0",
    )


async def test_every_case_starts_with_empty_counters(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(RULES)
    case = "  - {name: x, steps: [{descriptor: {user: a}, expect: {ok: 2, over_limit: 1}}]}\n"
    (tmp_path / "a.test.yaml").write_text("descriptors: rules.yaml\ndomain: edge\ntests:\n" + 2 * case)

    assert all(outcome.passed for outcome in await run_suite(read_suite(tmp_path / "a.test.yaml")))


async def test_coverage_lists_unmatched_rules_by_position(tmp_path: Path) -> None:
    outcome = await run_steps(tmp_path, "{descriptor: {user: a}, expect: ok}")
    suite = read_suite(tmp_path / "a.test.yaml")

    part = measure([suite], [], outcome.matched_rules)
    assert (part.rules, part.percent) == (4, 25.0)
    missed = [str(rule.position).rpartition("/")[2] for rule in part.missed]
    assert missed == ["rules.yaml:5:5", "rules.yaml:8:5", "rules.yaml:11:5"]

    (tmp_path / "untested.yaml").write_text(RULES.replace("edge", "other"))
    whole = measure([suite], [tmp_path], outcome.matched_rules)
    assert (whole.rules, len(whole.missed)) == (8, 7)


async def test_junit_xml_is_valid_for_any_name(tmp_path: Path) -> None:
    outcome = await run_steps(tmp_path, "{descriptor: {user: a}, expect: over_limit}")

    root = ElementTree.fromstring(junit_xml([("a<b>.test.yaml", [(outcome, "text & ]]> \x00 more")])]))

    (suite,) = root
    assert (suite.get("name"), suite.get("tests"), suite.get("failures")) == ("a<b>.test.yaml", "1", "1")
    (case,) = suite
    assert (case.get("name"), case.get("line")) == ("<one> & \ufffd", "4")
    (failure,) = case
    assert failure.get("message") == "expected over_limit; got ok"
    assert failure.text == "text & ]]> \ufffd more"
