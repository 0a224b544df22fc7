"""Archives of SQLite: an archive is recorded first, with the last row in it; then rows up to that one are deleted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from sqlalchemy import BigInteger, ColumnElement, delete, exists, func, literal_column, select, text

from ratelimit_rls.database.usage.archiver import (
    MONTH_TIMEOUT_S,
    ArchivedMonth,
    Archiver,
    ArchiveUnit,
    RecordKind,
    archives_of,
)
from ratelimit_rls.database.usage.tables import Month, archives
from ratelimit_rls.errors import DatabaseError

_ROWS_PER_DELETE = 1000
_PAGES_PER_VACUUM = 1000

_rowid: ColumnElement[int] = literal_column("rowid", BigInteger)


class SqliteArchiver(Archiver):
    """Drops a unit row by row."""

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[bool]:
        """Lock a file beside the database: SQLite's own lock is for short times, and this may take minutes."""
        try:
            import fcntl
        except ImportError:  # a platform without fcntl has no workers either
            yield True
            return
        path = self._database.path
        with path.with_name(f"{path.name}.retain").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                yield False
                return
            yield True

    async def months(self, kind: RecordKind) -> list[Month]:
        found = []
        async with self._database.reading() as connection:
            first_s, last_s = (
                await connection.execute(select(func.min(kind.table.c.timestamp), func.max(kind.table.c.timestamp)))
            ).one()
            month = Month.of(first_s) if first_s is not None else Month.of(self._now_s)
            while first_s is not None and month.begins_s <= last_s:
                if await connection.scalar(select(exists().where(kind.in_month(month)))):
                    found.append(month)
                month = month.later()
        return found

    async def retain(self, unit: ArchiveUnit) -> ArchivedMonth | None:
        async with self._database.reading(MONTH_TIMEOUT_S) as connection:
            recorded = await self._interrupted(connection, unit)
            if recorded is None:
                if await self._is_kept(connection, unit):
                    return None
                table = unit.kind.table
                last_rowid = await connection.scalar(select(func.max(_rowid)).select_from(table)) or 0
                part, sealed = await self._archive(connection, unit, table, *self._filters(unit))
        if recorded is None:
            async with self._database.begin(background=True) as connection:
                await self._record_archive(connection, unit, part, sealed, last_rowid=last_rowid, is_dropped=False)
        else:  # resume an interrupted run
            part, last_rowid = recorded.part, recorded.last_rowid
            sealed = await asyncio.to_thread(self._store.read_back, recorded.path, unit.kind.table)
            if (sealed.row_count, sealed.digest) != (recorded.row_count, recorded.digest):
                raise DatabaseError(
                    f"the archive {recorded.path} was modified after some of its rows were dropped: restore the "
                    "original file"
                )
        await self._drop(unit, part, last_rowid)
        return ArchivedMonth(unit.kind.value, str(unit.month), sealed.row_count, unit.name(part))

    async def _drop(self, unit: ArchiveUnit, part: int, last_rowid: int) -> None:
        """Delete rows in small batches, oldest first, so that other writers do not wait for long."""
        table = unit.kind.table
        some = select(_rowid).select_from(table).where(unit.kind.in_month(unit.month), _rowid <= last_rowid)
        some = some.order_by(_rowid).limit(_ROWS_PER_DELETE)
        deleted = -1
        while deleted:
            async with self._database.begin(background=True) as connection:
                deleted = (await connection.execute(delete(table).where(_rowid.in_(some)))).rowcount
        async with self._database.begin(background=True) as connection:
            dropped = archives.update().where(*archives_of(unit), archives.c.part == part).values(is_dropped=1)
            await connection.execute(dropped)
        await self._shrink_file()

    async def _shrink_file(self) -> None:
        left = -1
        while left:
            async with self._database.begin(background=True) as connection:
                statement = f"PRAGMA incremental_vacuum({_PAGES_PER_VACUUM})"
                (await connection.execute(text(statement))).close()
                before, left = left, await connection.scalar(text("PRAGMA freelist_count")) or 0
            if left == before:  # a file created without auto_vacuum cannot shrink: its pages are reused
                return
