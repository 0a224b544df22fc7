"""`test`: run test files against rules. Prints each result, and the failures in detail at the end."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ratelimit_rls.cli.descriptor_options import format_descriptor
from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.cli.formatting import format_count, format_rule
from ratelimit_rls.core.model import Descriptor, Status
from ratelimit_rls.errors import SettingsError

if TYPE_CHECKING:
    from ratelimit_rls.simulation.case import Suite
    from ratelimit_rls.simulation.coverage import Coverage
    from ratelimit_rls.simulation.runner import CaseResult, Difference

    Results = list[tuple[Suite, list[CaseResult]]]

_EXAMPLES = """\b
Examples:
  # all tests of a directory; fail unless every rule is tested
  $ ratelimit-rls test descriptors/ --fail-under 100
  # selected tests, with results for a CI server
  $ ratelimit-rls test api.test.yaml --run 'premium|burst' --junit results.xml"""


@click.command(epilog=_EXAMPLES)
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--run", "pattern", metavar="REGEX", help="Run only tests whose name contains a match of REGEX.")
@click.option("--coverage", "with_coverage", is_flag=True, help="List the rules that no test matched.")
@click.option(
    "--fail-under",
    type=click.FloatRange(0, 100),
    metavar="PERCENT",
    help="Exit with 1 if the rule coverage is below PERCENT.",
)
@click.option(
    "--junit", type=click.Path(dir_okay=False, path_type=Path), help="Also write the results to this file as JUnit XML."
)
@click.option(
    "--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Output format."
)
def test(
    paths: tuple[Path, ...],
    pattern: str | None,
    with_coverage: bool,
    fail_under: float | None,
    junit: Path | None,
    form: str,
) -> ExitCode:
    """Run tests of rules.

    PATHS are test files, or directories of *.test.yaml. Tests use in-memory counters and a virtual clock, so that an
    hour passes in an instant. docs/testing.md describes the format.
    """
    from ratelimit_rls.simulation.coverage import measure
    from ratelimit_rls.simulation.suite import find_files, load_suites

    files = find_files(paths)
    if not files:
        raise SettingsError(f"no tests in {' '.join(map(str, paths))}: there is no *.test.yaml or *.test.yml file")
    wanted = _compile_pattern(pattern)
    results: Results = []
    for suite, outcomes in _run_suites(load_suites(files), wanted):
        results.append((suite, outcomes))
        if form == "text":
            for outcome in outcomes:
                click.echo(_result_line(suite, outcome))
    if wanted and not any(outcomes for _, outcomes in results):
        raise click.UsageError(f"--run {pattern!r} matches no test name")
    if junit is not None:
        _write_junit(junit, results)
    coverage = None
    if with_coverage or fail_under is not None:
        matched = [rule for _, outcomes in results for outcome in outcomes for rule in outcome.matched_rules]
        coverage = measure([suite for suite, _ in results], [path for path in paths if path.is_dir()], matched)
    click.echo(
        json.dumps(_json(results, coverage), indent=2) if form == "json" else "\n".join(_summary(results, coverage))
    )
    is_covered = coverage is None or fail_under is None or coverage.percent >= fail_under
    if coverage is not None and not is_covered:
        click.echo(f"Error: coverage is {coverage.percent:.1f} %, less than {fail_under:g} %", err=True)
    passed = all(outcome.passed for _, outcomes in results for outcome in outcomes)
    return ExitCode.DONE if passed and is_covered else ExitCode.BAD


def _compile_pattern(pattern: str | None) -> re.Pattern[str] | None:
    try:
        return None if pattern is None else re.compile(pattern)
    except re.error as error:
        raise click.UsageError(f"--run {pattern!r} must be a regular expression: {error}") from error


def _run_suites(suites: list[Suite], wanted: re.Pattern[str] | None) -> Iterator[tuple[Suite, list[CaseResult]]]:
    import asyncio

    from ratelimit_rls.simulation.runner import run_suite

    with asyncio.Runner() as runner:
        for suite in suites:
            cases = tuple(case for case in suite.cases if wanted is None or wanted.search(case.name))
            yield suite, runner.run(run_suite(suite, cases)) if cases else []


def _result_line(suite: Suite, outcome: CaseResult) -> str:
    verdict = click.style("ok  ", fg="green") if outcome.passed else click.style("FAIL", fg="red", bold=True)
    return f"{verdict}  {suite.file}  {outcome.case.name}"


def _summary(results: Results, coverage: Coverage | None) -> Iterator[str]:
    """Yield the failures in detail, the rules that no test matched, and the totals."""
    tests = sum(len(outcomes) for _, outcomes in results)
    failed = [(suite, outcome) for suite, outcomes in results for outcome in outcomes if not outcome.passed]
    for suite, outcome in failed:
        yield ""
        yield _result_line(suite, outcome)
        yield from _differences(outcome)
    if failed:
        yield ""
    if coverage is not None:
        for rule in coverage.missed:
            yield f"never met: {rule.path}  {format_rule(rule)}  {rule.position or ''}".rstrip()
        matched = coverage.rules - len(coverage.missed)
        yield f"coverage {coverage.percent:.1f} %: {matched} of {format_count(coverage.rules, 'rule')}"
    files = sum(bool(outcomes) for _, outcomes in results)
    verdict = click.style(f"{len(failed)} failed", fg="red") if failed else "ok"
    yield f"{format_count(files, 'file')}, {format_count(tests, 'test')}: {verdict}"


def _differences(outcome: CaseResult) -> Iterator[str]:
    from ratelimit_rls.core.duration import format_duration_us
    from ratelimit_rls.simulation.clock import format_timestamp

    for difference in outcome.differences:
        step, case = difference.step, outcome.case
        times = f", {step.times:,} times" if step.times > 1 else ""
        since = format_duration_us(step.at_us - case.start_us)
        yield f"  {step.position}: at {since} ({format_timestamp(step.at_us)}){times}"
        yield f"    expected  {_highlight(difference.expected, difference.got, 'green')}"
        yield f"    got       {_highlight(difference.got, difference.expected, 'red')}"
        yield from _last_responses(difference, case.domain)


def _highlight(these: tuple[str, ...], those: tuple[str, ...], color: str) -> str:
    """Join the values, and colour those that differ."""
    pairs = zip(these, those, strict=True)
    return ", ".join(this if this == that else click.style(this, fg=color) for this, that in pairs)


def _last_responses(difference: Difference, domain: str) -> Iterator[str]:
    """Yield the decision of the step's last call for each descriptor, with its rule."""
    if not difference.statuses:
        yield f"    domain {domain} · the mapping makes no descriptor from this request, so no limit applies"
    for descriptor, status in difference.statuses:
        rule = status.descriptor_plan.rule
        hits = f" hits {status.descriptor_plan.hits}" if status.descriptor_plan.hits != 1 else ""
        yield f"    domain {domain} · descriptor ({format_descriptor(descriptor)}){hits}"
        if rule is None:
            yield "      matched no rule; `ratelimit-rls explain` shows why"
        else:
            yield f"      matched {rule.path}  {format_rule(rule)}  {rule.position or ''}".rstrip()
            yield f"      {status.code.name.lower()}, {status.remaining} remaining, reset in {status.reset_s}s"


