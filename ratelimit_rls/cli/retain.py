"""`db retain`: old records into the archive, and out of the database."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import click

from ratelimit_rls.cli.desk import database_option, with_records
from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.cli.words import plural

if TYPE_CHECKING:
    from ratelimit_rls.records.database import Database
    from ratelimit_rls.records.retention import Retained

_EXAMPLES = """\b
Examples:
  # what would go, and where to
  $ ratelimit-rls db retain --archive s3://bucket/records --dry-run"""


@click.command(epilog=_EXAMPLES)
@database_option
@click.option(
    "--archive",
    metavar="URL",
    default="",
    envvar="RLS_ARCHIVE",
    help="Directory or fsspec URL. Without one nothing is dropped. [RLS_ARCHIVE]",
)
@click.option("--dry-run", is_flag=True, help="Tell what would be done, and do nothing.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text")
def retain(database: str, archive: str, dry_run: bool, form: str) -> ExitCode:
    """Archive whole months of records that are past their time, and drop them from the database.

    Each is written as Parquet, read back and compared before anything is dropped. For how long they stay, the server's
    variables say: RLS_AUDIT_RETENTION, RLS_USAGE_RETENTION, RLS_USAGE_TOTAL_RETENTION. A server with RLS_ARCHIVE does
    the same by itself; this is for those that shall not. Interrupted, it goes on where it was.
    """
    if not archive:
        raise click.UsageError("no --archive and no RLS_ARCHIVE: nothing is dropped without one")

    async def work(records: Database) -> list[Retained]:
        from ratelimit_rls.cli.serve import settings_of
        from ratelimit_rls.records.retention import retain as retain_records

        return await retain_records(records, settings_of({"rls_archive": archive}), time.time(), dry_run=dry_run)

    done = with_records(database, work)
    if form == "json":
        click.echo(json.dumps([one._asdict() for one in done], indent=2))
        return ExitCode.DONE
    verb = "would be archived" if dry_run else "archived and dropped"
    for one in done:
        where = f" as {one.path}" if one.path else ""
        click.echo(f"{one.kind} of {one.month}: {one.rows:,} {plural(one.rows, 'row')} {verb}{where}")
    if not done:
        click.echo("no whole month is past its time")
    return ExitCode.DONE
