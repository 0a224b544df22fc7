"""Retention of decisions and usage: old months are archived, verified, and only then dropped from the database.

Without an archive nothing is dropped. An interrupted run is resumed by the next one. Rows of a month that arrive after
its archive are archived as another part.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from ratelimit_rls.database.usage.archiver import ArchivedMonth, ArchiveUnit, RecordKind
from ratelimit_rls.database.usage.partitions import create_partitions
from ratelimit_rls.database.usage.postgres_archiver import PostgresArchiver
from ratelimit_rls.database.usage.sqlite_archiver import SqliteArchiver
from ratelimit_rls.errors import SettingsError

if TYPE_CHECKING:
    from ratelimit_rls.database.database import Database
    from ratelimit_rls.database.usage.archive import ArchiveStore
    from ratelimit_rls.settings import Settings

_log = structlog.get_logger()


async def retain(database: Database, settings: Settings, now_s: float, *, dry_run: bool = False) -> list[ArchivedMonth]:
    """Archive and drop old months. Return them, or with `dry_run` those that would be.

    Raises DatabaseError if an archive does not match what was written.
    """
    if not settings.rls_archive:
        return []
    keep = {
        RecordKind.AUDIT: settings.rls_audit_retention,
        RecordKind.MINUTES: settings.rls_usage_retention,
        RecordKind.TOTALS: settings.rls_usage_total_retention,
    }
    store = await asyncio.to_thread(_open_store, settings.rls_archive)
    if not dry_run:
        await create_partitions(database, now_s)
    archiver_type = PostgresArchiver if database.dialect == "postgresql" else SqliteArchiver
    archiver = archiver_type(database, store, now_s, dry_run=dry_run)
    done = []
    with archiver.exclusive() as is_alone:
        if not is_alone:
            return []
        for kind, time in keep.items():
            for month in await archiver.months(kind):
                unit = ArchiveUnit(kind, month)
                if month.ends_s > now_s - time.total_seconds():
                    break
                retained = await (archiver.plan(unit) if dry_run else archiver.retain(unit))
                if retained is not None:
                    _log.info("month_archived", **retained._asdict(), dry_run=dry_run)
                    done.append(retained)
    return done


def _open_store(url: str) -> ArchiveStore:
    try:
        from ratelimit_rls.database.usage.archive import ArchiveStore
    except ImportError as error:
        raise SettingsError(
            f"RLS_ARCHIVE needs {error.name}, which is not installed: pip install 'ratelimit-rls[archive]'"
        ) from error
    return ArchiveStore(url)
