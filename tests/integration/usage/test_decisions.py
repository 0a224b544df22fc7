"""The usage writer: each decision and each request is stored exactly once, whatever fails."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from sqlalchemy import delete, func, select, text
from sqlalchemy.exc import IntegrityError
from structlog.testing import capture_logs

from ratelimit_rls.database.database import Database
from ratelimit_rls.database.usage.queries import decisions, heaviest
from ratelimit_rls.database.usage.tables import audit_logs, metrics, rollups_due
from ratelimit_rls.database.usage.writer import UsageWriter, UserActivity
from ratelimit_rls.errors import DatabaseError, DatabaseUnavailable
from ratelimit_rls.telemetry.decision_records import DecisionRecord, RecordedCaller
from ratelimit_rls.telemetry.usage_counts import OTHER, DecisionOutcome
from ratelimit_rls.telemetry.usage_recorder import UsageRecorder
from tests.integration.usage.calls import call
from tests.integration.usage.conftest import Clock
from tests.support.databases import PostgresServer
from tests.support.ports import free_port


def new_ledger(clock: Clock, sample: float = 0.0, max_waiting: int = 1000, max_lines: int = 100) -> UsageRecorder:
    return UsageRecorder(sample=sample, max_waiting=max_waiting, max_lines=max_lines, clock=clock)


def new_usage_writer(database: Database, recorder: UsageRecorder, clock: Clock, **options: Any) -> UsageWriter:
    return UsageWriter(database, recorder, server_id="here", region="eu", clock=clock, **options)


async def stored(database: Database) -> int:
    async with database.reading() as connection:
        return await connection.scalar(select(func.count()).select_from(audit_logs)) or 0


async def counted(database: Database) -> tuple[int, int]:
    """Return the number of all requests, and of denied ones."""
    async with database.reading() as connection:
        sums = select(func.sum(metrics.c.total_requests), func.sum(metrics.c.throttled_requests))
        total, throttled = (await connection.execute(sums)).one()
        return int(total or 0), int(throttled or 0)


async def test_denials_are_stored_with_all_their_fields(database: Database, clock: Clock) -> None:
    recorder = new_ledger(clock)
    call(recorder, "alice", passed=3, denied=1, elapsed_s=0.0005, path="/a?secret=1")
    usage_writer = new_usage_writer(database, recorder, clock)
    await usage_writer.work()
    (one,) = await decisions(database, clock.now_s - 1, clock.now_s + 1)
    assert (one.at_s, one.domain, one.user, one.endpoint, one.rule) == (clock.now_s, "edge", "alice", "/a", "edge.user")
    assert (one.decision, one.current, one.limit, one.status, one.retry_after_s) == ("throttled", 11, 10, 429, 5)
    assert (one.latency_us, one.region, one.reason, one.api_key) == (500, "eu", "", "")
    assert one.server_id.startswith("here-")
    assert usage_writer.written == 1


async def test_batch_written_twice_is_stored_once(database: Database, clock: Clock) -> None:
    recorder = new_ledger(clock)
    call(recorder, "alice", denied=5)
    usage_writer = new_usage_writer(database, recorder, clock)
    taken = recorder.take_decisions(10)
    recorder.put_back(taken)
    await usage_writer.flush()
    recorder.put_back(taken)  # as if the outcome of the transaction were unknown
    await usage_writer.flush()
    assert await stored(database) == 5


async def test_rewriting_a_minute_keeps_its_total(database: Database, clock: Clock) -> None:
    recorder = new_ledger(clock)
    usage_writer = new_usage_writer(database, recorder, clock)
    for _ in range(3):
        call(recorder, "alice", passed=2, denied=1)
        clock.now_s += 11
        await usage_writer.work()
    assert await counted(database) == (9, 3)
    clock.now_s += 60
    call(recorder, "alice", passed=1)
    await usage_writer.flush()
    await usage_writer.flush()
    assert await counted(database) == (10, 3)
    async with database.reading() as connection:
        assert await connection.scalar(select(func.count()).select_from(metrics)) == 2


async def test_minute_that_ends_between_take_and_write_is_complete(database: Database, clock: Clock) -> None:
    recorder = new_ledger(clock)
    usage_writer = new_usage_writer(database, recorder, clock)
    call(recorder, "alice", passed=2)
    await usage_writer._take_usage()
    call(recorder, "alice", passed=1)
    clock.now_s += 60
    call(recorder, "alice", passed=1)
    await usage_writer._write_usage()
    await usage_writer.flush()
    assert await counted(database) == (4, 0)


async def test_process_with_the_same_name_overwrites_nothing(database: Database, clock: Clock) -> None:
    for _ in range(2):  # restarted within the minute
        recorder = new_ledger(clock)
        call(recorder, "alice", passed=4)
        await new_usage_writer(database, recorder, clock).flush()
    assert await counted(database) == (8, 0)


async def test_one_rejected_row_does_not_lose_others(database: Database, clock: Clock) -> None:
    recorder = new_ledger(clock)
    call(recorder, "alice", denied=7)
    missing: str = None  # type: ignore[assignment]
    recorder.put_back([DecisionRecord(clock.now_s, 1, RecordedCaller(missing), "", DecisionOutcome.BLOCKED)])
    usage_writer = new_usage_writer(database, recorder, clock)
    await usage_writer.flush()
    assert (await stored(database), usage_writer.written, usage_writer.rejected) == (7, 7, 1)


async def test_nothing_is_lost_while_tables_are_missing(database: Database, clock: Clock) -> None:
    async with database.begin() as connection:
        await connection.execute(text("ALTER TABLE rate_limit_audit_logs RENAME TO elsewhere"))
    recorder = new_ledger(clock)
    call(recorder, "alice", denied=3)
    usage_writer = new_usage_writer(database, recorder, clock)
    with pytest.raises(Exception, match="rejected the statement"):
        await usage_writer.work()
    async with database.begin() as connection:
        await connection.execute(text("ALTER TABLE elsewhere RENAME TO rate_limit_audit_logs"))
    await usage_writer.work()
    assert await stored(database) == 3


async def test_overflow_is_counted_exactly(database: Database, clock: Clock) -> None:
    recorder = new_ledger(clock, max_waiting=10)
    call(recorder, "alice", passed=5, denied=25)
    usage_writer = new_usage_writer(database, recorder, clock)
    await usage_writer.flush()
    call(recorder, "alice", denied=4)
    await usage_writer.flush()
    assert (await stored(database), recorder.dropped) == (14, 15)
    assert await counted(database) == (34, 29)


async def test_usage_beyond_the_bound_is_merged_and_then_dropped(database: Database, clock: Clock) -> None:
    recorder = new_ledger(clock)
    usage_writer = new_usage_writer(database, recorder, clock, max_cells=2)
    for _ in range(4):
        for user in ("alice", "bob", "carol"):
            call(recorder, user, passed=1)
        await usage_writer._take_usage()  # the database is unavailable
        clock.now_s += 60
    await usage_writer.flush()
    result = {use.name: use.total for use in await heaviest(database, "user", 0, clock.now_s + 60)}
    assert result == {"alice": 1, "bob": 1, OTHER: 1 + 3}
    assert usage_writer.usage_dropped == 12 - 6


async def test_touch_receives_the_activity_of_users(database: Database, clock: Clock) -> None:
    result: list[dict[str, UserActivity]] = []

    async def touch(users: object) -> None:
        result.append(dict(users))  # type: ignore[call-overload]

    recorder = new_ledger(clock)
    usage_writer = new_usage_writer(database, recorder, clock, touch=touch)
    call(recorder, "alice", passed=2, denied=1, path="/a")
    call(recorder, "alice", passed=2, path="/b")
    await usage_writer.work()
    assert result == [{"alice": UserActivity(5, 1, clock.now_s)}]
    clock.now_s += 11
    await usage_writer.work()
    assert result[1:] == [{}]  # called even without activity


async def test_written_minutes_mark_their_hour_as_due(database: Database, clock: Clock) -> None:
    recorder = new_ledger(clock)
    usage_writer = new_usage_writer(database, recorder, clock)
    for _ in range(2):
        call(recorder, "alice", passed=1)
        await usage_writer.flush()
    async with database.begin() as connection:
        rows = (await connection.execute(select(rollups_due))).all()
        assert [tuple(row) for row in rows] == [("hour", clock.now_s, 2)]
        await connection.execute(delete(rollups_due))


async def test_close_writes_the_rest(database: Database, clock: Clock) -> None:
    recorder = new_ledger(clock)
    usage_writer = new_usage_writer(database, recorder, clock)
    usage_writer.start()
    call(recorder, "alice", passed=1, denied=2)
    await usage_writer.close()
    assert (await stored(database), await counted(database)) == (2, (3, 2))


@pytest.mark.slow
async def test_begin_and_end_of_an_outage_are_logged(
    database: Database, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ratelimit_rls.database.usage.writer.FLUSH_INTERVAL_S", 0.01)
    async with database.begin() as connection:
        await connection.execute(text("ALTER TABLE rate_limit_audit_logs RENAME TO elsewhere"))
    recorder = new_ledger(clock)
    call(recorder, "alice", denied=3)
    usage_writer = new_usage_writer(database, recorder, clock)
    with capture_logs() as logs:
        usage_writer.start()
        async with asyncio.timeout(10):
            while not usage_writer.error:
                await asyncio.sleep(0.01)
            async with database.begin() as connection:
                await connection.execute(text("ALTER TABLE elsewhere RENAME TO rate_limit_audit_logs"))
            while usage_writer.error:
                await asyncio.sleep(0.01)
        await usage_writer.close()
    assert [(line["event"], line["log_level"]) for line in logs] == [
        ("usage_write_failed", "warning"),
        ("usage_writes_recovered", "info"),
    ]
    assert await stored(database) == 3


@pytest.mark.slow
async def test_nothing_is_lost_when_the_server_dies_during_writes(
    postgres_server: PostgresServer, clock: Clock
) -> None:
    """Every other transaction is aborted, some after their rows were sent."""
    database = Database(postgres_server.url(postgres_server.new_database()))
    await database.upgrade()
    recorder = new_ledger(clock, max_waiting=50_000)
    usage_writer = new_usage_writer(database, recorder, clock)
    failed = 0
    for _ in range(12):  # a restart between two transactions aborts nothing
        call(recorder, "alice", passed=100, denied=1500)
        working = asyncio.create_task(usage_writer.flush())
        await asyncio.sleep(0.02)
        postgres_server.sql(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
            "WHERE pid <> pg_backend_pid() AND datname IS NOT NULL"
        )
        try:
            await working
        except DatabaseUnavailable:
            failed += 1
    await usage_writer.flush()
    assert failed
    assert (await stored(database), recorder.dropped, await counted(database)) == (18_000, 0, (19_200, 18_000))
    await database.close()


async def test_clock_that_was_ahead_is_corrected_at_once(database: Database, clock: Clock) -> None:
    recorder = UsageRecorder(sample=0, max_waiting=10, clock=clock)
    usage_writer = UsageWriter(database, recorder, server_id="here", clock=clock)
    call(recorder, "alice", passed=1)
    await usage_writer.work()
    right_s = clock.now_s
    clock.now_s += 10 * 365 * 86_400
    call(recorder, "alice", passed=2)
    await usage_writer.work()
    clock.now_s = right_s + 5
    call(recorder, "alice", passed=4)
    await usage_writer.work()
    clock.now_s = right_s + 16
    call(recorder, "alice", passed=8)
    await usage_writer.work()
    query = select(metrics.c.timestamp, func.sum(metrics.c.total_requests)).group_by(metrics.c.timestamp)
    async with database.reading() as connection:
        counted = sorted((await connection.execute(query)).all())
    assert [int(count) for _, count in counted] == [13, 2]
    assert counted[0][0] == right_s


async def test_clock_set_back_slightly_stays_in_its_minute(database: Database, clock: Clock) -> None:
    recorder = UsageRecorder(sample=0, max_waiting=10, clock=clock)
    usage_writer = UsageWriter(database, recorder, server_id="here", clock=clock)
    call(recorder, "alice", passed=1)
    clock.now_s -= 120
    call(recorder, "alice", passed=2)
    await usage_writer.flush()
    async with database.reading() as connection:
        assert list(await connection.scalars(select(metrics.c.total_requests))) == [3]


async def test_rejected_usage_is_counted_as_dropped_once(database: Database, clock: Clock) -> None:
    recorder = UsageRecorder(sample=0, max_waiting=10, clock=clock)
    usage_writer = UsageWriter(database, recorder, server_id="here", clock=clock)

    async def deny(_: object) -> None:
        try:
            raise IntegrityError("", {}, Exception())
        except IntegrityError:
            raise DatabaseError("denied")  # noqa: B904 - as the database's errors are told

    usage_writer._replace_cells = deny  # type: ignore[method-assign,assignment]
    for _ in range(3):
        call(recorder, "alice", passed=5)
        await usage_writer.flush()
    assert usage_writer.usage_dropped == 15


async def test_region_with_undecodable_bytes_is_stored(database: Database, clock: Clock) -> None:
    recorder = UsageRecorder(sample=1, max_waiting=10, clock=clock)
    call(recorder, "alice", passed=1)
    await UsageWriter(database, recorder, server_id="here", region="eu-\udcff", clock=clock).flush()
    async with database.reading() as connection:
        assert list(await connection.scalars(select(metrics.c.region))) == ["eu-?"]


async def test_lost_usage_is_logged_on_close(clock: Clock) -> None:
    recorder = UsageRecorder(sample=1, max_waiting=10, clock=clock)
    call(recorder, "alice", passed=3)
    nowhere = Database(f"postgresql://user@127.0.0.1:{free_port()}/records")
    with capture_logs() as result:
        await UsageWriter(nowhere, recorder, server_id="here", clock=clock).close(within_s=2)
    (lost,) = [line for line in result if line["event"] == "usage_lost"]
    assert (lost["decisions"], lost["usage_rows"]) == (3, 1)


@pytest.mark.slow
async def test_close_ends_while_the_database_hangs(clock: Clock) -> None:
    """It hangs in the current statement and in later ones."""
    with PostgresServer() as server:
        database = Database(server.url(server.new_database()))
        await database.upgrade()
        recorder = UsageRecorder(sample=1, max_waiting=10_000, clock=clock)
        usage_writer = UsageWriter(database, recorder, server_id="here", clock=clock)
        call(recorder, "alice", passed=5000)
        usage_writer.start()
        while not usage_writer.written:
            await asyncio.sleep(0)
        server.pause()
        began_s = time.monotonic()
        with capture_logs() as result:
            await usage_writer.close(within_s=1)
        assert time.monotonic() - began_s < 10
        (lost,) = [line for line in result if line["event"] == "usage_lost"]
        assert 5000 - usage_writer.written - 200 <= lost["decisions"] <= 5000 - usage_writer.written
        assert lost["usage_rows"] == 1
        server.resume()
        await database.close()
