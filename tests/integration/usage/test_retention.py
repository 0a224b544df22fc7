"""Retention: old months are archived and dropped without loss, even if interrupted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sqlalchemy import ColumnElement, func, select, text

from ratelimit_rls.database.bulk_upsert import BulkInsert
from ratelimit_rls.database.database import Database
from ratelimit_rls.database.usage import archive
from ratelimit_rls.database.usage.archiver import ArchivedMonth, RecordKind
from ratelimit_rls.database.usage.partitions import create_partitions, partition_names
from ratelimit_rls.database.usage.postgres_archiver import PostgresArchiver
from ratelimit_rls.database.usage.retention import retain
from ratelimit_rls.database.usage.sqlite_archiver import SqliteArchiver
from ratelimit_rls.database.usage.tables import HOUR, Cell, Month, archives, audit_logs, metric_id, metrics
from ratelimit_rls.database.usage.writer import mark_due
from ratelimit_rls.errors import DatabaseError
from ratelimit_rls.settings import Settings

NOW = Month(2024, 12)
NOW_S = NOW.begins_s + 14 * 86_400
A_YEAR_AGO = Month(2023, 10)
FIRST = Month(2024, 7)

pytestmark = pytest.mark.slow


def settings_of(place: Path, **more: Any) -> Settings:
    return Settings(rls_archive=str(place), **more)


def months(first: Month = A_YEAR_AGO) -> Iterator[Month]:
    month = first
    while month <= NOW:
        yield month
        month = month.later()


def decision(at_s: float, log_id: int, **more: Any) -> dict[str, Any]:
    row = dict.fromkeys((column.name for column in audit_logs.c), None)
    return {
        **row,
        "timestamp": at_s,
        "log_id": log_id,
        "domain": "edge",
        "decision": "throttled",
        "server_id": "s",
        **more,
    }


def cell(at_s: float, granularity: str, number: int) -> dict[str, Any]:
    of = Cell("edge", "edge.user", f"u{number}", "/ä", "eu")
    sums = dict.fromkeys(
        (column.name for column in metrics.c if "requests" in column.name or "cache" in column.name), 1
    )
    known = {"timestamp": at_s, "metric_id": metric_id(granularity, at_s, of), "granularity": granularity}
    times = dict.fromkeys(("latency_p50_us", "latency_p95_us", "latency_p99_us"), None)
    return {**known, **of._asdict(), "server_id": "", **sums, **times, "histogram": "3:1", "created_at": at_s}


async def fill(database: Database, each: int = 8, first: Month = FIRST) -> dict[str, list[dict[str, Any]]]:
    """Insert rows of several months; return them by month."""
    draw = Random(3)
    made: dict[str, list[dict[str, Any]]] = {}
    async with database.begin(60) as connection:
        for month in months(first):
            at = [month.begins_s + draw.randrange(int(month.ends_s - month.begins_s)) for _ in range(each)]
            users = [draw.choice([None, "älice", "bob", ""]) for _ in at]
            rows = [
                decision(
                    at_s + draw.randrange(10**6) / 1e6,
                    draw.randrange(2**62),
                    user_id=user,
                    limit_value=draw.randrange(2**32),
                )
                for at_s, user in zip(at, users, strict=True)
            ]
            made[f"audit {month}"] = rows
            made[f"minutes {month}"] = [cell(at_s // 60 * 60, "minute", n) for n, at_s in enumerate(at[: each // 2])]
            made[f"totals {month}"] = [cell(at_s // 3600 * 3600, "hour", n) for n, at_s in enumerate(at[: each // 4])]
            made[f"totals {month}"] += [cell(month.begins_s, "day", n) for n in range(5)]
            await connection.execute(audit_logs.insert(), rows)
            await connection.execute(metrics.insert(), made[f"minutes {month}"] + made[f"totals {month}"])
    return made


async def stored(database: Database) -> dict[str, int]:
    """Return the number of rows by kind and month."""
    result = {}
    async with database.reading() as connection:
        for month in months():
            for kind in RecordKind:
                query = select(func.count()).select_from(kind.table).where(kind.in_month(month))
                if count := await connection.scalar(query):
                    result[f"{kind.value} {month}"] = count
    return result


def archived(place: Path, one: ArchivedMonth) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(place / one.path).to_pylist()
    for row in rows:
        for name in ("timestamp", "created_at"):
            if name in row:
                row[name] = row[name].timestamp()
        if "metric_id" in row:
            row["metric_id"] = UUID(row["metric_id"])
    return rows


def same(rows: list[dict[str, Any]], others: list[dict[str, Any]]) -> bool:
    def by_key(row: dict[str, Any]) -> str:
        return str(row.get("log_id") or (row["metric_id"], row["timestamp"]))

    def exact(row: dict[str, Any]) -> dict[str, Any]:
        return {name: round(value, 6) if isinstance(value, float) else value for name, value in row.items()}

    return list(map(exact, sorted(rows, key=by_key))) == list(map(exact, sorted(others, key=by_key)))


def old(made: dict[str, list[dict[str, Any]]]) -> set[str]:
    """Return the months that are entirely older than 90, 30 and 365 days."""
    last = {"audit": Month(2024, 8), "minutes": Month(2024, 10), "totals": Month(2023, 11)}
    return {name for name in made if name.partition(" ")[2] <= str(last[name.partition(" ")[0]])}


async def test_a_year_is_archived_verified_and_dropped(database: Database, tmp_path: Path) -> None:
    made = await fill(database, 100, A_YEAR_AGO)
    done = await retain(database, settings_of(tmp_path), NOW_S)
    assert {f"{one.kind} {one.month}" for one in done} == old(made)
    for one in done:
        assert same(archived(tmp_path, one), made[f"{one.kind} {one.month}"]), one
    assert done[0].path == "2023/10/audit_logs.parquet"
    assert await stored(database) == {name: len(rows) for name, rows in made.items() if name not in old(made)}
    assert await retain(database, settings_of(tmp_path), NOW_S) == []
    if database.dialect == "postgresql":
        async with database.reading() as connection:
            left = await partition_names(connection, audit_logs.name)
        assert left[0] == "rate_limit_audit_logs_2024_09"


async def test_nothing_is_dropped_without_an_archive(database: Database, tmp_path: Path) -> None:
    made = await fill(database)
    assert await retain(database, Settings(), NOW_S) == []
    planned = await retain(database, settings_of(tmp_path), NOW_S, dry_run=True)
    assert await stored(database) == {name: len(rows) for name, rows in made.items()}
    assert list(tmp_path.rglob("*.parquet")) == []
    assert {f"{one.kind} {one.month}": one.rows for one in planned} == {name: len(made[name]) for name in old(made)}


async def test_dry_run_reports_what_a_run_does(database: Database, tmp_path: Path) -> None:
    """PostgreSQL: for rows with a partition and rows in the default one; and for hours whose minutes are dropped,
    too."""
    await fill(database)
    await create_partitions(database, NOW_S)
    second, hours_alone = A_YEAR_AGO.later(), A_YEAR_AGO.later(2)
    async with database.begin() as connection:
        for month in (A_YEAR_AGO, second, hours_alone):
            at_s = month.begins_s + 3600
            await connection.execute(audit_logs.insert(), [decision(at_s, 1)])
            minutes = [] if month is hours_alone else [cell(at_s, "minute", 1)]
            await connection.execute(metrics.insert(), [*minutes, cell(at_s, "hour", 1)])
        await mark_due(connection, database.dialect, HOUR, [second.begins_s])  # a pending rollup keeps its usage
    planned = await retain(database, settings_of(tmp_path), NOW_S, dry_run=True)
    result = {f"{one.kind} {one.month}": one.rows for one in planned if one.month < str(FIRST)}
    usual = {"audit 2023-10": 1, "minutes 2023-10": 1, "totals 2023-10": 1, "audit 2023-11": 1, "audit 2023-12": 1}
    assert result == (usual if database.dialect == "sqlite" else {**usual, "minutes 2023-12": 0})
    assert await retain(database, settings_of(tmp_path), NOW_S) == planned


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def lose_a_row(path: Path) -> None:
    whole = pq.read_table(path)
    pq.write_table(whole.slice(1), path)


def change_a_value(path: Path) -> None:
    whole = pq.read_table(path)
    domains = pa.array(["edgy", *whole["domain"].to_pylist()[1:]])
    pq.write_table(whole.set_column(2, whole.schema.field("domain"), domains), path)


@pytest.mark.parametrize("damage", [cut_short, lose_a_row, change_a_value])
async def test_month_is_kept_if_its_archive_is_wrong(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None]
) -> None:
    made = await fill(database)
    with monkeypatch.context() as patched:  # a file system that loses data
        patched.setattr(archive.ArchiveStore, "_make_durable", lambda _, path: damage(Path(path)))
        with pytest.raises(DatabaseError, match=r"2024/07/audit_logs\.parquet"):
            await retain(database, settings_of(tmp_path), NOW_S)
    assert await stored(database) == {name: len(rows) for name, rows in made.items()}
    done = await retain(database, settings_of(tmp_path), NOW_S)
    assert {f"{one.kind} {one.month}" for one in done} == old(made)


@pytest.mark.parametrize("step", ["written", "noted", "dropping"])
async def test_interrupted_run_is_resumed_without_loss(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The process dies after a file was written, after it was recorded, and while its rows are being dropped."""
    made = await fill(database)
    archiver = SqliteArchiver if database.dialect == "sqlite" else PostgresArchiver
    name = {"written": "_record_archive", "noted": "_drop", "dropping": "_drop"}[step]
    original = getattr(archiver, name)

    async def dies(self: Any, *arguments: Any, **named: Any) -> None:
        if step == "dropping":
            if database.dialect == "sqlite":
                async with database.begin() as connection:  # some rows are already deleted
                    await connection.execute(text("DELETE FROM rate_limit_audit_logs WHERE rowid = 1"))
            else:
                await original(self, *arguments, **named)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(archiver, name, dies)
        with pytest.raises(KeyboardInterrupt):
            await retain(database, settings_of(tmp_path), NOW_S)
    planned = await retain(database, settings_of(tmp_path), NOW_S, dry_run=True)
    done = await retain(database, settings_of(tmp_path), NOW_S)
    assert done == planned
    assert {f"{one.kind} {one.month}" for one in done} == old(made)
    for one in done:
        assert same(archived(tmp_path, one), made[f"{one.kind} {one.month}"])
    assert await stored(database) == {name: len(rows) for name, rows in made.items() if name not in old(made)}
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.glob("2*/*/*")} == {one.path for one in done}


