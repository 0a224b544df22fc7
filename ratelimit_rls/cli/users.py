"""`users`: bulk import, export and list users directly in the database; no server has to run."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ratelimit_rls.cli.credential_options import cli_actor, format_table, format_timestamp
from ratelimit_rls.cli.database_options import PAGE, database_option, with_repository
from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.cli.formatting import escape_unprintable, format_count, format_limit

if TYPE_CHECKING:
    from ratelimit_rls.cli.users_file import Form
    from ratelimit_rls.core.accounts import User
    from ratelimit_rls.database.repository import Reader, Repository

_IMPORT_EXAMPLES = """\b
Examples:
  # validate the file and show what would change
  $ ratelimit-rls users import --dry-run users.jsonl
  # tiers of all users, from another system
  $ billing-report | ratelimit-rls users import --format csv -"""

_EXPORT_EXAMPLES = """\b
Examples:
  # a backup before an import
  $ ratelimit-rls users export --output before.jsonl"""

_TRANSACTION_TIMEOUT_S = 600.0
"""Timeout of a transaction. An import may have 100,000 users or more, on a busy database."""

_MAX_SINGLE_LOOKUPS = 500
"""Maximum number of users that are looked up one by one; for more, reading all users is as fast."""


@click.group()
def users() -> None:
    """Import, export and list users, even hundreds of thousands.

    The changes are written to the database and take effect on all servers within seconds.
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
    "--format",
    "form",
    type=click.Choice(["jsonl", "csv"]),
    help="Format of all files.  [default: csv for .csv, else jsonl]",
)
@click.option("--dry-run", is_flag=True, help="Validate everything, print what would be changed, and change nothing.")
@database_option
def import_(files: tuple[Path, ...], form: Form | None, dry_run: bool, database: str) -> ExitCode:
    """Create users, or replace the tier, org and custom limits of existing ones.

    FILE contains JSON Lines, one object per user with user_id, tier, org and limits (as in rules: [{"unit": "minute",
    "requests_per_unit": 5}]); or CSV with the header user_id,tier,org. - is stdin. A line defines the whole user:
    fields that it omits are removed. Overrides, blocks, keys and usage are kept, and so are users that are in no file.

    Everything is validated first, and errors are reported with their lines; then all users are written in one
    transaction, or none. The audit log has one entry for the whole import: actor, time, and the numbers of created and
    replaced users. Unlike the entries of single changes it does not contain the previous values; export them before.
    """
    from ratelimit_rls.cli.users_file import read_users

    imported = read_users(files, form, with_repository(database, _tiers))
    if imported.mistakes.count:
        for line in imported.mistakes.lines():
            click.echo(line, err=True)
        click.echo(f"Error: {format_count(imported.mistakes.count, 'mistake')}; nothing was imported", err=True)
        return ExitCode.BAD

    async def work(repository: Repository) -> _Comparison:
        comparison = _Comparison(imported.users)
        # Compare before taking the write lock, which blocks other writers. Users that change meanwhile are in the
        # change feed and are compared again.
        async with repository.reading(_TRANSACTION_TIMEOUT_S) as reader:
            sequence = await reader.sequence()
            await comparison.refresh(reader)
        if dry_run:
            return comparison
        async with repository.change(cli_actor(), timeout_s=_TRANSACTION_TIMEOUT_S) as change:
            changed = await change.changed_since(sequence)
            if changed is None:
                await comparison.refresh(change)
            else:
                for user_id, user in changed.users.items():
                    comparison.compare(user_id, user)
            if changed_users := comparison.changed_users():  # without changes servers need not reload
                await change.put_users(changed_users)
        return comparison

    found = with_repository(database, work)
    would = "would be " if dry_run else ""
    created = format_count(len(imported.users) - len(found.same) - len(found.other), "user")
    click.echo(f"{created} {would}created, {len(found.other)} {would}changed, {len(found.same)} unchanged")
    if found.without_limits:
        lost = "would lose" if dry_run else "lost"
        number = format_count(len(found.without_limits), "user")
        click.echo(f"{number} {lost} custom limits: their lines have none", err=True)
    return ExitCode.DONE


