"""Retention of decisions and usage: old months are archived, verified, and only then dropped from the database.

Without an archive nothing is dropped. An interrupted run is resumed by the next one:

    PostgreSQL  the month is locked against writes, and dropped in the transaction that records its archive
    SQLite      the archive is recorded first, with the last row in it; then rows up to that one are deleted

Rows of a month that arrive after its archive are archived as another part.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import structlog
from sqlalchemy import (
    BigInteger,
    ColumnElement,
    MetaData,
    Row,
    Table,
    and_,
    delete,
    exists,
    func,
    literal_column,
    select,
    text,
    tuple_,
)

from ratelimit_rls.database.usage.partitions import (
    create_partitions,
    months_in_default,
    partition_name,
    partition_names,
    partitioned_months,
)
from ratelimit_rls.database.usage.tables import DAY, HOUR, MINUTE, Month, archives, audit_logs, metrics, rollups_due
from ratelimit_rls.errors import DatabaseError, SettingsError

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from ratelimit_rls.database.database import Database
    from ratelimit_rls.database.usage.archive import ArchiveStore, Checksum
    from ratelimit_rls.settings import Settings

_log = structlog.get_logger()

MONTH_TIMEOUT_S = 4 * 3600.0
"""Timeout of archiving one month."""

_ROWS_PER_PAGE = 500
_ROWS_PER_DELETE = 1000
_PAGES_PER_VACUUM = 1000
_LOCK = 0x726C_735F_7265  # "rls_re"
_LOCK_WAIT = "2s"
_MAX_PARTS = 10_000

_rowid: ColumnElement[int] = literal_column("rowid", BigInteger)


class RecordKind(Enum):
    """Records with the same retention time. The value is the kind in the table of archives."""

    AUDIT = "audit"
    MINUTES = "minutes"
    TOTALS = "totals"

    @property
    def table(self) -> Table:
        return audit_logs if self is RecordKind.AUDIT else metrics

    @property
    def file(self) -> str:
        return {RecordKind.AUDIT: "audit_logs", RecordKind.MINUTES: "usage_minutes", RecordKind.TOTALS: "usage_totals"}[
            self
        ]

    def in_month(self, month: Month) -> ColumnElement[bool]:
        at = self.table.c.timestamp
        within = and_(at >= month.begins_s, at < month.ends_s)
        if self is RecordKind.AUDIT:
            return within
        is_minute = metrics.c.granularity == MINUTE
        return and_(within, is_minute if self is RecordKind.MINUTES else ~is_minute)

    def partition(self, month: Month) -> str:
        name = partition_name(self.table.name, month)
        return {RecordKind.AUDIT: name, RecordKind.MINUTES: f"{name}_minute", RecordKind.TOTALS: f"{name}_total"}[self]

    @property
    def must_be_rolled_up(self) -> tuple[str, ...]:
        """Granularities whose pending rollups prevent dropping: they are made from these rows, or are these rows."""
        return {RecordKind.AUDIT: (), RecordKind.MINUTES: (HOUR,), RecordKind.TOTALS: (HOUR, DAY)}[self]


class ArchivedMonth(NamedTuple):
    """A month that was archived and dropped."""

    kind: str
    month: str
    rows: int
    path: str  # relative to RLS_ARCHIVE; "": there were no rows


@dataclass(frozen=True, slots=True)
class _Unit:
    """The records of one kind in one month."""

    kind: RecordKind
    month: Month

    def name(self, part: int) -> str:
        number = "" if part == 1 else f".{part}"
        return f"{self.month.year:04}/{self.month.number:02}/{self.kind.file}{number}.parquet"


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
    place = await asyncio.to_thread(_open_store, settings.rls_archive)
    if not dry_run:
        await create_partitions(database, now_s)
    archiver_type = _PostgresArchiver if database.dialect == "postgresql" else _SqliteArchiver
    archiver = archiver_type(database, place, now_s, dry_run=dry_run)
    done = []
    with archiver.exclusive() as is_alone:
        if not is_alone:
            return []
        for kind, time in keep.items():
            for month in await archiver.months(kind):
                unit = _Unit(kind, month)
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


class _Archiver:
    """Archives and drops units; subclasses differ by database."""

    def __init__(self, database: Database, store: ArchiveStore, now_s: float, *, dry_run: bool) -> None:
        self._database = database
        self._store = store
        self._now_s = now_s
        self._dry_run = dry_run
        self._planned: set[_Unit] = set()

    async def plan(self, unit: _Unit) -> ArchivedMonth | None:
        """Return what `retain` would do, assuming that it was done for the units planned before."""
        kind, month = unit.kind.value, str(unit.month)
        async with self._database.reading(MONTH_TIMEOUT_S) as connection:
            recorded = await self._interrupted(connection, unit)
            if recorded is not None:
                self._planned.add(unit)
                return ArchivedMonth(kind, month, recorded.row_count, recorded.path)
            if await self._is_kept(connection, unit):
                return None
            self._planned.add(unit)
            rows = await connection.scalar(
                select(func.count()).select_from(unit.kind.table).where(*self._filters(unit))
            )
            return ArchivedMonth(
                kind, month, rows or 0, unit.name(await self._next_part(connection, unit)) if rows else ""
            )

    async def _interrupted(self, connection: AsyncConnection, unit: _Unit) -> Row[Any] | None:
        """Return the archive of an interrupted run: recorded, but not all of its rows are dropped."""
        found = await connection.execute(select(archives).where(*_archives_of(unit), archives.c.is_dropped == 0))
        return found.first()

    async def _is_kept(self, connection: AsyncConnection, unit: _Unit) -> bool:
        """Return whether a unit must stay: a rollup is pending, or the minutes of its hours are still there."""
        at = rollups_due.c.timestamp
        due = exists().where(
            rollups_due.c.granularity.in_(unit.kind.must_be_rolled_up),
            at >= unit.month.begins_s,
            at < unit.month.ends_s,
        )
        if await connection.scalar(select(due)):
            return True
        if unit.kind is not RecordKind.TOTALS or _Unit(RecordKind.MINUTES, unit.month) in self._planned:
            return False
        return bool(await connection.scalar(select(exists().where(RecordKind.MINUTES.in_month(unit.month)))))

    def _filters(self, unit: _Unit) -> Sequence[ColumnElement[bool]]:
        return [unit.kind.in_month(unit.month)]

    async def _next_part(self, connection: AsyncConnection, unit: _Unit) -> int:
        """Return the next part number by the table of archives. Other files may have that number, too."""
        return 1 + (await connection.scalar(select(func.max(archives.c.part)).where(*_archives_of(unit))) or 0)

    async def _archive(
        self, connection: AsyncConnection, unit: _Unit, source: Table, *where: ColumnElement[bool]
    ) -> tuple[int, Checksum]:
        """Write an archive, read it back and verify it. Return its part number and checksum."""
        place, table = self._store, unit.kind.table
        numbers = {unit.name(part): part for part in range(1, _MAX_PARTS)}
        first = await self._next_part(connection, unit)
        with contextlib.ExitStack() as stack:
            names = (name for name, part in numbers.items() if part >= first)
            writer = await asyncio.to_thread(stack.enter_context, place.writing(names, table))
            async for rows in _pages(connection, source, *where):
                await asyncio.to_thread(writer.add, rows)
            await asyncio.to_thread(stack.close)
        found = await asyncio.to_thread(place.read_back, writer.name, table)
        if found != writer.checksum:
            raise DatabaseError(f"the archive {writer.name} does not match what was written: nothing was dropped")
        return numbers[writer.name], found

    async def _record_archive(
        self,
        connection: AsyncConnection,
        unit: _Unit,
        part: int,
        checksum: Checksum,
        *,
        last_rowid: int,
        is_dropped: bool,
    ) -> None:
        row = {
            "kind": unit.kind.value,
            "month": str(unit.month),
            "part": part,
            "path": unit.name(part),
            **checksum._asdict(),
            "last_rowid": last_rowid,
            "is_dropped": int(is_dropped),
            "archived_at": self._now_s,
        }
        await connection.execute(archives.insert(), [row])


class _PostgresArchiver(_Archiver):
    """Drops a unit as a partition."""

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[bool]:
        """Each month takes an advisory lock in its own transaction instead."""
        yield True

    async def months(self, kind: RecordKind) -> list[Month]:
        async with self._database.reading() as connection:
            found = await partitioned_months(connection, kind.table.name)
            if kind is RecordKind.MINUTES:  # those that still have a minute partition
                found = [month for month in found if await self._is_there(connection, _Unit(kind, month))]
            if self._dry_run:  # a real run creates partitions for these first
                found += await months_in_default(connection, kind.table.name)
            return sorted(found)

    async def _is_there(self, connection: AsyncConnection, unit: _Unit) -> bool:
        parent = partition_name(unit.kind.table.name, unit.month)
        return unit.kind.partition(unit.month) in await partition_names(connection, parent)

    async def retain(self, unit: _Unit) -> ArchivedMonth | None:
        name = unit.kind.partition(unit.month)
        source = unit.kind.table.to_metadata(MetaData(), name=name)
        async with self._database.begin(MONTH_TIMEOUT_S) as connection:
            if not await connection.scalar(text("SELECT pg_try_advisory_xact_lock(:lock)"), {"lock": _LOCK}):
                return None
            await connection.execute(text(f"SET LOCAL lock_timeout = '{_LOCK_WAIT}'"))
            # Blocks writers but not readers, so that what is dropped is what was archived.
            await connection.execute(text(f"LOCK TABLE {name} IN SHARE MODE"))
            if await self._is_kept(connection, unit):
                return None
            rows, path = 0, ""
            if await connection.scalar(select(exists().select_from(source))):
                part, sealed = await self._archive(connection, unit, source)
                path = unit.name(part)
                rows = sealed.row_count
                await self._record_archive(connection, unit, part, sealed, last_rowid=0, is_dropped=True)
            await self._drop(connection, unit)
        return ArchivedMonth(unit.kind.value, str(unit.month), rows, path)

    async def _drop(self, connection: AsyncConnection, unit: _Unit) -> None:
        """Drop the partition. Hours and days are dropped with the month itself; its minutes were dropped before."""
        parent, child = unit.kind.table.name, partition_name(unit.kind.table.name, unit.month)
        if unit.kind is RecordKind.MINUTES:
            parent, child = child, unit.kind.partition(unit.month)
        await connection.execute(text(f"ALTER TABLE {parent} DETACH PARTITION {child}"))
        await connection.execute(text(f"DROP TABLE {child}"))


class _SqliteArchiver(_Archiver):
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

    async def retain(self, unit: _Unit) -> ArchivedMonth | None:
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

    async def _drop(self, unit: _Unit, part: int, last_rowid: int) -> None:
        """Delete rows in small batches, oldest first, so that other writers do not wait for long."""
        table = unit.kind.table
        some = select(_rowid).select_from(table).where(unit.kind.in_month(unit.month), _rowid <= last_rowid)
        some = some.order_by(_rowid).limit(_ROWS_PER_DELETE)
        deleted = -1
        while deleted:
            async with self._database.begin(background=True) as connection:
                deleted = (await connection.execute(delete(table).where(_rowid.in_(some)))).rowcount
        async with self._database.begin(background=True) as connection:
            dropped = archives.update().where(*_archives_of(unit), archives.c.part == part).values(is_dropped=1)
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


def _archives_of(unit: _Unit) -> Sequence[ColumnElement[bool]]:
    return [archives.c.kind == unit.kind.value, archives.c.month == str(unit.month)]


async def _pages(
    connection: AsyncConnection, table: Table, *where: ColumnElement[bool]
) -> AsyncIterator[Sequence[Sequence[Any]]]:
    """Yield all rows in the order of their keys, a few at a time, because converting them blocks the event loop."""
    keys = list(table.primary_key.columns)
    positions = [list(table.c).index(key) for key in keys]
    query = select(table).where(*where).order_by(*keys).limit(_ROWS_PER_PAGE)
    page = (await connection.execute(query)).all()
    while page:
        yield [tuple(row) for row in page]
        last = tuple_(*(page[-1][position] for position in positions), types=[key.type for key in keys])
        page = (await connection.execute(query.where(last < tuple_(*keys)))).all()
