"""Archives of months: the records of one kind in one month are written, verified, and only then dropped."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from sqlalchemy import ColumnElement, Row, Table, and_, exists, func, select, tuple_

from ratelimit_rls.database.usage.partitions import partition_name
from ratelimit_rls.database.usage.tables import DAY, HOUR, MINUTE, Month, archives, audit_logs, metrics, rollups_due
from ratelimit_rls.errors import DatabaseError

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from ratelimit_rls.database.database import Database
    from ratelimit_rls.database.usage.archive import ArchiveStore, Checksum

MONTH_TIMEOUT_S = 4 * 3600.0
"""Timeout of archiving one month."""

_ROWS_PER_PAGE = 500
_MAX_PARTS = 10_000


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
class ArchiveUnit:
    """The records of one kind in one month."""

    kind: RecordKind
    month: Month

    def name(self, part: int) -> str:
        number = "" if part == 1 else f".{part}"
        return f"{self.month.year:04}/{self.month.number:02}/{self.kind.file}{number}.parquet"


class Archiver(ABC):
    """Archives and drops units; subclasses know how one database locks and drops them."""

    def __init__(self, database: Database, store: ArchiveStore, now_s: float, *, dry_run: bool) -> None:
        self._database = database
        self._store = store
        self._now_s = now_s
        self._dry_run = dry_run
        self._planned: set[ArchiveUnit] = set()

    @abstractmethod
    def exclusive(self) -> AbstractContextManager[bool]:
        """Return a context whose value is false if another process archives, so that this one does nothing."""

    @abstractmethod
    async def months(self, kind: RecordKind) -> list[Month]:
        """Return the months that have records of a kind, in order."""

    @abstractmethod
    async def retain(self, unit: ArchiveUnit) -> ArchivedMonth | None:
        """Archive, verify and drop a unit, or resume an interrupted run. None if the unit stays."""

    async def plan(self, unit: ArchiveUnit) -> ArchivedMonth | None:
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

    async def _interrupted(self, connection: AsyncConnection, unit: ArchiveUnit) -> Row[Any] | None:
        """Return the archive of an interrupted run: recorded, but not all of its rows are dropped."""
        found = await connection.execute(select(archives).where(*archives_of(unit), archives.c.is_dropped == 0))
        return found.first()

    async def _is_kept(self, connection: AsyncConnection, unit: ArchiveUnit) -> bool:
        """Return whether a unit must stay: a rollup is pending, or the minutes of its hours are still there."""
        at = rollups_due.c.timestamp
        due = exists().where(
            rollups_due.c.granularity.in_(unit.kind.must_be_rolled_up),
            at >= unit.month.begins_s,
            at < unit.month.ends_s,
        )
        if await connection.scalar(select(due)):
            return True
        if unit.kind is not RecordKind.TOTALS or ArchiveUnit(RecordKind.MINUTES, unit.month) in self._planned:
            return False
        return bool(await connection.scalar(select(exists().where(RecordKind.MINUTES.in_month(unit.month)))))

    def _filters(self, unit: ArchiveUnit) -> Sequence[ColumnElement[bool]]:
        return [unit.kind.in_month(unit.month)]

    async def _next_part(self, connection: AsyncConnection, unit: ArchiveUnit) -> int:
        """Return the next part number by the table of archives. Other files may have that number, too."""
        return 1 + (await connection.scalar(select(func.max(archives.c.part)).where(*archives_of(unit))) or 0)

    async def _archive(
        self, connection: AsyncConnection, unit: ArchiveUnit, source: Table, *where: ColumnElement[bool]
    ) -> tuple[int, Checksum]:
        """Write an archive, read it back and verify it. Return its part number and checksum."""
        store, table = self._store, unit.kind.table
        numbers = {unit.name(part): part for part in range(1, _MAX_PARTS)}
        first = await self._next_part(connection, unit)
        with contextlib.ExitStack() as stack:
            names = (name for name, part in numbers.items() if part >= first)
            writer = await asyncio.to_thread(stack.enter_context, store.writing(names, table))
            async for rows in _pages(connection, source, *where):
                await asyncio.to_thread(writer.add, rows)
            await asyncio.to_thread(stack.close)
        found = await asyncio.to_thread(store.read_back, writer.name, table)
        if found != writer.checksum:
            raise DatabaseError(f"the archive {writer.name} does not match what was written: nothing was dropped")
        return numbers[writer.name], found

    async def _record_archive(
        self,
        connection: AsyncConnection,
        unit: ArchiveUnit,
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


def archives_of(unit: ArchiveUnit) -> Sequence[ColumnElement[bool]]:
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
