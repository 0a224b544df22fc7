"""Old records leave the database: whole months of them, archived, read back and found equal, and only then dropped.

Without an archive nothing is dropped. Whatever happens in between, doing it again goes on where it was:

    PostgreSQL  nobody writes to the month meanwhile, and it is dropped in the transaction that notes its archive
    SQLite      the archive is noted first, with the last row that is in it; then rows up to that one are deleted

Rows of a month that come after its archive are archived as another part.
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

from ratelimit_rls.errors import RecordsError, SettingsError
from ratelimit_rls.records.partitions import make_partitions, months, partition, partitions, strayed
from ratelimit_rls.records.series import DAY, HOUR, MINUTE, Month, archives, audit_logs, metrics, rollups_due

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from ratelimit_rls.records.archive import Place, Sealed
    from ratelimit_rls.records.database import Database
    from ratelimit_rls.settings import Settings

log = structlog.get_logger()

PATIENCE_S = 4 * 3600.0
"""For one month."""

_ROWS_AT_ONCE = 500
_ROWS_DELETED_AT_ONCE = 1000
_PAGES_GIVEN_BACK_AT_ONCE = 1000
_LOCK = 0x726C_735F_7265  # "rls_re"
_LOCK_WAIT = "2s"
_MOST_PARTS = 10_000

_rowid: ColumnElement[int] = literal_column("rowid", BigInteger)


class Kind(Enum):
    """What is kept for one time. The value is its name in the books."""

    AUDIT = "audit"
    MINUTES = "minutes"
    TOTALS = "totals"

    @property
    def table(self) -> Table:
        return audit_logs if self is Kind.AUDIT else metrics

    @property
    def file(self) -> str:
        return {Kind.AUDIT: "audit_logs", Kind.MINUTES: "usage_minutes", Kind.TOTALS: "usage_totals"}[self]

    def of_month(self, month: Month) -> ColumnElement[bool]:
        at = self.table.c.timestamp
        within = and_(at >= month.begins_s, at < month.ends_s)
        if self is Kind.AUDIT:
            return within
        is_minute = metrics.c.granularity == MINUTE
        return and_(within, is_minute if self is Kind.MINUTES else ~is_minute)

    def partition(self, month: Month) -> str:
        name = partition(self.table.name, month)
        return {Kind.AUDIT: name, Kind.MINUTES: f"{name}_minute", Kind.TOTALS: f"{name}_total"}[self]

    @property
    def must_be_rolled_up(self) -> tuple[str, ...]:
        """Marks that keep it: something is still to be made of it, or it is still to be made."""
        return {Kind.AUDIT: (), Kind.MINUTES: (HOUR,), Kind.TOTALS: (HOUR, DAY)}[self]


class Retained(NamedTuple):
    kind: str
    month: str
    rows: int
    path: str  # below RLS_ARCHIVE; "": there were no rows


@dataclass(frozen=True, slots=True)
class _Unit:
    kind: Kind
    month: Month

    def name(self, part: int) -> str:
        number = "" if part == 1 else f".{part}"
        return f"{self.month.year:04}/{self.month.number:02}/{self.kind.file}{number}.parquet"


async def retain(database: Database, settings: Settings, now_s: float, *, dry_run: bool = False) -> list[Retained]:
    """What was archived and dropped, or would be. RecordsError if an archive is not what was written."""
    if not settings.rls_archive:
        return []
    keep = {
        Kind.AUDIT: settings.rls_audit_retention,
        Kind.MINUTES: settings.rls_usage_retention,
        Kind.TOTALS: settings.rls_usage_total_retention,
    }
    place = await asyncio.to_thread(_place, settings.rls_archive)
    if not dry_run:
        await make_partitions(database, now_s)
    whose = _Postgres if database.dialect == "postgresql" else _Sqlite
    archivist = whose(database, place, now_s, dry_run=dry_run)
    done = []
    with archivist.alone() as is_alone:
        if not is_alone:
            return []
        for kind, time in keep.items():
            for month in await archivist.months(kind):
                unit = _Unit(kind, month)
                if month.ends_s > now_s - time.total_seconds():
                    break
                retained = await (archivist.planned(unit) if dry_run else archivist.retain(unit))
                if retained is not None:
                    log.info("archived", **retained._asdict(), dry_run=dry_run)
                    done.append(retained)
    return done


def _place(url: str) -> Place:
    try:
        from ratelimit_rls.records.archive import Place
    except ImportError as error:
        raise SettingsError(
            f"RLS_ARCHIVE needs {error.name}, which is not installed: pip install 'ratelimit-rls[archive]'"
        ) from error
    return Place(url)


class _Archivist:
    def __init__(self, database: Database, place: Place, now_s: float, *, dry_run: bool) -> None:
        self._database = database
        self._place = place
        self._now_s = now_s
        self._dry_run = dry_run
        self._planned: set[_Unit] = set()

    async def planned(self, unit: _Unit) -> Retained | None:
        """What `retain` would do, had it done so with those that were asked for before."""
        kind, month = unit.kind.value, str(unit.month)
        async with self._database.reading(PATIENCE_S) as connection:
            noted = await self._interrupted(connection, unit)
            if noted is not None:
                self._planned.add(unit)
                return Retained(kind, month, noted.row_count, noted.path)
            if await self._is_kept(connection, unit):
                return None
            self._planned.add(unit)
            rows = await connection.scalar(select(func.count()).select_from(unit.kind.table).where(*self._of(unit)))
            return Retained(kind, month, rows or 0, unit.name(await self._next_part(connection, unit)) if rows else "")

    async def _interrupted(self, connection: AsyncConnection, unit: _Unit) -> Row[Any] | None:
        """The archive of which not all rows are known to be dropped: who did so did not come to the end."""
        found = await connection.execute(select(archives).where(*_noted(unit), archives.c.is_dropped == 0))
        return found.first()

    async def _is_kept(self, connection: AsyncConnection, unit: _Unit) -> bool:
        """Something is still to be made of it; and hours outlive their minutes."""
        at = rollups_due.c.timestamp
        due = exists().where(
            rollups_due.c.granularity.in_(unit.kind.must_be_rolled_up),
            at >= unit.month.begins_s,
            at < unit.month.ends_s,
        )
        if await connection.scalar(select(due)):
            return True
        if unit.kind is not Kind.TOTALS or _Unit(Kind.MINUTES, unit.month) in self._planned:
            return False
        return bool(await connection.scalar(select(exists().where(Kind.MINUTES.of_month(unit.month)))))

    def _of(self, unit: _Unit) -> Sequence[ColumnElement[bool]]:
        return [unit.kind.of_month(unit.month)]

    async def _next_part(self, connection: AsyncConnection, unit: _Unit) -> int:
        """By the books; files that they do not know of may have the number, too."""
        return 1 + (await connection.scalar(select(func.max(archives.c.part)).where(*_noted(unit))) or 0)

    async def _archive(
        self, connection: AsyncConnection, unit: _Unit, source: Table, *where: ColumnElement[bool]
    ) -> tuple[int, Sealed]:
        """Written, read back, and found to be what was written; which part of its month it is."""
        place, table = self._place, unit.kind.table
        numbers = {unit.name(part): part for part in range(1, _MOST_PARTS)}
        first = await self._next_part(connection, unit)
        with contextlib.ExitStack() as stack:
            names = (name for name, part in numbers.items() if part >= first)
            writer = await asyncio.to_thread(stack.enter_context, place.writing(names, table))
            async for rows in _pages(connection, source, *where):
                await asyncio.to_thread(writer.add, rows)
            await asyncio.to_thread(stack.close)
        found = await asyncio.to_thread(place.read_back, writer.name, table)
        if found != writer.sealed:
            raise RecordsError(f"the archive {writer.name} is not what was written: nothing was dropped")
        return numbers[writer.name], found

    async def _note(
        self, connection: AsyncConnection, unit: _Unit, part: int, sealed: Sealed, *, last_rowid: int, is_dropped: bool
    ) -> None:
        row = {
            "kind": unit.kind.value,
            "month": str(unit.month),
            "part": part,
            "path": unit.name(part),
            **sealed._asdict(),
            "last_rowid": last_rowid,
            "is_dropped": int(is_dropped),
            "archived_at": self._now_s,
        }
        await connection.execute(archives.insert(), [row])


class _Postgres(_Archivist):
    @contextlib.contextmanager
    def alone(self) -> Iterator[bool]:
        """By a lock in the transaction of each month."""
        yield True

    async def months(self, kind: Kind) -> list[Month]:
        async with self._database.reading() as connection:
            found = await months(connection, kind.table.name)
            if kind is Kind.MINUTES:  # of those that still have them
                found = [month for month in found if await self._is_there(connection, _Unit(kind, month))]
            if self._dry_run:  # of these, partitions would have been made before
                found += await strayed(connection, kind.table.name)
            return sorted(found)

    async def _is_there(self, connection: AsyncConnection, unit: _Unit) -> bool:
        parent = partition(unit.kind.table.name, unit.month)
        return unit.kind.partition(unit.month) in await partitions(connection, parent)

    async def retain(self, unit: _Unit) -> Retained | None:
        name = unit.kind.partition(unit.month)
        source = unit.kind.table.to_metadata(MetaData(), name=name)
        async with self._database.begin(PATIENCE_S) as connection:
            if not await connection.scalar(text("SELECT pg_try_advisory_xact_lock(:lock)"), {"lock": _LOCK}):
                return None
            await connection.execute(text(f"SET LOCAL lock_timeout = '{_LOCK_WAIT}'"))
            # Others read on; nobody writes, so what is dropped is what was archived.
            await connection.execute(text(f"LOCK TABLE {name} IN SHARE MODE"))
            if await self._is_kept(connection, unit):
                return None
            rows, path = 0, ""
            if await connection.scalar(select(exists().select_from(source))):
                part, sealed = await self._archive(connection, unit, source)
                path = unit.name(part)
                rows = sealed.row_count
                await self._note(connection, unit, part, sealed, last_rowid=0, is_dropped=True)
            await self._drop(connection, unit)
        return Retained(unit.kind.value, str(unit.month), rows, path)

    async def _drop(self, connection: AsyncConnection, unit: _Unit) -> None:
        """A month's hours and days go with the month itself, from which its minutes went before."""
        parent, child = unit.kind.table.name, partition(unit.kind.table.name, unit.month)
        if unit.kind is Kind.MINUTES:
            parent, child = child, unit.kind.partition(unit.month)
        await connection.execute(text(f"ALTER TABLE {parent} DETACH PARTITION {child}"))
        await connection.execute(text(f"DROP TABLE {child}"))


