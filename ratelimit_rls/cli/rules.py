"""`rules`: import, export and compare stored rules; files and database convert without loss."""

from __future__ import annotations

import difflib
import getpass
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ratelimit_rls.cli.database_options import database_option, with_repository
from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.cli.formatting import escape_unprintable, format_count
from ratelimit_rls.cli.rules_arguments import read_sources
from ratelimit_rls.errors import Problem, RulesError

if TYPE_CHECKING:
    from ratelimit_rls.admin.rules_import import FileRule
    from ratelimit_rls.rules.source_document import SourceDocument
    from ratelimit_rls.rules.stored_rule import StoredRule

_IMPORT_EXAMPLES = """\b
Examples:
  # show what would change
  $ ratelimit-rls rules import --dry-run descriptors/
  # make the database contain exactly these rules
  $ ratelimit-rls rules import --prune descriptors/"""

_EXPORT_EXAMPLES = """\b
Examples:
  # one file per rule, for version control
  $ ratelimit-rls rules export --output stored/"""

_DIFF_EXAMPLES = """\b
Examples:
  # are the reviewed rules the ones in force?
  $ ratelimit-rls rules diff stored/"""

_PATHS = click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))


@click.group(short_help="Import, export and compare stored rules.")
def rules() -> None:
    """Import, export and compare rules between files and the database.

    The name, priority, enabled and targeting of a rule are in a comment on its first line. A file contains one rule,
    which is named after the file if it has no such comment; or several separated by ---, each with its own comment.
    """


@rules.command("import", epilog=_IMPORT_EXAMPLES)
@_PATHS
@click.option("--prune", is_flag=True, help="Delete stored rules that are in none of the files.")
@click.option("--dry-run", is_flag=True, help="Print what would be changed, and change nothing.")
@database_option
def import_(paths: tuple[Path, ...], prune: bool, dry_run: bool, database: str) -> ExitCode:
    """Import rules from files into the database.

    PATHS are rules files, or directories of rules files. All are imported or none: first everything is compiled,
    together with the stored rules that remain; then all changes are made in one transaction.
    """
    from ratelimit_rls.admin.rules_import import import_rules
    from ratelimit_rls.database.repository import Actor

    file_rules, actor = _read_file_rules(paths), Actor(f"{_user_name()}, rules import")
    plan = with_repository(
        database, lambda repository: import_rules(repository, actor, file_rules, prune=prune, dry_run=dry_run)
    )
    for word, group in (("create", plan.new), ("change", plan.changed), ("delete", plan.deleted)):
        for rule in group:
            click.echo(escape_unprintable(f"{word} {rule.name}"))
    touched = len(plan.new) + len(plan.changed) + len(plan.deleted)
    verb = "would be" if dry_run else "was" if touched == 1 else "were"
    click.echo(f"{format_count(touched, 'rule')} {verb} changed, {plan.unchanged} as in the files already")
    return ExitCode.DONE


@rules.command(epilog=_EXPORT_EXAMPLES, short_help="Export the stored rules as files.")
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIRECTORY",
    help="Write one file per rule here.",
)
@database_option
def export(output: Path | None, database: str) -> ExitCode:
    """Export the stored rules as files, or to stdout as one file. `rules import` reads both."""
    from ratelimit_rls.admin.rules import stored_rules
    from ratelimit_rls.rules.stored_rule_format import file_name, format_rule, format_rules

    stored = with_repository(database, stored_rules)
    if output is None:
        click.echo(format_rules(stored).encode(), nl=False)  # bytes: line breaks must not be translated
        return ExitCode.DONE
    output.mkdir(parents=True, exist_ok=True)
    for rule in stored:
        (output / file_name(rule.name)).write_bytes(format_rule(rule).encode())
    others = {path.name for path in output.glob("*.yaml")} - {file_name(rule.name) for rule in stored}
    click.echo(f"{format_count(len(stored), 'rule')} written to {escape_unprintable(str(output))}", err=True)
    if others:
        click.echo(
            escape_unprintable(f"other files in the directory, not from the database: {', '.join(sorted(others))}"),
            err=True,
        )
    return ExitCode.DONE


@rules.command(epilog=_DIFF_EXAMPLES, short_help="Compare files with the stored rules.")
@_PATHS
@database_option
def diff(paths: tuple[Path, ...], database: str) -> ExitCode:
    """Show the differences between files and the database: what `rules import --prune` would change.

    PATHS are rules files, or directories of rules files. Exits with 1 if there is a difference.
    """
    from ratelimit_rls.admin.rules import stored_rules

    file_rules = _read_file_rules(paths)
    stored = {rule.name: rule for rule in with_repository(database, stored_rules)}
    lines = [
        line
        for name in sorted(file_rules.keys() | stored.keys())
        for line in _differences(name, stored.get(name), file_rules.get(name))
    ]
    for line in lines:
        click.echo(click.style(escape_unprintable(line), fg={"-": "red", "+": "green"}.get(line[:1])))
    return ExitCode.BAD if lines else ExitCode.DONE


def _read_file_rules(paths: tuple[Path, ...]) -> dict[str, FileRule]:
    """Return the rules of all files by name. Raises RulesError with every problem of the files themselves."""
    file_rules: dict[str, FileRule] = {}
    problems: list[Problem] = []
    for source in read_sources(paths):
        try:
            rules = _rules_in(source)
        except RulesError as error:
            problems += error.problems
            continue
        for item in rules:
            first = file_rules.setdefault(item.rule.name, item)
            if first is not item:
                what = f"{first.place} is also named '{item.rule.name}'; rename one of them"
                problems.append(Problem(source.name, item.source.lines_above + 1, 1, what))
    if problems:
        raise RulesError(problems)
    return file_rules


def _rules_in(file: SourceDocument) -> list[FileRule]:
    """Return the rules of one file. Each must be YAML in UTF-8, since the database stores text. Raises RulesError."""
    from ratelimit_rls.admin.rules_import import FileRule
    from ratelimit_rls.rules.source_document import load
    from ratelimit_rls.rules.stored_rule_format import parse_rules

    load(file)  # the first document; also reports problems of the whole text
    try:
        text = file.content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise RulesError([Problem(file.name, 1, 1, "a stored rule must be UTF-8; save the file as UTF-8")]) from None
    file_rules: list[FileRule] = []
    problems: list[Problem] = []
    for rule, part, line in parse_rules(text, Path(file.name).stem, file.name):
        ranked = replace(file, rank=rule.priority, targeting=rule.targeting)
        file_rules.append(FileRule(replace(ranked, content=part.encode(), lines_above=line - 1), rule))
        try:
            load(file_rules[-1].source)
        except RulesError as error:
            problems += error.problems
    if problems:
        raise RulesError(problems)
    return file_rules


def _differences(name: str, stored: StoredRule | None, file_rule: FileRule | None) -> Iterator[str]:
    from ratelimit_rls.rules.sources.database import PREFIX
    from ratelimit_rls.rules.stored_rule_format import format_rule

    return difflib.unified_diff(
        format_rule(stored).split("\n") if stored else [],  # no other line breaks: they are part of the text
        format_rule(file_rule.rule).split("\n") if file_rule else [],
        PREFIX + name if stored else "/dev/null",
        file_rule.source.name if file_rule else "/dev/null",
        lineterm="",
    )


def _user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return "unknown user"
