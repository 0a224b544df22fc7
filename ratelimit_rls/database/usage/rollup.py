"""Rollup of usage from minutes to hours and from hours to days, per domain, rule, user, endpoint and region.

Sums are over all processes. The writer of minutes marks their hour as due in the same transaction. The rollup removes
the mark unless it was renewed meanwhile. A row is always computed from all of its parts, so a repetition changes
nothing, and late minutes are no special case. If an older sum replaces a newer one because two processes rolled up
concurrently, the mark was renewed between their reads, and stays.

Sums are read in one transaction and written in others, each short: SQLite has one writer at a time.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from sqlalchemy import Row, and_, delete, exists, select, text

from ratelimit_rls.database.bulk_upsert import BulkInsert
from ratelimit_rls.database.usage.tables import (
    DAY,
    HOUR,
    MINUTE,
    SECONDS,
    Cell,
    Month,
    archives,
    metric_id,
    metrics,
    rollups_due,
)
from ratelimit_rls.database.usage.writer import mark_due, percentiles
from ratelimit_rls.telemetry.histogram import add, parse_or_empty, to_text

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from ratelimit_rls.database.database import Database

SOURCE_GRANULARITY = {HOUR: MINUTE, DAY: HOUR}

GRACE_S = 120.0
"""Time after its end during which an hour or a day is still written to."""

READ_TIMEOUT_S = 600.0

_LOCK = 0x726C_735F_726F  # "rls_ro"
_ROWS_PER_FETCH = 200

_USAGE = BulkInsert(metrics, replaces=True)
_CELL_COLUMNS = [metrics.c[name] for name in Cell._fields]
_SUMS = (
    "total_requests",
    "allowed_requests",
    "throttled_requests",
    "blocked_requests",
    "cache_hits",
    "cache_misses",
)


async def roll_up(database: Database, now_s: float) -> int:
    """Roll up every hour and day that is over and due. Return their number.

    Stops if another process is rolling up.
    """
    rolled = 0
    for granularity in (HOUR, DAY):
        for at_s in await _due(database, granularity, now_s):
            async with database.reading(READ_TIMEOUT_S) as connection:
                if not await _try_lock(connection, database.dialect):
                    return rolled
                rolled += await _roll(database, connection, granularity, at_s, now_s)
    return rolled


async def _due(database: Database, granularity: str, now_s: float) -> list[float]:
    over = rollups_due.c.timestamp <= now_s - SECONDS[granularity] - GRACE_S
    query = select(rollups_due.c.timestamp).where(rollups_due.c.granularity == granularity, over)
    async with database.reading() as connection:
        return list(await connection.scalars(query.order_by(rollups_due.c.timestamp)))


async def _try_lock(connection: AsyncConnection, dialect: str) -> bool:
    """Try to lock out other processes until the transaction ends.

    SQLite needs no lock: all processes are on one machine, and two at once only duplicate work.
    """
    if dialect == "sqlite":
        return True
    return bool(await connection.scalar(text("SELECT pg_try_advisory_xact_lock(:lock)"), {"lock": _LOCK}))


async def _roll(database: Database, connection: AsyncConnection, granularity: str, at_s: float, now_s: float) -> bool:
    mark = and_(rollups_due.c.granularity == granularity, rollups_due.c.timestamp == at_s)
    version = await connection.scalar(select(rollups_due.c.version).where(mark))
    if version is None:  # another process has done it
        return False
    # Archived rows are not in the database any more: a sum of the rest would replace the complete one.
    month = str(Month.of(at_s))
    is_complete = not await connection.scalar(
        select(exists().where(archives.c.kind.in_(_archive_kinds(granularity)), archives.c.month == month))
    )
    if is_complete:
        async with aclosing(_sums(connection, granularity, at_s, now_s)) as sums:
            async for some in sums:
                async with database.begin(background=True) as writing:
                    await _USAGE.write(writing, some, dict)
    async with database.begin(background=True) as writing:
        if is_complete and granularity == HOUR:
            await mark_due(writing, database.dialect, DAY, [at_s // SECONDS[DAY] * SECONDS[DAY]])
        # A renewed mark, or one about to be renewed, means minutes that were not read here.
        await writing.execute(delete(rollups_due).where(mark, rollups_due.c.version == version))
    return is_complete


def _archive_kinds(granularity: str) -> list[str]:
    """Return the kinds of archives (retention.py) that contain these rows, or the rows they are made from."""
    return ["minutes", "totals"] if granularity == HOUR else ["totals"]


async def _sums(
    connection: AsyncConnection, granularity: str, at_s: float, now_s: float
) -> AsyncGenerator[list[dict[str, Any]], None]:
    """Yield the sums in the order of cells. Few are in memory at a time, however many there are."""
    query = (
        select(*_CELL_COLUMNS, *(metrics.c[name] for name in _SUMS), metrics.c.histogram)
        .where(
            metrics.c.granularity == SOURCE_GRANULARITY[granularity],
            metrics.c.timestamp >= at_s,
            metrics.c.timestamp < at_s + SECONDS[granularity],
        )
        .order_by(*_CELL_COLUMNS)
        .execution_options(yield_per=_ROWS_PER_FETCH)
    )
    done: list[dict[str, Any]] = []
    last: _Sum | None = None
    async with connection.stream(query) as rows:
        async for some in rows.partitions():
            for row in some:
                cell = Cell(*row[: len(_CELL_COLUMNS)])
                if last is None or last.cell != cell:
                    done += [last.row(granularity, at_s, now_s)] if last else []
                    last = _Sum(cell)
                last.add(row)
            if len(done) >= _ROWS_PER_FETCH:
                yield done
                done = []
    done += [last.row(granularity, at_s, now_s)] if last else []
    if done:
        yield done


class _Sum:
    """Sum of the rows of one cell."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self._sums = dict.fromkeys(_SUMS, 0)
        self._latencies: dict[int, int] = {}

    def add(self, row: Row[*tuple[Any, ...]]) -> None:
        values = row._mapping
        for name in _SUMS:
            self._sums[name] += values[name]
        add(self._latencies, parse_or_empty(values["histogram"]))

    def row(self, granularity: str, at_s: float, now_s: float) -> dict[str, Any]:
        return {
            "timestamp": at_s,
            "metric_id": metric_id(granularity, at_s, self.cell),
            "granularity": granularity,
            **self.cell._asdict(),
            "server_id": "",
            **self._sums,
            **percentiles(self._latencies),
            "histogram": to_text(self._latencies),
            "created_at": now_s,
        }
