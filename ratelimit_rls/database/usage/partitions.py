"""Monthly PostgreSQL partitions of recorded decisions and usage, created in advance.

    rate_limit_audit_logs   ─► …_2024_01, …_2024_02, …, …_default
    rate_limit_metrics      ─► …_2024_01 ─► …_2024_01_minute, …_2024_01_total; …, …_default

Rows of a month without a partition (a wrong clock, no process to create it, or an archived month) go to the default
partition, and move when theirs is created. Within a month, usage by minute is separate from hours and days, because it
is dropped sooner.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import structlog
from sqlalchemy import text

from ratelimit_rls.database.usage.tables import Month, audit_logs, metrics

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from ratelimit_rls.database.database import Database

_log = structlog.get_logger()

MONTHS_AHEAD = 2
TIMEOUT_S = 60.0

_LOCK = 0x726C_735F_7061  # "rls_pa"
_LOCK_WAIT = "2s"
"""Timeout of the table lock while readers hold it. Writers queue behind this lock for as long."""

_NAME = re.compile(r"_(\d{4})_(\d{2})$")


async def create_partitions(database: Database, now_s: float) -> list[str]:
    """Create the partitions of this month, the next ones, and all months in the default partitions. Return their names.

    If several processes do so concurrently, one creates them and the others return at once.
    """
    if database.dialect != "postgresql":
        return []
    made = []
    async with database.begin(TIMEOUT_S) as connection:
        if not await connection.scalar(text("SELECT pg_try_advisory_xact_lock(:lock)"), {"lock": _LOCK}):
            return []
        await connection.execute(text(f"SET LOCAL lock_timeout = '{_LOCK_WAIT}'"))
        this = Month.of(now_s)
        ahead = {this.later(months) for months in range(MONTHS_AHEAD + 1)}
        for table in (audit_logs.name, metrics.name):
            for month in sorted(
                (ahead | await months_in_default(connection, table)) - set(await partitioned_months(connection, table))
            ):
                made.append(await _create_month(connection, table, month))
        for month in await partitioned_months(connection, metrics.name):
            made += await _create_minutes(connection, partition_name(metrics.name, month))
    if made:
        _log.info("partitions_created", tables=made)
    return made


async def partitioned_months(connection: AsyncConnection, table: str) -> list[Month]:
    """Return the months that have a partition."""
    found = (_NAME.search(name) for name in await partition_names(connection, table))
    return sorted(Month(int(name[1]), int(name[2])) for name in found if name)


async def partition_names(connection: AsyncConnection, table: str) -> list[str]:
    """Return the names of the partitions of a table, sorted."""
    rows = await connection.execute(
        text(
            "SELECT child.relname FROM pg_inherits JOIN pg_class child ON child.oid = inhrelid "
            "WHERE inhparent = to_regclass(:table) ORDER BY 1"
        ),
        {"table": table},
    )
    return [name for (name,) in rows]


def partition_name(table: str, month: Month) -> str:
    return f"{table}_{month.year:04}_{month.number:02}"


async def months_in_default(connection: AsyncConnection, table: str) -> set[Month]:
    """Return the months of which the default partition has rows."""
    rows = f"SELECT timestamp AT TIME ZONE 'UTC' AS at FROM {table}_default"  # noqa: S608 - our own name
    part = "CAST(extract({} FROM at) AS int)"
    query = f"SELECT DISTINCT {part.format('year')}, {part.format('month')} FROM ({rows}) AS strayed"  # noqa: S608
    return {Month(*row) for row in await connection.execute(text(query))}


async def _create_minutes(connection: AsyncConnection, month: str) -> list[str]:
    """Create the minute partition of a month again if late rows came after it was dropped.

    Such rows are in the partition of hours and days until then.
    """
    name, rest = f"{month}_minute", f"{month}_total"
    if name in await partition_names(connection, month):
        return []
    late = f"SELECT EXISTS (SELECT FROM {rest} WHERE granularity = 'minute')"  # noqa: S608 - our own names
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


async def _create_month(connection: AsyncConnection, table: str, month: Month) -> str:
    """Create a partition. It is attached last, so that rows of the default partition can move into it before."""
    name = partition_name(table, month)
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