@users.command(epilog=_EXPORT_EXAMPLES)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write to this file instead of stdout; it is replaced atomically.",
)
@database_option
def export(output: Path | None, database: str) -> ExitCode:
    """Export all users as JSON Lines for `users import`, from one consistent snapshot.

    The export contains what an import replaces: tier, org and custom limits. Overrides, blocks, keys and usage are not
    included.
    """

    async def work(repository: Repository) -> int:
        from ratelimit_rls.cli.users_file import atomic_output, format_user

        written, last = 0, ""
        with atomic_output(output) as stream:
            async with repository.reading(_TRANSACTION_TIMEOUT_S) as reader:
                while page := await reader.users(last, PAGE):
                    stream.write("".join(map(format_user, page)))
                    written, last = written + len(page), page[-1].user_id
        return written

    written = with_repository(database, work)
    if output is not None:
        click.echo(f"{format_count(written, 'user')} written to {escape_unprintable(str(output))}", err=True)
    return ExitCode.DONE


@users.command("list")
@click.option("--tier", metavar="NAME", help="Only users of this tier; '' for users without a tier.")
@click.option("--blocked", is_flag=True, help="Only users that are currently blocked.")
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=100,
    show_default=True,
    metavar="N",
    help="Maximum number of users to list.",
)
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", help="Output format.")
@database_option
def list_users(tier: str | None, blocked: bool, limit: int, form: str, database: str) -> ExitCode:
    """List users by id, with their tier, org, custom limits and state."""
    now_s = time.time()

    async def work(repository: Repository) -> list[User]:
        found: list[User] = []
        last = ""
        async with repository.reading(_TRANSACTION_TIMEOUT_S) as reader:
            # Read one more than is listed, to know whether there are more.
            while len(found) <= limit and (
                page := await reader.users(last, min(PAGE, limit + 1), tier=tier, blocked=blocked or None)
            ):
                found += [user for user in page if not blocked or _is_blocked(user, now_s)]
                last = page[-1].user_id
        return found[: limit + 1]

    found = with_repository(database, work)
    if form == "json":
        click.echo(json.dumps([_json(user) for user in found[:limit]], indent=2))
    else:
        rows = [
            (
                user.user_id,
                user.tier,
                user.org,
                " and ".join(map(format_limit, user.limits)),
                _format_state(user, now_s),
            )
            for user in found[:limit]
        ]
        for line in format_table(("USER", "TIER", "ORG", "LIMITS", "STATE"), rows):
            click.echo(line)
    if len(found) > limit:
        click.echo(f"there are more than {limit} users; raise --limit to list them", err=True)
    return ExitCode.DONE


class _Comparison:
    """Compares given users with those in the database. Of the latter only ids are kept."""

    def __init__(self, imported: Mapping[str, User]) -> None:
        self._imported = imported
        self.same: set[str] = set()
        self.other: set[str] = set()
        self.without_limits: set[str] = set()
        """Changed users that have custom limits in the database but not in the file."""

    def compare(self, user_id: str, stored: User | None) -> None:
        """Compare one user; None means that the user does not exist, or no longer."""
        imported = self._imported.get(user_id)
        if imported is None:
            return
        for group in (self.same, self.other, self.without_limits):
            group.discard(user_id)
        if stored is None:
            return
        is_same = (stored.tier, stored.org, stored.limits) == (imported.tier, imported.org, imported.limits)
        (self.same if is_same else self.other).add(user_id)
        if stored.limits and not imported.limits:
            self.without_limits.add(user_id)

    async def refresh(self, reader: Reader) -> None:
        for group in (self.same, self.other, self.without_limits):
            group.clear()
        if len(self._imported) <= _MAX_SINGLE_LOOKUPS:
            for user_id in self._imported:
                self.compare(user_id, await reader.find_user(user_id))
            return
        last = ""
        while page := await reader.users(last, PAGE):
            for user in page:
                self.compare(user.user_id, user)
            last = page[-1].user_id

    def changed_users(self) -> list[User]:
        return [user for user_id, user in self._imported.items() if user_id not in self.same]


async def _tiers(repository: Repository) -> set[str]:
    found: list[str] = []
    async with repository.reading() as reader:
        while page := await reader.tiers(found[-1] if found else "", PAGE):
            found += [tier.name for tier in page]
    return set(found)


def _is_blocked(user: User, now_s: float) -> bool:
    return user.block is not None and (user.block.until_s is None or user.block.until_s > now_s)


def _format_state(user: User, now_s: float) -> str:
    parts = []
    if user.block is not None and _is_blocked(user, now_s):
        parts.append(
            "blocked" if user.block.until_s is None else f"blocked until {format_timestamp(user.block.until_s)}"
        )
    if user.override is not None and user.override.until_s > now_s:
        parts.append(f"override until {format_timestamp(user.override.until_s)}")
    return ", ".join(parts)


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
