"""Minutes become hours, and hours days: per domain, rule, user, endpoint and region, over all processes.

Whoever writes minutes marks their hour as due in the same transaction; whoever rolls it up takes the mark away, unless
it was renewed meanwhile. A row is made anew from all that it is made of, so doing it again changes nothing, and minutes
that come late are no special case. Should an older sum replace a newer one, because two processes were at it, the mark
was renewed between the two readings, and stays.

What is summed up is read in one transaction and written in others, each of a moment: SQLite has one writer at a time.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from sqlalchemy import Row, and_, delete, exists, select, text

from ratelimit_rls.records.bulk import Bulk
from ratelimit_rls.records.decisions import mark_due, percentiles
from ratelimit_rls.records.series import (
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
from ratelimit_rls.telemetry.histogram import add, readable, to_text

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from ratelimit_rls.records.database import Database

MADE_OF = {HOUR: MINUTE, DAY: HOUR}

GRACE_S = 120.0
"""After its end an hour or a day is still written to."""

PATIENCE_S = 600.0

_LOCK = 0x726C_735F_726F  # "rls_ro"
_ROWS_AT_ONCE = 200

_USAGE = Bulk(metrics, replaces=True)
_CELL = [metrics.c[name] for name in Cell._fields]
_SUMS = (
    "total_requests",
    "allowed_requests",
    "throttled_requests",
    "blocked_requests",
    "cache_hits",
    "cache_misses",
)


async def roll_up(database: Database, now_s: float) -> int:
    """Every hour and day that is over and due; how many there were. None if another process is at it."""
    rolled = 0
    for granularity in (HOUR, DAY):
        for at_s in await _due(database, granularity, now_s):
            async with database.reading(PATIENCE_S) as connection:
                if not await _is_alone(connection, database.dialect):
                    return rolled
                rolled += await _roll(database, connection, granularity, at_s, now_s)
    return rolled


async def _due(database: Database, granularity: str, now_s: float) -> list[float]:
    over = rollups_due.c.timestamp <= now_s - SECONDS[granularity] - GRACE_S
    asked = select(rollups_due.c.timestamp).where(rollups_due.c.granularity == granularity, over)
    async with database.reading() as connection:
        return list(await connection.scalars(asked.order_by(rollups_due.c.timestamp)))


async def _is_alone(connection: AsyncConnection, dialect: str) -> bool:
    """Until the transaction ends; where all are on one machine, two at once are only work done twice."""
    if dialect == "sqlite":
        return True
    return bool(await connection.scalar(text("SELECT pg_try_advisory_xact_lock(:lock)"), {"lock": _LOCK}))


async def _roll(database: Database, connection: AsyncConnection, granularity: str, at_s: float, now_s: float) -> bool:
    mark = and_(rollups_due.c.granularity == granularity, rollups_due.c.timestamp == at_s)
    version = await connection.scalar(select(rollups_due.c.version).where(mark))
    if version is None:  # another process was first
        return False
    # What is archived cannot be read here any more: a sum of the rest would replace that of all.
    month = str(Month.of(at_s))
    is_complete = not await connection.scalar(
        select(exists().where(archives.c.kind.in_(_archived_with(granularity)), archives.c.month == month))
    )
    if is_complete:
        async for some in _sums(connection, granularity, at_s, now_s):
            async with database.begin() as writing:
                await _USAGE.write(writing, some, dict)
    async with database.begin() as writing:
        if is_complete and granularity == HOUR:
            await mark_due(writing, database.dialect, DAY, [at_s // SECONDS[DAY] * SECONDS[DAY]])
        # Whoever renewed the mark since, or is about to, wrote minutes that were not seen.
        await writing.execute(delete(rollups_due).where(mark, rollups_due.c.version == version))
    return is_complete


def _archived_with(granularity: str) -> list[str]:
    """The kinds of archives (retention.py) that have what it is made of, or itself."""
    return ["minutes", "totals"] if granularity == HOUR else ["totals"]


async def _sums(
    connection: AsyncConnection, granularity: str, at_s: float, now_s: float
) -> AsyncIterator[list[dict[str, Any]]]:
    """In the order of cells, one after the other: however many there are, few are in memory."""
    asked = (
        select(*_CELL, *(metrics.c[name] for name in _SUMS), metrics.c.histogram)
        .where(
            metrics.c.granularity == MADE_OF[granularity],
            metrics.c.timestamp >= at_s,
            metrics.c.timestamp < at_s + SECONDS[granularity],
        )
        .order_by(*_CELL)
        .execution_options(yield_per=_ROWS_AT_ONCE)
    )
    done: list[dict[str, Any]] = []
    last: _Sum | None = None
    async with connection.stream(asked) as rows:
        async for some in rows.partitions():
            for row in some:
                cell = Cell(*row[: len(_CELL)])
                if last is None or last.cell != cell:
                    done += [last.row(granularity, at_s, now_s)] if last else []
                    last = _Sum(cell)
                last.add(row)
            if len(done) >= _ROWS_AT_ONCE:
                yield done
                done = []
    done += [last.row(granularity, at_s, now_s)] if last else []
    if done:
        yield done


class _Sum:
    """Of the rows of one cell."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self._sums = dict.fromkeys(_SUMS, 0)
        self._latencies: dict[int, int] = {}

    def add(self, row: Row[*tuple[Any, ...]]) -> None:
        told = row._mapping
        for name in _SUMS:
            self._sums[name] += told[name]
        add(self._latencies, readable(told["histogram"]))

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
