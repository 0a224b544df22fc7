"""`db`: upgrade the database schema and print its status."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from ratelimit_rls.cli.database_options import database_option, with_database
from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.cli.retain import retain

if TYPE_CHECKING:
    from ratelimit_rls.database.database import Database

_UPGRADE_EXAMPLES = """\b
Examples:
  # before the first start, and before starting servers of a newer version
  $ RLS_DATABASE_URL=postgresql://rls:secret@db/rls ratelimit-rls db upgrade"""

_STATUS_EXAMPLES = """\b
Examples:
  # in a pipeline: upgrade only if the schema is not current
  $ ratelimit-rls db status || ratelimit-rls db upgrade"""


@click.group()
def db() -> None:
    """Manage the database schema and archive old records.

    The server upgrades a SQLite file by itself. It does not upgrade PostgreSQL, since other servers may be using it.
    """


@db.command(epilog=_UPGRADE_EXAMPLES, short_help="Upgrade the schema to this version's revision.")
@database_option
def upgrade(database: str) -> ExitCode:
    """Upgrade the schema to this version's revision, keeping all data.

    The upgrade is one transaction: it applies completely or not at all. Concurrent upgrades wait for each other.
    Servers of the previous version keep working during the upgrade.
    """

    async def work(opened: Database) -> None:
        before = await opened.revision()
        if _schema_state(before) == "newer":
            await opened.require_current()  # raises the error that says so
        await opened.upgrade()
        after = await opened.revision()
        was = "at" if before == after else f"{f'from {before}' if before else 'from an empty database'} to"
        click.echo(f"{opened.display_name}: {was} revision {after}")

    with_database(database, work, of_any_revision=True)
    return ExitCode.DONE


@db.command(epilog=_STATUS_EXAMPLES)
@database_option
@click.option(
    "--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Output format."
)
def status(database: str, form: str) -> ExitCode:
    """Print the revision of the schema. Exits with 1 unless it is the one this version needs."""

    async def work(opened: Database) -> tuple[str, str | None]:
        return opened.display_name, await opened.revision()

    name, revision = with_database(database, work, of_any_revision=True)
    state, needed = _schema_state(revision), _head_revision()
    if form == "json":
        fields = {"database": name, "revision": revision, "needed": needed, "state": state}
        click.echo(json.dumps(fields, indent=2))
    else:
        click.echo(f"{name}: {_format_status(state, revision, needed)}")
    return ExitCode.DONE if state == "current" else ExitCode.BAD


db.add_command(retain)


def _format_status(state: str, revision: str | None, needed: str) -> str:
    return {
        "current": f"at revision {revision}, which this version needs",
        "empty": f"empty; this version needs revision {needed}: run `ratelimit-rls db upgrade`",
        "behind": f"at revision {revision}; this version needs {needed}: run `ratelimit-rls db upgrade`",
        "newer": f"at revision {revision}, which is newer than this version's {needed}",
    }[state]


def _schema_state(revision: str | None) -> str:
    from ratelimit_rls.database import migrations

    if revision is None:
        return "empty"
    if revision == migrations.latest_revision():
        return "current"
    return "behind" if revision in migrations.revisions() else "newer"


def _head_revision() -> str:
    from ratelimit_rls.database import migrations

    return migrations.latest_revision()
