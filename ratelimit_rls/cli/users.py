"""`users`: many at once, between files and the database itself; no server need run."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ratelimit_rls.cli.credentials import here, moment_words, table
from ratelimit_rls.cli.desk import PAGE, at_desk, database_option
from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.cli.words import counted, limit_words, printable

if TYPE_CHECKING:
    from ratelimit_rls.cli.users_file import Form
    from ratelimit_rls.core.accounts import User
    from ratelimit_rls.records.desk import Desk, Reader

_IMPORT_EXAMPLES = """\b
Examples:
  # is all of it right, and what would it change?
  $ ratelimit-rls users import --dry-run users.jsonl
  # everybody's tier, as another system tells it
  $ billing-report | ratelimit-rls users import --format csv -"""

_EXPORT_EXAMPLES = """\b
Examples:
  # before an import, to have the way back
  $ ratelimit-rls users export --output before.jsonl"""

_PATIENCE_S = 600.0
"""For a hundred thousand users and more, on a database that has other things to do."""

_FEW = 500
"""Users that are looked up one by one; for more, reading all there are is as quick."""


@click.group()
def users() -> None:
    """Import, export and list users, by the hundred thousand.

    They are written to the database; servers know of it within seconds.
    """


@users.command("import", epilog=_IMPORT_EXAMPLES)
@click.argument(
    "files",
    nargs=-1,
    required=True,
    metavar="FILE…",
    type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path),
)
@click.option(
    "--format", "form", type=click.Choice(["jsonl", "csv"]), help="Of all files.  [default: csv for .csv, else jsonl]"
)
@click.option("--dry-run", is_flag=True, help="Check everything, tell what would be done, and do nothing.")
@database_option
def import_(files: tuple[Path, ...], form: Form | None, dry_run: bool, database: str) -> ExitCode:
    """Make users, or replace the tier, org and custom limits of those there are.

    FILE has JSON Lines, an object for each user with user_id, tier, org and limits (as in rules: [{"unit": "minute",
    "requests_per_unit": 5}]); or CSV with the header user_id,tier,org. - is stdin. A line is the whole user: what it
    leaves out, the user does not have afterwards. Overrides, blocks, keys and usage stay as they are, and so do users
    that are in no file.

    Everything is checked first, and mistakes are told with their lines; then all is written in one step, or nothing.
    The log of changes has one row for the whole import: who, when, how many were created and replaced. It does not have
    what they were before, as it has for single changes; an export does.
    """
    from ratelimit_rls.cli.users_file import read_users

    given = read_users(files, form, at_desk(database, _tiers))
    if given.mistakes.count:
        for line in given.mistakes.told():
            click.echo(line, err=True)
        click.echo(f"Error: {counted(given.mistakes.count, 'mistake')}; nothing was imported", err=True)
        return ExitCode.BAD

    async def work(desk: Desk) -> _Comparison:
        comparison = _Comparison(given.users)
        # The long part is done before anybody who changes something has to wait; what changed meanwhile is told by the
        # feed, and looked at again.
        async with desk.reading(_PATIENCE_S) as reader:
            sequence = await reader.sequence()
            await comparison.look(reader)
        if dry_run:
            return comparison
        async with desk.change(here(), patience_s=_PATIENCE_S) as change:
            changed = await change.changed_since(sequence)
            if changed is None:
                await comparison.look(change)
            else:
                for user_id, user in changed.users.items():
                    comparison.see(user_id, user)
            if wanted := comparison.wanted():  # nothing new: then servers need not read everything, either
                await change.put_users(wanted)
        return comparison

    found = at_desk(database, work)
    would = "would be " if dry_run else ""
    created = counted(len(given.users) - len(found.same) - len(found.other), "user")
    click.echo(f"{created} {would}created, {len(found.other)} {would}changed, {len(found.same)} unchanged")
    if found.stripped:
        lost = "would lose" if dry_run else "lost"
        number = counted(len(found.stripped), "user")
        click.echo(f"{number} {lost} custom limits: their lines give none", err=True)
    return ExitCode.DONE


@users.command(epilog=_EXPORT_EXAMPLES)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="In place of stdout; whole or not.",
)
@database_option
def export(output: Path | None, database: str) -> ExitCode:
    """Write all users as JSON Lines, as of one moment, for `users import`.

    That is what an import replaces: tier, org and custom limits. Overrides, blocks, keys and usage are not in it.
    """

    async def work(desk: Desk) -> int:
        from ratelimit_rls.cli.users_file import line_of, written_whole

        written, last = 0, ""
        with written_whole(output) as stream:
            async with desk.reading(_PATIENCE_S) as reader:
                while page := await reader.users(last, PAGE):
                    stream.write("".join(map(line_of, page)))
                    written, last = written + len(page), page[-1].user_id
        return written

    written = at_desk(database, work)
    if output is not None:
        click.echo(f"{counted(written, 'user')} written to {printable(str(output))}", err=True)
    return ExitCode.DONE


@users.command("list")
@click.option("--tier", metavar="NAME", help="Only those of this tier; '' for those that have none.")
@click.option("--blocked", is_flag=True, help="Only those that are blocked now.")
@click.option("--limit", type=click.IntRange(min=1), default=100, show_default=True, metavar="N", help="So many.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text")
@database_option
def list_users(tier: str | None, blocked: bool, limit: int, form: str, database: str) -> ExitCode:
    """List users by their id, with what they have of their own."""
    now_s = time.time()

    async def work(desk: Desk) -> list[User]:
        found: list[User] = []
        last = ""
        async with desk.reading(_PATIENCE_S) as reader:
            # One more than is shown, to know whether there are more.
            while len(found) <= limit and (
                page := await reader.users(last, min(PAGE, limit + 1), tier=tier, blocked=blocked or None)
            ):
                found += [user for user in page if not blocked or _is_blocked(user, now_s)]
                last = page[-1].user_id
        return found[: limit + 1]

    found = at_desk(database, work)
    if form == "json":
        click.echo(json.dumps([_json(user) for user in found[:limit]], indent=2))
    else:
        rows = [
            (user.user_id, user.tier, user.org, " and ".join(map(limit_words, user.limits)), _state_words(user, now_s))
            for user in found[:limit]
        ]
        for line in table(("USER", "TIER", "ORG", "LIMITS", "STATE"), rows):
            click.echo(line)
    if len(found) > limit:
        click.echo(f"there are more than {limit}; --limit shows them", err=True)
    return ExitCode.DONE


class _Comparison:
    """How users that are given stand to those there are. Of these, nothing is kept but which is which."""

    def __init__(self, given: Mapping[str, User]) -> None:
        self._given = given
        self.same: set[str] = set()
        self.other: set[str] = set()
        self.stripped: set[str] = set()
        """Of the others, those that have custom limits and are given without."""

    def see(self, user_id: str, there: User | None) -> None:
        """None: there is no such user (any more)."""
        given = self._given.get(user_id)
        if given is None:
            return
        for group in (self.same, self.other, self.stripped):
            group.discard(user_id)
        if there is None:
            return
        is_same = (there.tier, there.org, there.limits) == (given.tier, given.org, given.limits)
        (self.same if is_same else self.other).add(user_id)
        if there.limits and not given.limits:
            self.stripped.add(user_id)

    async def look(self, reader: Reader) -> None:
        for group in (self.same, self.other, self.stripped):
            group.clear()
        if len(self._given) <= _FEW:
            for user_id in self._given:
                self.see(user_id, await reader.find_user(user_id))
            return
        last = ""
        while page := await reader.users(last, PAGE):
            for user in page:
                self.see(user.user_id, user)
            last = page[-1].user_id

    def wanted(self) -> list[User]:
        return [user for user_id, user in self._given.items() if user_id not in self.same]


async def _tiers(desk: Desk) -> set[str]:
    found: list[str] = []
    async with desk.reading() as reader:
        while page := await reader.tiers(found[-1] if found else "", PAGE):
            found += [tier.name for tier in page]
    return set(found)


def _is_blocked(user: User, now_s: float) -> bool:
    return user.block is not None and (user.block.until_s is None or user.block.until_s > now_s)


def _state_words(user: User, now_s: float) -> str:
    words = []
    if user.block is not None and _is_blocked(user, now_s):
        words.append("blocked" if user.block.until_s is None else f"blocked until {moment_words(user.block.until_s)}")
    if user.override is not None and user.override.until_s > now_s:
        words.append(f"override until {moment_words(user.override.until_s)}")
    return ", ".join(words)


def _json(user: User) -> dict[str, object]:
    from ratelimit_rls.core.accounts import limit_fields

    block, override = user.block, user.override
    return {
        "user_id": user.user_id,
        "tier": user.tier,
        "org": user.org,
        "limits": [limit_fields(limit) for limit in user.limits],
        "override": override
        and {
            "limits": [limit_fields(limit) for limit in override.limits],
            "until_s": override.until_s,
            "reason": override.reason,
        },
        "block": block and {"until_s": block.until_s, "reason": block.reason},
        "version": user.version,
    }