def _write_junit(path: Path, results: Results) -> None:
    from ratelimit_rls.simulation.junit import junit_xml

    files = [
        (suite.file, [(outcome, click.unstyle("\n".join(_differences(outcome)))) for outcome in outcomes])
        for suite, outcomes in results
    ]
    try:
        path.write_bytes(junit_xml(files))
    except OSError as error:
        raise SettingsError(f"--junit {path} cannot be written: {error.strerror}") from error


def _json(results: Results, coverage: Coverage | None) -> dict[str, Any]:
    outcomes = [outcome for _, outcomes in results for outcome in outcomes]
    report: dict[str, Any] = {
        "files": sum(bool(outcomes) for _, outcomes in results),
        "tests": len(outcomes),
        "failed": sum(not outcome.passed for outcome in outcomes),
        "results": [_result(suite, outcome) for suite, outcomes in results for outcome in outcomes],
    }
    if coverage is not None:
        missed = [{"rule": rule.path, "position": str(rule.position or "")} for rule in coverage.missed]
        report["coverage"] = {"rules": coverage.rules, "percent": coverage.percent, "missed": missed}
    return report


def _result(suite: Suite, outcome: CaseResult) -> dict[str, Any]:
    return {
        "file": suite.file,
        "line": outcome.case.position.line,
        "name": outcome.case.name,
        "passed": outcome.passed,
        "differences": [
            {
                "position": str(difference.step.position),
                "expected": list(difference.expected),
                "got": list(difference.got),
                "statuses": [_status(descriptor, status) for descriptor, status in difference.statuses],
            }
            for difference in outcome.differences
        ],
    }


def _status(descriptor: Descriptor, status: Status) -> dict[str, Any]:
    rule = status.descriptor_plan.rule
    return {
        "descriptor": [list(entry) for entry in descriptor.entries],
        "code": status.code.name,
        "remaining": status.remaining,
        "reset_s": status.reset_s,
        "rule": rule.path if rule else None,
        "position": str(rule.position) if rule and rule.position else None,
    }