async def test_late_rows_are_archived_as_another_part(database: Database, tmp_path: Path) -> None:
    made = await fill(database)
    await retain(database, settings_of(tmp_path), NOW_S)
    late = decision(FIRST.begins_s + 5, 7)
    async with database.begin() as connection:
        await connection.execute(audit_logs.insert(), [late])
    (done,) = await retain(database, settings_of(tmp_path), NOW_S)
    assert done == ArchivedMonth("audit", "2024-07", 1, "2024/07/audit_logs.2.parquet")
    assert same(archived(tmp_path, done), [late])
    first = ArchivedMonth("audit", "2024-07", 8, "2024/07/audit_logs.parquet")
    assert same(archived(tmp_path, first), made["audit 2024-07"])
    async with database.reading() as connection:
        assert await connection.scalar(select(func.count()).where(archives.c.month == "2024-07")) == 3


async def test_archive_of_another_database_is_not_overwritten(database: Database, tmp_path: Path) -> None:
    """Also one of this database that was restored from before the archive was recorded."""
    await fill(database)
    other_file = tmp_path / "2024/07/audit_logs.parquet"
    other_file.parent.mkdir(parents=True)
    other_file.write_bytes(b"theirs")
    done = await retain(database, settings_of(tmp_path), NOW_S)
    assert ArchivedMonth("audit", "2024-07", 8, "2024/07/audit_logs.2.parquet") in done
    assert other_file.read_bytes() == b"theirs"


