"""`users`: bulk import, export and list users directly in the database; no server has to run."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ratelimit_rls.cli.credential_options import cli_actor, format_table, format_timestamp
from ratelimit_rls.cli.database_options import database_option, with_repository
from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.cli.formatting import escape_unprintable, format_count, format_limit

if TYPE_CHECKING:
    from ratelimit_rls.cli.users_file import Form
    from ratelimit_rls.database.repository import Repository
    from ratelimit_rls.identity.accounts import User

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


@click.group(short_help="Import, export and list users in bulk.")
def users() -> None:
    """Import, export and list users in bulk: an import may have hundreds of thousands of users.

    The changes are written to the database and take effect on all servers within a second, or within
    RLS_DATABASE_POLL (30s) if a notification is lost.
    """


@users.command("import", epilog=_IMPORT_EXAMPLES, short_help="Create or replace users from files.")
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
    from ratelimit_rls.admin.users import import_users, tier_names
    from ratelimit_rls.cli.users_file import read_users

    imported = read_users(files, form, with_repository(database, tier_names))
    if imported.mistakes.count:
        for line in imported.mistakes.lines():
            click.echo(line, err=True)
        click.echo(f"Error: {format_count(imported.mistakes.count, 'mistake')}; nothing was imported", err=True)
        return ExitCode.BAD

    found = with_repository(
        database, lambda repository: import_users(repository, cli_actor(), imported.users, dry_run=dry_run)
    )
    would = "would be " if dry_run else ""
    created = format_count(found.created, "user")
    click.echo(f"{created} {would}created, {len(found.other)} {would}changed, {len(found.same)} unchanged")
    if found.without_limits:
        lost = "would lose" if dry_run else "lost"
        number = format_count(len(found.without_limits), "user")
        click.echo(f"{number} {lost} custom limits: their lines have none", err=True)
    return ExitCode.DONE


@users.command(epilog=_EXPORT_EXAMPLES, short_help="Export all users as JSON Lines.")
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
        from ratelimit_rls.admin.users import export_users
        from ratelimit_rls.cli.users_file import atomic_output, format_user

        with atomic_output(output) as stream:

            def write(page: Sequence[User]) -> None:
                stream.write("".join(map(format_user, page)))

            return await export_users(repository, write)

    written = with_repository(database, work)
    if output is not None:
        click.echo(f"{format_count(written, 'user')} written to {escape_unprintable(str(output))}", err=True)
    return ExitCode.DONE


@users.command("list", short_help="List users by id.")
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
@click.option(
    "--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Output format."
)
@database_option
def list_users(tier: str | None, blocked: bool, limit: int, form: str, database: str) -> ExitCode:
    """List users by id, with their tier, org, custom limits and state."""
    from ratelimit_rls.admin import users as service

    now_s = time.time()
    # One more than is listed, to know whether there are more.
    found = with_repository(
        database, lambda repository: service.list_users(repository, limit + 1, now_s, tier=tier, blocked=blocked)
    )
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


def _format_state(user: User, now_s: float) -> str:
    from ratelimit_rls.admin.users import is_blocked

    parts = []
    if user.block is not None and is_blocked(user, now_s):
        parts.append(
            "blocked" if user.block.until_s is None else f"blocked until {format_timestamp(user.block.until_s)}"
        )
    if user.override is not None and user.override.until_s > now_s:
        parts.append(f"override until {format_timestamp(user.override.until_s)}")
    return ", ".join(parts)


def _json(user: User) -> dict[str, object]:
    from ratelimit_rls.identity.accounts import limit_fields

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
