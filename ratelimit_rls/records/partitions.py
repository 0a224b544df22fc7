"""PostgreSQL's partitions of the time series: a month each, made before its first row comes.

    rate_limit_audit_logs   ─► …_2024_01, …_2024_02, …, …_default
    rate_limit_metrics      ─► …_2024_01 ─► …_2024_01_minute, …_2024_01_total; …, …_default

Rows of a month that has no partition (a clock was wrong, nobody was there to make it, or it has been archived) are in
the default one, and move out of it when theirs is made. Usage by the minute is apart from hours and days within its
month, since it is dropped sooner.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import structlog
from sqlalchemy import text

from ratelimit_rls.records.series import Month, audit_logs, metrics

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from ratelimit_rls.records.database import Database

log = structlog.get_logger()

MONTHS_AHEAD = 2
PATIENCE_S = 60.0

_LOCK = 0x726C_735F_7061  # "rls_pa"
_LOCK_WAIT = "2s"
"""For readers that are in the way: whoever wants to write waits behind us for as long."""

_NAME = re.compile(r"_(\d{4})_(\d{2})$")


async def make_partitions(database: Database, now_s: float) -> list[str]:
    """Of this month, the next ones, and all that the default partitions have rows of; the names of those made.

    Several processes may do so at once: one does, and the others leave it to that one.
    """
    if database.dialect != "postgresql":
        return []
    made = []
    async with database.begin(PATIENCE_S) as connection:
        if not await connection.scalar(text("SELECT pg_try_advisory_xact_lock(:lock)"), {"lock": _LOCK}):
            return []
        await connection.execute(text(f"SET LOCAL lock_timeout = '{_LOCK_WAIT}'"))
        this = Month.of(now_s)
        ahead = {this.later(months) for months in range(MONTHS_AHEAD + 1)}
        for table in (audit_logs.name, metrics.name):
            for month in sorted((ahead | await strayed(connection, table)) - set(await months(connection, table))):
                made.append(await _make(connection, table, month))
        for month in await months(connection, metrics.name):
            made += await _make_minutes(connection, partition(metrics.name, month))
    if made:
        log.info("partitions made", tables=made)
    return made


async def months(connection: AsyncConnection, table: str) -> list[Month]:
    """Those that have a partition."""
    found = (_NAME.search(name) for name in await partitions(connection, table))
    return sorted(Month(int(name[1]), int(name[2])) for name in found if name)


async def partitions(connection: AsyncConnection, table: str) -> list[str]:
    """The names of a table's own, in their order."""
    told = await connection.execute(
        text(
            "SELECT child.relname FROM pg_inherits JOIN pg_class child ON child.oid = inhrelid "
            "WHERE inhparent = to_regclass(:table) ORDER BY 1"
        ),
        {"table": table},
    )
    return [name for (name,) in told]


def partition(table: str, month: Month) -> str:
    return f"{table}_{month.year:04}_{month.number:02}"


async def strayed(connection: AsyncConnection, table: str) -> set[Month]:
    """Those that the default partition has rows of."""
    rows = f"SELECT timestamp AT TIME ZONE 'UTC' AS at FROM {table}_default"  # noqa: S608 - a name of ours
    part = "CAST(extract({} FROM at) AS int)"
    asked = f"SELECT DISTINCT {part.format('year')}, {part.format('month')} FROM ({rows}) AS strayed"  # noqa: S608
    return {Month(*row) for row in await connection.execute(text(asked))}


async def _make_minutes(connection: AsyncConnection, month: str) -> list[str]:
    """Of a month whose minutes are gone, and to which some have come late: they are among its hours and days."""
    name, rest = f"{month}_minute", f"{month}_total"
    if name in await partitions(connection, month):
        return []
    late = f"SELECT EXISTS (SELECT FROM {rest} WHERE granularity = 'minute')"  # noqa: S608 - names of ours
    if not await connection.scalar(text(late)):
        return []
    for statement in (
        f"LOCK TABLE {rest} IN ACCESS EXCLUSIVE MODE",
        f"CREATE TABLE {name} (LIKE {month} INCLUDING ALL)",
        f"WITH moved AS (DELETE FROM {rest} WHERE granularity = 'minute' RETURNING *) "  # noqa: S608
        f"INSERT INTO {name} SELECT * FROM moved",
        f"ALTER TABLE {month} ATTACH PARTITION {name} FOR VALUES IN ('minute')",
    ):
        await connection.execute(text(statement))
    return [name]


async def _make(connection: AsyncConnection, table: str, month: Month) -> str:
    """Beside the table first, so that rows of the default partition can move in before it is a part of it."""
    name = partition(table, month)
    begins, ends = f"'{month}-01 00:00:00+00'", f"'{month.later()}-01 00:00:00+00'"
    by = " PARTITION BY LIST (granularity)" if table == metrics.name else ""
    statements = [
        f"LOCK TABLE {table}_default IN ACCESS EXCLUSIVE MODE",
        f"CREATE TABLE {name} (LIKE {table} INCLUDING ALL){by}",
    ]
    if by:
        statements += [
            f"CREATE TABLE {name}_minute PARTITION OF {name} FOR VALUES IN ('minute')",
            f"CREATE TABLE {name}_total PARTITION OF {name} DEFAULT",
        ]
    statements += [
        f"WITH moved AS (DELETE FROM {table}_default WHERE timestamp >= {begins} AND timestamp < {ends} RETURNING *) "  # noqa: S608
        f"INSERT INTO {name} SELECT * FROM moved",
        f"ALTER TABLE {table} ATTACH PARTITION {name} FOR VALUES FROM ({begins}) TO ({ends})",
    ]
    for statement in statements:
        await connection.execute(text(statement))
    return name