async def test_late_minutes_of_an_archived_month_are_retained_and_dropped(database: Database, tmp_path: Path) -> None:
    await fill(database)
    await retain(database, settings_of(tmp_path), NOW_S)
    late = cell(FIRST.begins_s + 60, "minute", 99)
    async with database.begin() as connection:
        await connection.execute(metrics.insert(), [late])
    (done,) = await retain(database, settings_of(tmp_path), NOW_S)
    assert done == ArchivedMonth("minutes", "2024-07", 1, "2024/07/usage_minutes.2.parquet")
    later = await retain(database, settings_of(tmp_path), NOW_S + 400 * 86_400)
    assert ("totals", "2024-07") in {(one.kind, one.month) for one in later}


async def test_damaged_archive_stops_dropping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite only: PostgreSQL drops a month in the transaction that records its archive."""
    database = Database(f"sqlite:///{tmp_path / 'records.db'}")
    await database.upgrade()
    await fill(database)

    async def dies(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(SqliteArchiver, "_drop", dies)
        with pytest.raises(KeyboardInterrupt):
            await retain(database, settings_of(tmp_path), NOW_S)
    file = tmp_path / "2024/07/audit_logs.parquet"
    file.write_bytes(file.read_bytes()[:-20])
    before = await stored(database)
    with pytest.raises(DatabaseError, match="audit_logs"):
        await retain(database, settings_of(tmp_path), NOW_S)
    assert await stored(database) == before
    await database.close()


async def test_row_added_while_its_month_is_dropped_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite only: PostgreSQL blocks it until the month is dropped."""
    database = Database(f"sqlite:///{tmp_path / 'records.db'}")
    await database.upgrade()
    await fill(database)
    late, drop = decision(FIRST.begins_s + 5, 7), SqliteArchiver._drop

    async def add_and_drop(self: SqliteArchiver, unit: Any, *arguments: Any) -> None:
        if (unit.kind, unit.month) == (RecordKind.AUDIT, FIRST):
            async with database.begin() as connection:
                await connection.execute(audit_logs.insert(), [late])
        await drop(self, unit, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(SqliteArchiver, "_drop", add_and_drop)
        await retain(database, settings_of(tmp_path), NOW_S)
    (done,) = await retain(database, settings_of(tmp_path), NOW_S)
    assert done == ArchivedMonth("audit", "2024-07", 1, "2024/07/audit_logs.2.parquet")
    assert same(archived(tmp_path, done), [late])
    await database.close()


async def test_minutes_stay_until_rolled_up(database: Database, tmp_path: Path) -> None:
    await fill(database)
    async with database.begin() as connection:
        await mark_due(connection, database.dialect, HOUR, [Month(2024, 9).begins_s])
    done = await retain(database, settings_of(tmp_path), NOW_S)
    assert "2024-09" not in {one.month for one in done if one.kind == "minutes"}
    assert "2024-10" in {one.month for one in done if one.kind == "minutes"}


async def test_sqlite_file_shrinks(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'records.db'}")
    await database.upgrade()
    await fill(database, 200)
    async with database.begin() as connection:
        before = await connection.scalar(text("PRAGMA page_count"))
    await retain(database, settings_of(tmp_path / "archive"), NOW_S)
    async with database.begin() as connection:
        after = await connection.scalar(text("PRAGMA page_count"))
        free = await connection.scalar(text("PRAGMA freelist_count"))
    await database.close()
    assert before
    assert after
    assert after < before * 0.8
    assert free == 0


async def test_unwritable_archive_error_contains_no_secrets(database: Database, tmp_path: Path) -> None:
    await fill(database)
    (tmp_path / "file").write_text("")
    with pytest.raises(DatabaseError, match=r"the archive 2024/07/audit_logs\.parquet cannot be used: "):
        await retain(database, settings_of(tmp_path / "file"), NOW_S)
    with pytest.raises(DatabaseError, match=r"^RLS_ARCHIVE cannot be used: ValueError$"):
        await retain(database, Settings(rls_archive="nowhere://user:secret@bucket"), NOW_S)


async def test_partitions_are_created_ahead_and_take_default_rows(database: Database) -> None:
    if database.dialect != "postgresql":
        assert await create_partitions(database, NOW_S) == []
        return
    made = await fill(database)
    async with database.reading() as connection:
        assert await partition_names(connection, metrics.name) == ["rate_limit_metrics_default"]
    names = await create_partitions(database, NOW_S)
    assert names[-1] == "rate_limit_metrics_2025_02"
    assert len(names) == 2 * (6 + 2)
    assert await create_partitions(database, NOW_S) == []
    assert await stored(database) == {name: len(rows) for name, rows in made.items()}
    async with database.begin() as connection:
        assert await connection.scalar(text("SELECT count(*) FROM rate_limit_audit_logs_default")) == 0
        assert await connection.scalar(text("SELECT count(*) FROM rate_limit_metrics_2024_07_minute")) == 4


async def test_queries_of_ninety_days_use_an_index(database: Database) -> None:
    rows = []
    for month in months(NOW.later(-4)):
        for number in range(1000):
            at_s = month.begins_s + number * (month.ends_s - month.begins_s) / 1000
            word = "blocked" if number % 500 == 3 else "allowed"
            rows.append(decision(at_s, number, user_id=f"u{number % 500}", decision=word))
    async with database.begin(60) as connection:
        await BulkInsert(audit_logs, replaces=False).write(connection, rows, dict)
    await create_partitions(database, NOW_S)
    for column, value in (("user_id", "u3"), ("decision", "blocked")):
        scans = await scanned(database, audit_logs.c[column] == value)
        assert scans
        if database.dialect == "sqlite":
            assert all(f"USING INDEX idx_audit_{column.removesuffix('_id')}" in line for line in scans), scans
        else:
            used = [line for line in scans if "default" not in line]  # the default partition is empty
            assert all("Index" in line or "Bitmap Heap" in line for line in used), scans
            assert any(f"{column}_timestamp_idx" in line for line in used), scans
            assert not any("2024_08" in line for line in scans)  # older than ninety days


async def scanned(database: Database, condition: ColumnElement[bool]) -> list[str]:
    """Return the query plan for a page of decisions."""
    at = audit_logs.c.timestamp
    query = (
        select(audit_logs)
        .where(condition, at >= NOW_S - 90 * 86_400, at < NOW_S)
        .order_by(at.desc(), audit_logs.c.log_id.desc())
        .limit(100)
    )
    how = "EXPLAIN" if database.dialect == "postgresql" else "EXPLAIN QUERY PLAN"
    async with database.begin() as connection:
        if database.dialect == "postgresql":  # SQLite plans without statistics unless ANALYZE is run
            await connection.execute(text("ANALYZE"))
        compiled = query.compile(dialect=connection.dialect, compile_kwargs={"literal_binds": True})
        plan = [str(row) for row in await connection.execute(text(f"{how} {compiled}"))]
    return [line for line in plan if "Scan" in line or "SCAN" in line or "SEARCH" in line]
