"""`rules`: between files and the database, without loss."""

from __future__ import annotations

import difflib
import getpass
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from ratelimit_rls.cli.desk import at_desk, database_option, every_rule, stored_rules
from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.cli.rules import read
from ratelimit_rls.cli.words import counted, printable
from ratelimit_rls.errors import Conflict, Problem, RulesError

if TYPE_CHECKING:
    from ratelimit_rls.core.accounts import StoredRule
    from ratelimit_rls.records.desk import Change, Desk
    from ratelimit_rls.rules.load import Source

_IMPORT_EXAMPLES = """\b
Examples:
  # what would change?
  $ ratelimit-rls rules import --dry-run descriptors/
  # the database has these rules and no others
  $ ratelimit-rls rules import --prune descriptors/"""

_EXPORT_EXAMPLES = """\b
Examples:
  # a file for each rule, to keep under version control
  $ ratelimit-rls rules export --output stored/"""

_DIFF_EXAMPLES = """\b
Examples:
  # is what was reviewed what is in force?
  $ ratelimit-rls rules diff stored/"""

_PATIENCE_S = 600.0
_MOST_ATTEMPTS = 5

_PATHS = click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))


@click.group()
def rules() -> None:
    """Move rules between files and the database.

    What is not its document (name, priority, enabled, targeting) is in a comment on the first line of a rule. A file is
    one rule, called like the file if it has no such line; or several that are parted by ---, each with a line of its
    own.
    """


@rules.command("import", epilog=_IMPORT_EXAMPLES)
@_PATHS
@click.option("--prune", is_flag=True, help="Delete the rules that are in none of the files.")
@click.option("--dry-run", is_flag=True, help="Tell what would be done, and do nothing.")
@database_option
def import_(paths: tuple[Path, ...], prune: bool, dry_run: bool, database: str) -> ExitCode:
    """Put rules from files into the database.

    PATHS are rules files, or directories of them. All are taken or none: first everything is compiled, together with
    the rules of the database that stay; then everything is changed in one step.
    """
    from ratelimit_rls.records.desk import Actor

    given = _given(paths)

    async def work(desk: Desk) -> _Plan:
        for _ in range(_MOST_ATTEMPTS):
            async with desk.reading(_PATIENCE_S) as reader:
                stored = {rule.name: rule for rule in await every_rule(reader)}
            # Outside of any transaction: many rules take their time, and others must be able to change something.
            _check(given, [] if prune else [rule for name, rule in stored.items() if name not in given])
            plan = _Plan.of(given, stored, prune=prune)
            actor = Actor(f"{_who()}, rules import")
            async with desk.change(actor, dry_run=dry_run, patience_s=_PATIENCE_S) as change:
                if {rule.name: rule for rule in await every_rule(change)} == stored:
                    await plan.carry_out(change)
                    return plan
        raise Conflict("other rules change all the time; try again")

    plan = at_desk(database, work)
    for word, group in (("create", plan.new), ("change", plan.changed), ("delete", plan.gone)):
        for rule in group:
            click.echo(printable(f"{word} {rule.name}"))
    touched = len(plan.new) + len(plan.changed) + len(plan.gone)
    verb = "would be" if dry_run else "was" if touched == 1 else "were"
    click.echo(f"{counted(touched, 'rule')} {verb} changed, {plan.same} as in the files already")
    return ExitCode.DONE


@rules.command(epilog=_EXPORT_EXAMPLES)
@click.option(
    "--output", type=click.Path(file_okay=False, path_type=Path), metavar="DIRECTORY", help="A file there for each."
)
@database_option
def export(output: Path | None, database: str) -> ExitCode:
    """Write the rules of the database as files, or to stdout as one file: `import` takes either."""
    from ratelimit_rls.rules.stored_text import file_name, joined, text_of

    stored = at_desk(database, stored_rules)
    if output is None:
        click.echo(joined(stored).encode(), nl=False)  # bytes: no line break is to become another one
        return ExitCode.DONE
    output.mkdir(parents=True, exist_ok=True)
    for rule in stored:
        (output / file_name(rule.name)).write_bytes(text_of(rule).encode())
    others = {path.name for path in output.glob("*.yaml")} - {file_name(rule.name) for rule in stored}
    click.echo(f"{counted(len(stored), 'rule')} written to {printable(str(output))}", err=True)
    if others:
        click.echo(printable(f"also there, and not from the database: {', '.join(sorted(others))}"), err=True)
    return ExitCode.DONE


