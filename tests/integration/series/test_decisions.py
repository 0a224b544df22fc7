"""What is written of decisions and usage: each once, whatever happens on the way."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy import delete, func, select, text
from sqlalchemy.exc import IntegrityError
from structlog.testing import capture_logs

from ratelimit_rls.errors import RecordsError, RecordsUnavailable
from ratelimit_rls.records.database import Database
from ratelimit_rls.records.decisions import Scribe, Touched
from ratelimit_rls.records.series import audit_logs, metrics, rollups_due
from ratelimit_rls.records.usage import decisions, heaviest
from ratelimit_rls.telemetry.counts import OTHER, Word
from ratelimit_rls.telemetry.ledger import Caller, Ledger, Recorded
from tests.databases import PostgresServer
from tests.integration.series.calls import call
from tests.integration.series.conftest import Clock
from tests.process import free_port


def new_ledger(clock: Clock, sample: float = 0.0, most_waiting: int = 1000, most_lines: int = 100) -> Ledger:
    return Ledger(sample=sample, most_waiting=most_waiting, most_lines=most_lines, clock=clock)


def new_scribe(database: Database, ledger: Ledger, clock: Clock, **options: object) -> Scribe:
    return Scribe(database, ledger, server_id="here", region="eu", clock=clock, **options)


async def stored(database: Database) -> int:
    async with database.reading() as connection:
        return await connection.scalar(select(func.count()).select_from(audit_logs)) or 0


async def counted(database: Database) -> tuple[int, int]:
    """All calls, and the refused ones."""
    async with database.reading() as connection:
        sums = select(func.sum(metrics.c.total_requests), func.sum(metrics.c.throttled_requests))
        total, throttled = (await connection.execute(sums)).one()
        return int(total or 0), int(throttled or 0)


async def test_refusals_are_stored_with_all_that_is_known_of_them(database: Database, clock: Clock) -> None:
    ledger = new_ledger(clock)
    call(ledger, "alice", passed=3, refused=1, elapsed_s=0.0005, path="/a?secret=1")
    scribe = new_scribe(database, ledger, clock)
    await scribe.work()
    (one,) = await decisions(database, clock.now_s - 1, clock.now_s + 1)
    assert (one.at_s, one.domain, one.user, one.endpoint, one.rule) == (clock.now_s, "edge", "alice", "/a", "edge.user")
    assert (one.decision, one.current, one.limit, one.status, one.retry_after_s) == ("throttled", 11, 10, 429, 5)
    assert (one.latency_us, one.region, one.reason, one.api_key) == (500, "eu", "", "")
    assert one.server_id.startswith("here-")
    assert scribe.written == 1


async def test_a_batch_that_is_written_twice_is_stored_once(database: Database, clock: Clock) -> None:
    ledger = new_ledger(clock)
    call(ledger, "alice", refused=5)
    scribe = new_scribe(database, ledger, clock)
    taken = ledger.take_decisions(10)
    ledger.put_back(taken)
    await scribe.flush()
    ledger.put_back(taken)  # as if nobody knew whether the transaction was kept
    await scribe.flush()
    assert await stored(database) == 5


async def test_a_minute_is_counted_whole_however_often_it_is_written(database: Database, clock: Clock) -> None:
    ledger = new_ledger(clock)
    scribe = new_scribe(database, ledger, clock)
    for _ in range(3):
        call(ledger, "alice", passed=2, refused=1)
        clock.now_s += 11
        await scribe.work()
    assert await counted(database) == (9, 3)
    clock.now_s += 60
    call(ledger, "alice", passed=1)
    await scribe.flush()
    await scribe.flush()
    assert await counted(database) == (10, 3)
    async with database.reading() as connection:
        assert await connection.scalar(select(func.count()).select_from(metrics)) == 2


async def test_a_minute_that_ends_between_taking_and_writing_is_not_cut_short(database: Database, clock: Clock) -> None:
    ledger = new_ledger(clock)
    scribe = new_scribe(database, ledger, clock)
    call(ledger, "alice", passed=2)
    await scribe._take_usage()
    call(ledger, "alice", passed=1)
    clock.now_s += 60
    call(ledger, "alice", passed=1)
    await scribe._write_usage()
    await scribe.flush()
    assert await counted(database) == (4, 0)


async def test_another_process_of_that_name_writes_over_nothing(database: Database, clock: Clock) -> None:
    for _ in range(2):  # started anew within the minute
        ledger = new_ledger(clock)
        call(ledger, "alice", passed=4)
        await new_scribe(database, ledger, clock).flush()
    assert await counted(database) == (8, 0)


async def test_what_one_row_is_refused_for_costs_no_other(database: Database, clock: Clock) -> None:
    ledger = new_ledger(clock)
    call(ledger, "alice", refused=7)
    missing: str = None  # type: ignore[assignment]
    ledger.put_back([Recorded(clock.now_s, 1, Caller(missing), "", Word.BLOCKED)])
    scribe = new_scribe(database, ledger, clock)
    await scribe.flush()
    assert (await stored(database), scribe.written, scribe.refused) == (7, 7, 1)


async def test_without_its_tables_nothing_is_lost(database: Database, clock: Clock) -> None:
    async with database.begin() as connection:
        await connection.execute(text("ALTER TABLE rate_limit_audit_logs RENAME TO elsewhere"))
    ledger = new_ledger(clock)
    call(ledger, "alice", refused=3)
    scribe = new_scribe(database, ledger, clock)
    with pytest.raises(Exception, match="refused what was asked"):
        await scribe.work()
    async with database.begin() as connection:
        await connection.execute(text("ALTER TABLE elsewhere RENAME TO rate_limit_audit_logs"))
    await scribe.work()
    assert await stored(database) == 3


async def test_what_finds_no_room_is_counted_exactly(database: Database, clock: Clock) -> None:
    ledger = new_ledger(clock, most_waiting=10)
    call(ledger, "alice", passed=5, refused=25)
    scribe = new_scribe(database, ledger, clock)
    await scribe.flush()
    call(ledger, "alice", refused=4)
    await scribe.flush()
    assert (await stored(database), ledger.dropped) == (14, 15)
    assert await counted(database) == (34, 29)


async def test_usage_beyond_the_bound_loses_its_names_and_then_itself(database: Database, clock: Clock) -> None:
    ledger = new_ledger(clock)
    scribe = new_scribe(database, ledger, clock, most_cells=2)
    for _ in range(4):
        for user in ("alice", "bob", "carol"):
            call(ledger, user, passed=1)
        await scribe._take_usage()  # and the database is away
        clock.now_s += 60
    await scribe.flush()
    told = {use.name: use.total for use in await heaviest(database, "user", 0, clock.now_s + 60)}
    assert told == {"alice": 1, "bob": 1, OTHER: 1 + 3}
    assert scribe.usage_dropped == 12 - 6


async def test_users_are_told_of_with_what_they_did(database: Database, clock: Clock) -> None:
    told: list[dict[str, Touched]] = []

    async def touch(users: object) -> None:
        told.append(dict(users))  # type: ignore[call-overload]

    ledger = new_ledger(clock)
    scribe = new_scribe(database, ledger, clock, touch=touch)
    call(ledger, "alice", passed=2, refused=1, path="/a")
    call(ledger, "alice", passed=2, path="/b")
    await scribe.work()
    assert told == [{"alice": Touched(5, 1, clock.now_s)}]
    clock.now_s += 11
    await scribe.work()
    assert told[1:] == [{}]  # for what else is told in that rhythm


async def test_an_hour_is_due_once_minutes_of_it_are_written(database: Database, clock: Clock) -> None:
    ledger = new_ledger(clock)
    scribe = new_scribe(database, ledger, clock)
    for _ in range(2):
        call(ledger, "alice", passed=1)
        await scribe.flush()
    async with database.begin() as connection:
        rows = (await connection.execute(select(rollups_due))).all()
        assert [tuple(row) for row in rows] == [("hour", clock.now_s, 2)]
        await connection.execute(delete(rollups_due))


async def test_the_task_writes_at_the_end_what_is_left(database: Database, clock: Clock) -> None:
    ledger = new_ledger(clock)
    scribe = new_scribe(database, ledger, clock)
    scribe.start()
    call(ledger, "alice", passed=1, refused=2)
    await scribe.close()
    assert (await stored(database), await counted(database)) == (2, (3, 2))


@pytest.mark.slow
async def test_the_end_of_an_outage_is_logged_like_its_beginning(
    database: Database, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ratelimit_rls.records.decisions.PAUSE_S", 0.01)
    async with database.begin() as connection:
        await connection.execute(text("ALTER TABLE rate_limit_audit_logs RENAME TO elsewhere"))
    ledger = new_ledger(clock)
    call(ledger, "alice", refused=3)
    scribe = new_scribe(database, ledger, clock)
    with capture_logs() as logs:
        scribe.start()
        async with asyncio.timeout(10):
            while not scribe.fault:
                await asyncio.sleep(0.01)
            async with database.begin() as connection:
                await connection.execute(text("ALTER TABLE elsewhere RENAME TO rate_limit_audit_logs"))
            while scribe.fault:
                await asyncio.sleep(0.01)
        await scribe.close()
    assert [(line["event"], line["log_level"]) for line in logs] == [
        ("records cannot be written; they wait", "warning"),
        ("records are written again", "warning"),
    ]
    assert await stored(database) == 3


@pytest.mark.slow
async def test_a_server_that_dies_in_the_middle_costs_nothing_but_time(
    postgres_server: PostgresServer, clock: Clock
) -> None:
    """Every other transaction is cut off, some of them when their rows have been sent."""
    database = Database(postgres_server.url(postgres_server.new_database()))
    await database.upgrade()
    ledger = new_ledger(clock, most_waiting=5000)
    scribe = new_scribe(database, ledger, clock)
    call(ledger, "alice", passed=100, refused=3000)
    failed = 0
    for _ in range(12):
        working = asyncio.create_task(scribe.flush())
        await asyncio.sleep(0.02)
        postgres_server.sql(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
            "WHERE pid <> pg_backend_pid() AND datname IS NOT NULL"
        )
        try:
            await working
        except RecordsUnavailable:
            failed += 1
    await scribe.flush()
    assert failed
    assert (await stored(database), ledger.dropped, await counted(database)) == (3000, 0, (3100, 3000))
    await database.close()


async def test_a_clock_that_was_ahead_is_right_again_at_once(database: Database, clock: Clock) -> None:
    ledger = Ledger(sample=0, most_waiting=10, clock=clock)
    scribe = Scribe(database, ledger, server_id="here", clock=clock)
    call(ledger, "alice", passed=1)
    await scribe.work()
    right_s = clock.now_s
    clock.now_s += 10 * 365 * 86_400
    call(ledger, "alice", passed=2)
    await scribe.work()
    clock.now_s = right_s + 5
    call(ledger, "alice", passed=4)
    await scribe.work()
    clock.now_s = right_s + 16
    call(ledger, "alice", passed=8)
    await scribe.work()
    asked = select(metrics.c.timestamp, func.sum(metrics.c.total_requests)).group_by(metrics.c.timestamp)
    async with database.reading() as connection:
        counted = sorted((await connection.execute(asked)).all())
    assert [int(count) for _, count in counted] == [13, 2]
    assert counted[0][0] == right_s


async def test_a_clock_that_is_set_back_a_little_counts_on_in_its_minute(database: Database, clock: Clock) -> None:
    ledger = Ledger(sample=0, most_waiting=10, clock=clock)
    scribe = Scribe(database, ledger, server_id="here", clock=clock)
    call(ledger, "alice", passed=1)
    clock.now_s -= 120
    call(ledger, "alice", passed=2)
    await scribe.flush()
    async with database.reading() as connection:
        assert list(await connection.scalars(select(metrics.c.total_requests))) == [3]


async def test_usage_that_the_database_refuses_is_counted_once(database: Database, clock: Clock) -> None:
    ledger = Ledger(sample=0, most_waiting=10, clock=clock)
    scribe = Scribe(database, ledger, server_id="here", clock=clock)

    async def refuse(_: object) -> None:
        try:
            raise IntegrityError("", {}, Exception())
        except IntegrityError:
            raise RecordsError("refused")  # noqa: B904 - as the database's errors are told

    scribe._replace_cells = refuse  # type: ignore[method-assign]
    for _ in range(3):
        call(ledger, "alice", passed=5)
        await scribe.flush()
    assert scribe.usage_dropped == 15


async def test_a_region_of_any_bytes_is_stored(database: Database, clock: Clock) -> None:
    ledger = Ledger(sample=1, most_waiting=10, clock=clock)
    call(ledger, "alice", passed=1)
    await Scribe(database, ledger, server_id="here", region="eu-\udcff", clock=clock).flush()
    async with database.reading() as connection:
        assert list(await connection.scalars(select(metrics.c.region))) == ["eu-?"]


async def test_what_is_lost_at_the_end_is_told(clock: Clock) -> None:
    ledger = Ledger(sample=1, most_waiting=10, clock=clock)
    call(ledger, "alice", passed=3)
    nowhere = Database(f"postgresql://user@127.0.0.1:{free_port()}/records")
    with capture_logs() as told:
        await Scribe(nowhere, ledger, server_id="here", clock=clock).close(within_s=2)
    (lost,) = [line for line in told if line["event"] == "records were not all written"]
    assert (lost["ratelimit.audit.waiting"], lost["ratelimit.usage.waiting"]) == (3, 1)
