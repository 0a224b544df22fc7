"""`rules`: import, export and compare stored rules; files and database convert without loss."""

from __future__ import annotations

import difflib
import getpass
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from ratelimit_rls.cli.database_options import all_rules, database_option, stored_rules, with_repository
from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.cli.formatting import escape_unprintable, format_count
from ratelimit_rls.cli.rules_arguments import read_sources
from ratelimit_rls.errors import Conflict, Problem, RulesError

if TYPE_CHECKING:
    from ratelimit_rls.core.accounts import StoredRule
    from ratelimit_rls.database.repository import Repository, UnitOfWork
    from ratelimit_rls.rules.yaml.parser import SourceDocument

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

_TRANSACTION_TIMEOUT_S = 600.0
_MAX_ATTEMPTS = 5

_PATHS = click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))


@click.group()
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
    from ratelimit_rls.database.repository import Actor

    file_rules = _read_file_rules(paths)

    async def work(repository: Repository) -> _ImportPlan:
        for _ in range(_MAX_ATTEMPTS):
            async with repository.reading(_TRANSACTION_TIMEOUT_S) as reader:
                stored = {rule.name: rule for rule in await all_rules(reader)}
            # Outside of any transaction: compiling many rules takes long and must not block other writers.
            _check(file_rules, [] if prune else [rule for name, rule in stored.items() if name not in file_rules])
            plan = _ImportPlan.of(file_rules, stored, prune=prune)
            actor = Actor(f"{_user_name()}, rules import")
            async with repository.change(actor, dry_run=dry_run, timeout_s=_TRANSACTION_TIMEOUT_S) as change:
                if {rule.name: rule for rule in await all_rules(change)} == stored:
                    await plan.apply(change)
                    return plan
        raise Conflict("other clients keep changing the stored rules; try again")

    plan = with_repository(database, work)
    for word, group in (("create", plan.new), ("change", plan.changed), ("delete", plan.deleted)):
        for rule in group:
            click.echo(escape_unprintable(f"{word} {rule.name}"))
    touched = len(plan.new) + len(plan.changed) + len(plan.deleted)
    verb = "would be" if dry_run else "was" if touched == 1 else "were"
    click.echo(f"{format_count(touched, 'rule')} {verb} changed, {plan.unchanged} as in the files already")
    return ExitCode.DONE


@rules.command(epilog=_EXPORT_EXAMPLES)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIRECTORY",
    help="Write one file per rule here.",
)
@database_option
def export(output: Path | None, database: str) -> ExitCode:
    """Export the stored rules as files, or to stdout as one file. `rules import` reads both."""
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


@rules.command(epilog=_DIFF_EXAMPLES)
@_PATHS
@database_option
def diff(paths: tuple[Path, ...], database: str) -> ExitCode:
    """Show the differences between files and the database: what `rules import --prune` would change.

    PATHS are rules files, or directories of rules files. Exits with 1 if there is a difference.
    """
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


class _FileRule(NamedTuple):
    """A file, or one document of a file, and the rule it contains."""

    source: SourceDocument
    rule: StoredRule

    @property
    def place(self) -> str:
        above = self.source.lines_above
        return f"{self.source.name}:{above + 1}" if above else self.source.name


def _read_file_rules(paths: tuple[Path, ...]) -> dict[str, _FileRule]:
    """Return the rules of all files by name. Raises RulesError with every problem of the files themselves."""
    file_rules: dict[str, _FileRule] = {}
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


def _rules_in(file: SourceDocument) -> list[_FileRule]:
    """Return the rules of one file. Each must be YAML in UTF-8, since the database stores text. Raises RulesError."""
    from ratelimit_rls.rules.stored_rule_format import parse_rules
    from ratelimit_rls.rules.yaml.parser import load

    load(file)  # the first document; also reports problems of the whole text
    try:
        text = file.content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise RulesError([Problem(file.name, 1, 1, "a stored rule must be UTF-8; save the file as UTF-8")]) from None
    file_rules: list[_FileRule] = []
    problems: list[Problem] = []
    for rule, part, line in parse_rules(text, Path(file.name).stem, file.name):
        ranked = replace(file, rank=rule.priority, targeting=rule.targeting)
        file_rules.append(_FileRule(replace(ranked, content=part.encode(), lines_above=line - 1), rule))
        try:
            load(file_rules[-1].source)
        except RulesError as error:
            problems += error.problems
    if problems:
        raise RulesError(problems)
    return file_rules


@dataclass(frozen=True, slots=True)
class _ImportPlan:
    """The changes that an import makes."""

    new: list[StoredRule]
    changed: list[StoredRule]
    deleted: list[StoredRule]
    unchanged: int

    @classmethod
    def of(cls, file_rules: Mapping[str, _FileRule], stored: Mapping[str, StoredRule], *, prune: bool) -> _ImportPlan:
        wanted = [
            _with_file_fields(item.rule, stored[name]) for name, item in sorted(file_rules.items()) if name in stored
        ]
        changed = [rule for rule in wanted if rule != stored[rule.name]]
        return cls(
            new=[item.rule for name, item in sorted(file_rules.items()) if name not in stored],
            changed=changed,
            deleted=[rule for name, rule in stored.items() if prune and name not in file_rules],
            unchanged=len(wanted) - len(changed),
        )

    async def apply(self, change: UnitOfWork) -> None:
        for rule in self.deleted:  # first: a new rule may reuse the name
            await change.delete_rule(rule.rule_id)
        for rule in self.changed:
            await change.put_rule(rule)
        for rule in self.new:
            await change.add_rule(rule)


def _with_file_fields(rule: StoredRule, stored: StoredRule) -> StoredRule:
    """Return the stored rule with the fields that a file defines."""
    return replace(
        stored,
        document=rule.document,
        priority=rule.priority,
        enabled=rule.enabled,
        targeting=rule.targeting,
    )


def _check(file_rules: Mapping[str, _FileRule], kept: Iterable[StoredRule]) -> None:
    """Compile the rules. Raises RulesError; positions are those in the files, whose first line is a comment."""
    from ratelimit_rls.rules.compile import compile_documents
    from ratelimit_rls.rules.sources.database import stored_sources

    for item in file_rules.values():
        if not item.rule.enabled:  # so that enabling it later cannot fail
            compile_documents([item.source])
    compile_documents([*(item.source for item in file_rules.values() if item.rule.enabled), *stored_sources(kept)])


def _differences(name: str, stored: StoredRule | None, file_rule: _FileRule | None) -> Iterator[str]:
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
