"""`test`: whether rules do what their test files say. Results as they come, failures once more at the end."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ratelimit_rls.cli.descriptor import format_descriptor
from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.cli.words import counted, rule_words
from ratelimit_rls.core.model import Descriptor, Status
from ratelimit_rls.errors import SettingsError

if TYPE_CHECKING:
    from ratelimit_rls.trial.case import Suite
    from ratelimit_rls.trial.coverage import Coverage
    from ratelimit_rls.trial.play import Difference, Outcome

    Played = list[tuple[Suite, list[Outcome]]]

_EXAMPLES = """\b
Examples:
  # every test of a directory, and no rule without one
  $ ratelimit-rls test descriptors/ --fail-under 100
  # some of them, for a build server
  $ ratelimit-rls test api.test.yaml --run 'premium|burst' --junit results.xml"""


@click.command(epilog=_EXAMPLES)
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--run", "pattern", metavar="REGEX", help="Only tests whose name it is found in.")
@click.option("--coverage", "with_coverage", is_flag=True, help="Tell which rules no step has met.")
@click.option(
    "--fail-under", type=click.FloatRange(0, 100), metavar="PERCENT", help="Exit with 1 if coverage is less than this."
)
@click.option("--junit", type=click.Path(dir_okay=False, path_type=Path), help="Write results as JUnit XML, too.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text")
def test(
    paths: tuple[Path, ...],
    pattern: str | None,
    with_coverage: bool,
    fail_under: float | None,
    junit: Path | None,
    form: str,
) -> ExitCode:
    """Test rules against what is expected of them.

    PATHS are test files, or directories of *.test.yaml. They run on counters in this process and on a clock of their
    own, so that an hour takes no time. docs/testing.md has the format.
    """
    from ratelimit_rls.trial.coverage import measure
    from ratelimit_rls.trial.suite import find_files, load_suites

    files = find_files(paths)
    if not files:
        raise SettingsError(f"no tests in {' '.join(map(str, paths))}: there is no *.test.yaml or *.test.yml file")
    wanted = _compiled(pattern)
    played: Played = []
    for suite, outcomes in _play(load_suites(files), wanted):
        played.append((suite, outcomes))
        if form == "text":
            for outcome in outcomes:
                click.echo(_line(suite, outcome))
    if wanted and not any(outcomes for _, outcomes in played):
        raise click.UsageError(f"no test has a name in which {pattern!r} is found")
    if junit is not None:
        _write_junit(junit, played)
    coverage = None
    if with_coverage or fail_under is not None:
        met = [rule for _, outcomes in played for outcome in outcomes for rule in outcome.met]
        coverage = measure([suite for suite, _ in played], [path for path in paths if path.is_dir()], met)
    click.echo(json.dumps(_json(played, coverage), indent=2) if form == "json" else "\n".join(_end(played, coverage)))
    is_covered = coverage is None or fail_under is None or coverage.percent >= fail_under
    if coverage is not None and not is_covered:
        click.echo(f"Error: coverage is {coverage.percent:.1f} %, less than {fail_under:g} %", err=True)
    passed = all(outcome.passed for _, outcomes in played for outcome in outcomes)
    return ExitCode.DONE if passed and is_covered else ExitCode.BAD


def _compiled(pattern: str | None) -> re.Pattern[str] | None:
    try:
        return None if pattern is None else re.compile(pattern)
    except re.error as fault:
        raise click.UsageError(f"--run {pattern!r} is no regular expression: {fault}") from fault


def _play(suites: list[Suite], wanted: re.Pattern[str] | None) -> Iterator[tuple[Suite, list[Outcome]]]:
    import asyncio

    from ratelimit_rls.trial.play import play_suite

    with asyncio.Runner() as runner:
        for suite in suites:
            cases = tuple(case for case in suite.cases if wanted is None or wanted.search(case.name))
            yield suite, runner.run(play_suite(suite, cases)) if cases else []


def _line(suite: Suite, outcome: Outcome) -> str:
    verdict = click.style("ok  ", fg="green") if outcome.passed else click.style("FAIL", fg="red", bold=True)
    return f"{verdict}  {suite.file}  {outcome.case.name}"


def _end(played: Played, coverage: Coverage | None) -> Iterator[str]:
    """Every failure with all there is to know, the rules that were not met, the verdict."""
    tests = sum(len(outcomes) for _, outcomes in played)
    failed = [(suite, outcome) for suite, outcomes in played for outcome in outcomes if not outcome.passed]
    for suite, outcome in failed:
        yield ""
        yield _line(suite, outcome)
        yield from _differences(outcome)
    if failed:
        yield ""
    if coverage is not None:
        for rule in coverage.missed:
            yield f"never met: {rule.path}  {rule_words(rule)}  {rule.position or ''}".rstrip()
        met = coverage.rules - len(coverage.missed)
        yield f"coverage {coverage.percent:.1f} %: {met} of {counted(coverage.rules, 'rule')}"
    files = sum(bool(outcomes) for _, outcomes in played)
    verdict = click.style(f"{len(failed)} failed", fg="red") if failed else "ok"
    yield f"{counted(files, 'file')}, {counted(tests, 'test')}: {verdict}"


def _differences(outcome: Outcome) -> Iterator[str]:
    from ratelimit_rls.core.span import format_span
    from ratelimit_rls.trial.moments import format_moment

    for found in outcome.differences:
        step, case = found.step, outcome.case
        times = f", {step.times:,} times" if step.times > 1 else ""
        since = format_span(step.at_us - case.start_us)
        yield f"  {step.position}: at {since} ({format_moment(step.at_us)}){times}"
        yield f"    expected  {_marked(found.expected, found.got, 'green')}"
        yield f"    got       {_marked(found.got, found.expected, 'red')}"
        yield from _told(found, case.domain)


def _marked(these: tuple[str, ...], those: tuple[str, ...], color: str) -> str:
    """What differs is coloured."""
    pairs = zip(these, those, strict=True)
    return ", ".join(this if this == that else click.style(this, fg=color) for this, that in pairs)


def _told(found: Difference, domain: str) -> Iterator[str]:
    """What the last call of the step was told of each descriptor, and by which rule."""
    if not found.told:
        yield f"    domain {domain} · no descriptor comes of this request, so no limit applies"
    for descriptor, status in found.told:
        rule = status.slot.rule
        hits = f" hits {status.slot.hits}" if status.slot.hits != 1 else ""
        yield f"    domain {domain} · descriptor ({format_descriptor(descriptor)}){hits}"
        if rule is None:
            yield "      met no rule; `ratelimit-rls explain` tells why"
        else:
            yield f"      met {rule.path}  {rule_words(rule)}  {rule.position or ''}".rstrip()
            yield f"      {status.code.name.lower()}, {status.remaining} remaining, reset in {status.reset_s}s"


def _write_junit(path: Path, played: Played) -> None:
    from ratelimit_rls.trial.junit import junit_xml

    files = [
        (suite.file, [(outcome, click.unstyle("\n".join(_differences(outcome)))) for outcome in outcomes])
        for suite, outcomes in played
    ]
    try:
        path.write_bytes(junit_xml(files))
    except OSError as fault:
        raise SettingsError(f"--junit {path} cannot be written: {fault.strerror}") from fault


def _json(played: Played, coverage: Coverage | None) -> dict[str, Any]:
    outcomes = [outcome for _, outcomes in played for outcome in outcomes]
    told: dict[str, Any] = {
        "files": sum(bool(outcomes) for _, outcomes in played),
        "tests": len(outcomes),
        "failed": sum(not outcome.passed for outcome in outcomes),
        "results": [_result(suite, outcome) for suite, outcomes in played for outcome in outcomes],
    }
    if coverage is not None:
        missed = [{"rule": rule.path, "position": str(rule.position or "")} for rule in coverage.missed]
        told["coverage"] = {"rules": coverage.rules, "percent": coverage.percent, "missed": missed}
    return told


def _result(suite: Suite, outcome: Outcome) -> dict[str, Any]:
    return {
        "file": suite.file,
        "line": outcome.case.position.line,
        "name": outcome.case.name,
        "passed": outcome.passed,
        "differences": [
            {
                "position": str(found.step.position),
                "expected": list(found.expected),
                "got": list(found.got),
                "told": [_status(descriptor, status) for descriptor, status in found.told],
            }
            for found in outcome.differences
        ],
    }


def _status(descriptor: Descriptor, status: Status) -> dict[str, Any]:
    rule = status.slot.rule
    return {
        "descriptor": [list(entry) for entry in descriptor.entries],
        "code": status.code.name,
        "remaining": status.remaining,
        "reset_s": status.reset_s,
        "rule": rule.path if rule else None,
        "position": str(rule.position) if rule and rule.position else None,
    }