@rules.command(epilog=_DIFF_EXAMPLES)
@_PATHS
@database_option
def diff(paths: tuple[Path, ...], database: str) -> ExitCode:
    """Tell how files differ from the database: what `import --prune` would change.

    PATHS are rules files, or directories of them. Exits with 1 if there is a difference.
    """
    given = _given(paths)
    stored = {rule.name: rule for rule in at_desk(database, stored_rules)}
    lines = [
        line
        for name in sorted(given.keys() | stored.keys())
        for line in _differences(name, stored.get(name), given.get(name))
    ]
    for line in lines:
        click.echo(click.style(printable(line), fg={"-": "red", "+": "green"}.get(line[:1])))
    return ExitCode.BAD if lines else ExitCode.DONE


class _Given(NamedTuple):
    """A file, or a part of one, and the rule that it is."""

    source: Source
    rule: StoredRule

    @property
    def place(self) -> str:
        above = self.source.lines_above
        return f"{self.source.name}:{above + 1}" if above else self.source.name


def _given(paths: tuple[Path, ...]) -> dict[str, _Given]:
    """By the name of the rule. Raises RulesError with everything that is wrong with the files themselves."""
    given: dict[str, _Given] = {}
    problems: list[Problem] = []
    for source in read(paths):
        try:
            rules = _rules_in(source)
        except RulesError as error:
            problems += error.problems
            continue
        for one in rules:
            first = given.setdefault(one.rule.name, one)
            if first is not one:
                what = f"{first.place} is a rule '{one.rule.name}' too; name one of them anew"
                problems.append(Problem(source.name, one.source.lines_above + 1, 1, what))
    if problems:
        raise RulesError(problems)
    return given


def _rules_in(file: Source) -> list[_Given]:
    """Each of them is YAML, and text: a database stores text. Raises RulesError."""
    from ratelimit_rls.rules.load import load
    from ratelimit_rls.rules.stored_text import rules_of

    load(file)  # the first one; and whatever is wrong with all of the text
    try:
        text = file.content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise RulesError([Problem(file.name, 1, 1, "a stored rule is UTF-8; save the file as such")]) from None
    given: list[_Given] = []
    problems: list[Problem] = []
    for rule, part, line in rules_of(text, Path(file.name).stem, file.name):
        ranked = replace(file, rank=rule.priority, targeting=rule.targeting)
        given.append(_Given(replace(ranked, content=part.encode(), lines_above=line - 1), rule))
        try:
            load(given[-1].source)
        except RulesError as error:
            problems += error.problems
    if problems:
        raise RulesError(problems)
    return given


@dataclass(frozen=True, slots=True)
class _Plan:
    """What an import does."""

    new: list[StoredRule]
    changed: list[StoredRule]
    gone: list[StoredRule]
    same: int

    @classmethod
    def of(cls, given: Mapping[str, _Given], stored: Mapping[str, StoredRule], *, prune: bool) -> _Plan:
        wanted = [_over(one.rule, stored[name]) for name, one in sorted(given.items()) if name in stored]
        changed = [rule for rule in wanted if rule != stored[rule.name]]
        return cls(
            new=[one.rule for name, one in sorted(given.items()) if name not in stored],
            changed=changed,
            gone=[rule for name, rule in stored.items() if prune and name not in given],
            same=len(wanted) - len(changed),
        )

    async def carry_out(self, change: Change) -> None:
        for rule in self.gone:  # first: a name may be taken by one of those that come
            await change.delete_rule(rule.rule_id)
        for rule in self.changed:
            await change.put_rule(rule)
        for rule in self.new:
            await change.add_rule(rule)


def _over(rule: StoredRule, there: StoredRule) -> StoredRule:
    """`there`, as a file has it."""
    return replace(
        there,
        document=rule.document,
        priority=rule.priority,
        enabled=rule.enabled,
        targeting=rule.targeting,
    )


def _check(given: Mapping[str, _Given], kept: Iterable[StoredRule]) -> None:
    """Raises RulesError, the places of the files' problems being in the files: their first line is a comment to it."""
    from ratelimit_rls.rules.compile import compile_documents
    from ratelimit_rls.rules.sources.database import stored_sources

    for one in given.values():
        if not one.rule.enabled:  # so that switching it on holds no surprise
            compile_documents([one.source])
    compile_documents([*(one.source for one in given.values() if one.rule.enabled), *stored_sources(kept)])


def _differences(name: str, stored: StoredRule | None, given: _Given | None) -> Iterator[str]:
    from ratelimit_rls.rules.sources.database import PREFIX
    from ratelimit_rls.rules.stored_text import text_of

    return difflib.unified_diff(
        text_of(stored).split("\n") if stored else [],  # and no other breaks: they are part of the text
        text_of(given.rule).split("\n") if given else [],
        PREFIX + name if stored else "/dev/null",
        given.source.name if given else "/dev/null",
        lineterm="",
    )


def _who() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return "somebody"
