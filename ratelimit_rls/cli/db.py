"""`db`: the schema of the database, brought up to date by hand, and how it stands."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from ratelimit_rls.cli.desk import database_option, with_records
from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.cli.retain import retain

if TYPE_CHECKING:
    from ratelimit_rls.records.database import Database

_UPGRADE_EXAMPLES = """\b
Examples:
  # before the first start, and before servers of a newer version
  $ RLS_DATABASE_URL=postgresql://rls:secret@db/rls ratelimit-rls db upgrade"""

_STATUS_EXAMPLES = """\b
Examples:
  # in a pipeline: does this version's schema wait to be applied?
  $ ratelimit-rls db status || ratelimit-rls db upgrade"""


@click.group()
def db() -> None:
    """Look after the database's schema.

    A SQLite file is brought up to date by the server itself; PostgreSQL is not, since others may be using it.
    """


@db.command(epilog=_UPGRADE_EXAMPLES)
@database_option
def upgrade(database: str) -> ExitCode:
    """Bring the schema to this version's, keeping all data.

    All of it in one transaction, or nothing. Two at once wait for each other. Servers of the version before go on
    working meanwhile.
    """

    async def work(records: Database) -> None:
        before = await records.revision()
        if _standing(before) == "newer":
            await records.require_current()  # says so
        await records.upgrade()
        after = await records.revision()
        was = "at" if before == after else f"{f'from {before}' if before else 'from nothing'} to"
        click.echo(f"{records.shown}: {was} revision {after}")

    with_records(database, work, of_any_revision=True)
    return ExitCode.DONE


@db.command(epilog=_STATUS_EXAMPLES)
@database_option
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text")
def status(database: str, form: str) -> ExitCode:
    """Tell where the schema stands. Exits with 1 unless it is this version's."""

    async def work(records: Database) -> tuple[str, str | None]:
        return records.shown, await records.revision()

    shown, revision = with_records(database, work, of_any_revision=True)
    standing, needed = _standing(revision), _newest()
    if form == "json":
        told = {"database": shown, "revision": revision, "needed": needed, "standing": standing}
        click.echo(json.dumps(told, indent=2))
    else:
        click.echo(f"{shown}: {_words(standing, revision, needed)}")
    return ExitCode.DONE if standing == "current" else ExitCode.BAD


db.add_command(retain)


def _words(standing: str, revision: str | None, needed: str) -> str:
    return {
        "current": f"at revision {revision}, which this version needs",
        "empty": f"empty; this version needs revision {needed}: run `ratelimit-rls db upgrade`",
        "behind": f"at revision {revision}; this version needs {needed}: run `ratelimit-rls db upgrade`",
        "newer": f"at revision {revision}, which is newer than this version's {needed}",
    }[standing]


def _standing(revision: str | None) -> str:
    from ratelimit_rls.records import migrations

    if revision is None:
        return "empty"
    if revision == migrations.newest():
        return "current"
    return "behind" if revision in migrations.known() else "newer"


def _newest() -> str:
    from ratelimit_rls.records import migrations

    return migrations.newest()
