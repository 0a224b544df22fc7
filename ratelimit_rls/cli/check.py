"""`check`: validate rules. Prints one line per problem, position first, and a summary at the end."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.cli.formatting import escape_unprintable, format_count
from ratelimit_rls.cli.rules_arguments import read_sources, rules_arguments
from ratelimit_rls.errors import Problem, RulesError

_EXAMPLES = """\b
Examples:
  # in a pipeline: fail on warnings, too
  $ ratelimit-rls check --strict descriptors/
  # only the errors, machine-readable
  $ ratelimit-rls check --format json api.yaml | jq '.problems[] | select(.severity == "error")'"""


@click.command(epilog=_EXAMPLES)
@rules_arguments
@click.option("--strict", is_flag=True, help="Exit with 3 if there are warnings.")
@click.option(
    "--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Output format."
)
def check(paths: tuple[Path, ...], merge_domains: bool, strict: bool, form: str) -> ExitCode:
    """Check rules and report every problem.

    PATHS are rules files, or directories of rules files. Problems are printed to stdout, sorted by position.
    """
    from ratelimit_rls.rules.compile import compile_documents

    sources = read_sources(paths)
    problems: tuple[Problem, ...]
    rules: int | None = None
    try:
        compiled = compile_documents(sources, merge_domains=merge_domains)
    except RulesError as error:
        problems = error.problems
    else:
        problems, rules = compiled.warnings, len(compiled.tree.rules())
    errors = sum(problem.severity == "error" for problem in problems)
    warnings = len(problems) - errors
    if form == "json":
        summary = {"files": len(sources), "rules": rules, "errors": errors, "warnings": warnings}
        click.echo(json.dumps({**summary, "problems": [asdict(problem) for problem in problems]}, indent=2))
    else:
        for problem in problems:
            click.echo(_line(problem))
        click.echo(_verdict(len(sources), rules, errors, warnings))
    if errors:
        return ExitCode.BAD
    return ExitCode.WARNINGS if strict and warnings else ExitCode.DONE


def _line(problem: Problem) -> str:
    kind = f"{problem.severity}[{problem.code}]" if problem.code else problem.severity
    colored = click.style(kind, fg="red" if problem.severity == "error" else "yellow")
    return f"{problem.file}:{problem.line}:{problem.column}: {colored}: {escape_unprintable(problem.message)}"


def _verdict(files: int, rules: int | None, errors: int, warnings: int) -> str:
    """Return the summary line. With errors the number of rules is unknown and left out."""
    counts = format_count(files, "file") + ("" if rules is None else f", {format_count(rules, 'rule')}")
    found = [format_count(number, noun) for number, noun in ((errors, "error"), (warnings, "warning")) if number]
    return f"{counts}: {', '.join(found) or 'ok'}"
