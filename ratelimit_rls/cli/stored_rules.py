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
from ratelimit_rls.errors import Problem, RulesError

if TYPE_CHECKING:
    from ratelimit_rls.core.accounts import StoredRule
    from ratelimit_rls.records.desk import Desk
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

_PATHS = click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))


@click.group()
def rules() -> None:
    """Move rules between files and the database.

    A file is one rule. What is not its document (name, priority, enabled, targeting) is in a comment on its first line;
    without one, the rule is called like the file.
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
        async with desk.change(Actor(f"{_who()}, rules import"), dry_run=dry_run) as change:
            stored = {rule.name: rule for rule in await every_rule(change)}
            _check(given, [] if prune else [rule for name, rule in stored.items() if name not in given])
            plan = _Plan.of(given, stored, prune=prune)
            for rule in plan.gone:  # first: a name may be taken by one of those that come
                await change.delete_rule(rule.rule_id)
            for rule in plan.changed:
                await change.put_rule(rule)
            for rule in plan.new:
                await change.add_rule(rule)
        return plan

    plan = at_desk(database, work)
    for word, group in (("create", plan.new), ("change", plan.changed), ("delete", plan.gone)):
        for rule in group:
            click.echo(printable(f"{word} {rule.name}"))
    touched = counted(len(plan.new) + len(plan.changed) + len(plan.gone), "rule")
    click.echo(f"{touched} {'would be' if dry_run else 'were'} changed, {plan.same} as in the files already")
    return ExitCode.DONE


@rules.command(epilog=_EXPORT_EXAMPLES)
@click.option(
    "--output", type=click.Path(file_okay=False, path_type=Path), metavar="DIRECTORY", help="A file there for each."
)
@database_option
def export(output: Path | None, database: str) -> ExitCode:
    """Write the rules of the database as files, or to stdout, one after the other."""
    from ratelimit_rls.rules.stored_text import file_name, text_of

    stored = at_desk(database, stored_rules)
    if output is None:
        click.echo("---\n".join(_ended(text_of(rule)) for rule in stored), nl=False)
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
    """A file, and the rule that it is."""

    source: Source
    rule: StoredRule


def _given(paths: tuple[Path, ...]) -> dict[str, _Given]:
    """By the name of the rule. Raises RulesError with everything that is wrong with the files themselves."""
    from ratelimit_rls.rules.load import load
    from ratelimit_rls.rules.stored_text import rule_of

    given: dict[str, _Given] = {}
    problems: list[Problem] = []
    for source in read(paths):
        try:
            load(source)  # it is YAML, and text: a database stores text
            rule = rule_of(source.content.decode("utf-8-sig"), Path(source.name).stem, source.name)
        except RulesError as error:
            problems += error.problems
            continue
        except UnicodeDecodeError:
            problems.append(Problem(source.name, 1, 1, "a stored rule is UTF-8; save the file as such"))
            continue
        if rule.name in given:
            first = given[rule.name].source.name
            problems.append(Problem(source.name, 1, 1, f"{first} is a rule '{rule.name}' too; name one of them anew"))
        given.setdefault(rule.name, _Given(replace(source, rank=rule.priority, targeting=rule.targeting), rule))
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


def _ended(text: str) -> str:
    return text if text.endswith("\n") else text + "\n"


def _who() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return "somebody"
