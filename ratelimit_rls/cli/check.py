"""`check`: whether rules can be used. One line per problem, its place first; the last line is the verdict."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.cli.rules import read, rules_arguments
from ratelimit_rls.cli.words import counted, printable
from ratelimit_rls.errors import Problem, RulesError

_EXAMPLES = """\b
Examples:
  # in a pipeline: warnings fail it, too
  $ ratelimit-rls check --strict descriptors/
  # only the errors, for a program
  $ ratelimit-rls check --format json api.yaml | jq '.problems[] | select(.severity == "error")'"""


@click.command(epilog=_EXAMPLES)
@rules_arguments
@click.option("--strict", is_flag=True, help="Exit with 3 if there are warnings.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text")
def check(paths: tuple[Path, ...], merge_domains: bool, strict: bool, form: str) -> ExitCode:
    """Check rules and tell every problem.

    PATHS are rules files, or directories of them. Problems are told on stdout, sorted by place.
    """
    from ratelimit_rls.rules.compile import compile_documents

    sources = read(paths)
    problems: tuple[Problem, ...]
    rules: int | None = None
    try:
        compiled = compile_documents(sources, merge_domains=merge_domains)
    except RulesError as refused:
        problems = refused.problems
    else:
        problems, rules = compiled.warnings, len(compiled.tree.rules())
    errors = sum(problem.severity == "error" for problem in problems)
    warnings = len(problems) - errors
    if form == "json":
        told = {"files": len(sources), "rules": rules, "errors": errors, "warnings": warnings}
        click.echo(json.dumps({**told, "problems": [asdict(problem) for problem in problems]}, indent=2))
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
    return f"{problem.file}:{problem.line}:{problem.column}: {colored}: {printable(problem.message)}"


def _verdict(files: int, rules: int | None, errors: int, warnings: int) -> str:
    """Rules are not counted where there are errors: nobody can say how many there would be."""
    seen = counted(files, "file") + ("" if rules is None else f", {counted(rules, 'rule')}")
    found = [counted(number, noun) for number, noun in ((errors, "error"), (warnings, "warning")) if number]
    return f"{seen}: {', '.join(found) or 'ok'}"
