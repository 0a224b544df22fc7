"""Archives of PostgreSQL: a month is locked against writes, and dropped in the transaction that records its archive."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from sqlalchemy import MetaData, exists, select, text

from ratelimit_rls.database.usage.archiver import MONTH_TIMEOUT_S, ArchivedMonth, Archiver, ArchiveUnit, RecordKind
from ratelimit_rls.database.usage.partitions import (
    months_in_default,
    partition_name,
    partition_names,
    partitioned_months,
)

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from ratelimit_rls.database.usage.tables import Month

_LOCK = 0x726C_735F_7265  # "rls_re"
_LOCK_WAIT = "2s"


class PostgresArchiver(Archiver):
    """Drops a unit as a partition."""

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[bool]:
        """Each month takes an advisory lock in its own transaction instead."""
        yield True

    async def months(self, kind: RecordKind) -> list[Month]:
        async with self._database.reading() as connection:
            found = await partitioned_months(connection, kind.table.name)
            if kind is RecordKind.MINUTES:  # those that still have a minute partition
                found = [month for month in found if await self._is_there(connection, ArchiveUnit(kind, month))]
            if self._dry_run:  # a real run creates partitions for these first
                found += await months_in_default(connection, kind.table.name)
            return sorted(found)

    async def _is_there(self, connection: AsyncConnection, unit: ArchiveUnit) -> bool:
        parent = partition_name(unit.kind.table.name, unit.month)
        return unit.kind.partition(unit.month) in await partition_names(connection, parent)

    async def retain(self, unit: ArchiveUnit) -> ArchivedMonth | None:
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

    async def _drop(self, connection: AsyncConnection, unit: ArchiveUnit) -> None:
        """Drop the partition. Hours and days are dropped with the month itself; its minutes were dropped before."""
        parent, child = unit.kind.table.name, partition_name(unit.kind.table.name, unit.month)
        if unit.kind is RecordKind.MINUTES:
            parent, child = child, unit.kind.partition(unit.month)
        await connection.execute(text(f"ALTER TABLE {parent} DETACH PARTITION {child}"))
        await connection.execute(text(f"DROP TABLE {child}"))
