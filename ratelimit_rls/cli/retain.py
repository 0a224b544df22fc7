"""`db retain`: move old decisions and usage from the database to the archive."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import click

from ratelimit_rls.cli.database_options import database_option, with_database
from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.cli.formatting import plural

if TYPE_CHECKING:
    from ratelimit_rls.database.database import Database
    from ratelimit_rls.database.usage.archiver import ArchivedMonth

_EXAMPLES = """\b
Examples:
  # show what would be archived, and where
  $ ratelimit-rls db retain --archive s3://bucket/records --dry-run"""


@click.command(epilog=_EXAMPLES, short_help="Archive and delete records past their retention.")
@database_option
@click.option(
    "--archive",
    metavar="URL",
    default="",
    envvar="RLS_ARCHIVE",
    help="Archive: a directory or an fsspec URL. Required. [RLS_ARCHIVE]",
)
@click.option("--dry-run", is_flag=True, help="Print what would be archived, and change nothing.")
@click.option(
    "--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Output format."
)
def retain(database: str, archive: str, dry_run: bool, form: str) -> ExitCode:
    """Archive whole months of decisions and usage past their retention, and delete them from the database.

    Each month is written as Parquet, read back and compared before anything is deleted. The retention is set by the
    server's variables RLS_AUDIT_RETENTION, RLS_USAGE_RETENTION and RLS_USAGE_TOTAL_RETENTION. A server with RLS_ARCHIVE
    does the same in the background; use this command where it should not. An interrupted run can be repeated: it
    continues where it stopped.
    """
    if not archive:
        raise click.UsageError("no archive: set --archive or RLS_ARCHIVE; nothing is deleted without one")

    async def work(opened: Database) -> list[ArchivedMonth]:
        from ratelimit_rls.cli.serve import settings_from_flags
        from ratelimit_rls.database.usage.retention import retain as retain_records

        return await retain_records(opened, settings_from_flags({"rls_archive": archive}), time.time(), dry_run=dry_run)

    archived = with_database(database, work)
    if form == "json":
        click.echo(json.dumps([item._asdict() for item in archived], indent=2))
        return ExitCode.DONE
    verb = "would be archived" if dry_run else "archived and dropped"
    for item in archived:
        where = f" as {item.path}" if item.path else ""
        click.echo(f"{item.kind} of {item.month}: {item.rows:,} {plural(item.rows, 'row')} {verb}{where}")
    if not archived:
        click.echo("no whole month is past its retention")
    return ExitCode.DONE