class _Sqlite(_Archivist):
    @contextlib.contextmanager
    def alone(self) -> Iterator[bool]:
        """By a lock on a file beside the database: its own is for moments, and this may take minutes."""
        try:
            import fcntl
        except ImportError:  # where there is none, there are no workers either
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

    async def months(self, kind: Kind) -> list[Month]:
        found = []
        async with self._database.reading() as connection:
            first_s, last_s = (
                await connection.execute(select(func.min(kind.table.c.timestamp), func.max(kind.table.c.timestamp)))
            ).one()
            month = Month.of(first_s) if first_s is not None else Month.of(self._now_s)
            while first_s is not None and month.begins_s <= last_s:
                if await connection.scalar(select(exists().where(kind.of_month(month)))):
                    found.append(month)
                month = month.later()
        return found

    async def retain(self, unit: _Unit) -> Retained | None:
        async with self._database.reading(PATIENCE_S) as connection:
            noted = await self._interrupted(connection, unit)
            if noted is None:
                if await self._is_kept(connection, unit):
                    return None
                table = unit.kind.table
                last_rowid = await connection.scalar(select(func.max(_rowid)).select_from(table)) or 0
                part, sealed = await self._archive(connection, unit, table, *self._of(unit))
        if noted is None:
            async with self._database.begin() as connection:
                await self._note(connection, unit, part, sealed, last_rowid=last_rowid, is_dropped=False)
        else:  # somebody was interrupted
            part, last_rowid = noted.part, noted.last_rowid
            sealed = await asyncio.to_thread(self._place.read_back, noted.path, unit.kind.table)
            if (sealed.row_count, sealed.digest) != (noted.row_count, noted.digest):
                raise RecordsError(
                    f"the archive {noted.path} is not what was written when some of its rows were dropped: bring back "
                    "the file as it was"
                )
        await self._drop(unit, part, last_rowid)
        return Retained(unit.kind.value, str(unit.month), sealed.row_count, unit.name(part))

    async def _drop(self, unit: _Unit, part: int, last_rowid: int) -> None:
        """A few at a time, the oldest first, so that nobody who writes waits for long."""
        table = unit.kind.table
        some = select(_rowid).select_from(table).where(unit.kind.of_month(unit.month), _rowid <= last_rowid)
        some = some.order_by(_rowid).limit(_ROWS_DELETED_AT_ONCE)
        deleted = -1
        while deleted:
            async with self._database.begin() as connection:
                deleted = (await connection.execute(delete(table).where(_rowid.in_(some)))).rowcount
        async with self._database.begin() as connection:
            gone = archives.update().where(*_noted(unit), archives.c.part == part).values(is_dropped=1)
            await connection.execute(gone)
        await self._give_space_back()

    async def _give_space_back(self) -> None:
        left = -1
        while left:
            async with self._database.begin() as connection:
                statement = f"PRAGMA incremental_vacuum({_PAGES_GIVEN_BACK_AT_ONCE})"
                (await connection.execute(text(statement))).close()
                before, left = left, await connection.scalar(text("PRAGMA freelist_count")) or 0
            if left == before:  # a file that was made without the means to shrink: its pages are used again
                return


def _noted(unit: _Unit) -> Sequence[ColumnElement[bool]]:
    return [archives.c.kind == unit.kind.value, archives.c.month == str(unit.month)]


async def _pages(
    connection: AsyncConnection, table: Table, *where: ColumnElement[bool]
) -> AsyncIterator[Sequence[Sequence[Any]]]:
    """All rows, in the order of their keys: a few at a time, since making them ready holds up everything else."""
    keys = list(table.primary_key.columns)
    positions = [list(table.c).index(key) for key in keys]
    asked = select(table).where(*where).order_by(*keys).limit(_ROWS_AT_ONCE)
    page = (await connection.execute(asked)).all()
    while page:
        yield [tuple(row) for row in page]
        last = tuple_(*(page[-1][position] for position in positions), types=[key.type for key in keys])
        page = (await connection.execute(asked.where(last < tuple_(*keys)))).all()
