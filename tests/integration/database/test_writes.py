"""Write health, and background writes that do not block changes by administrators."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, contextmanager

import pytest
from sqlalchemy import func, select, text

from ratelimit_rls.database import database as database_module
from ratelimit_rls.database.database import Database
from ratelimit_rls.database.usage.tables import audit_logs, rollups_due
from ratelimit_rls.database.usage.writer import ROWS_PER_TRANSACTION, UsageWriter
from ratelimit_rls.database.write_probe import probe_write
from ratelimit_rls.errors import DatabaseUnavailable
from ratelimit_rls.identity.accounts import User
from ratelimit_rls.server import maintenance
from ratelimit_rls.settings import Settings
from ratelimit_rls.telemetry.usage_recorder import UsageRecorder
from tests.integration.database.conftest import ME, AccountDb
from tests.integration.usage.calls import call

BACKGROUND_WRITERS = 6
CHANGES = 20


@pytest.fixture
async def database(upgraded_url: str) -> AsyncIterator[Database]:
    database = Database(upgraded_url)
    yield database
    await database.close()


@pytest.fixture
def no_lock_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_module, "BACKGROUND_LOCK_TIMEOUT_S", 0.0)


@contextmanager
def read_only(database: Database) -> Iterator[Database]:
    """The same database without write access."""
    if database.dialect == "postgresql":
        yield Database(f"{database._url.dsn}?default_transaction_read_only=on")
        return
    with closing(sqlite3.connect(database.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield database


@pytest.mark.usefixtures("no_lock_wait")
async def test_probe_detects_whether_writes_work_and_changes_nothing(database: Database) -> None:
    await probe_write(database)
    assert database.write_health.writes_succeed
    result: list[str] = []
    with read_only(database) as unwritable:
        unwritable.write_health.on_change = lambda: result.append(unwritable.write_health.error)
        for _ in range(2):
            with pytest.raises(DatabaseUnavailable):
                await probe_write(unwritable)
        assert not unwritable.write_health.writes_succeed
        assert result == [unwritable.write_health.error]  # only once
        async with unwritable.reading() as connection:  # reads still succeed
            assert await connection.scalar(text("SELECT 1")) == 1
        assert not unwritable.write_health.writes_succeed
        if unwritable is not database:
            await unwritable.close()
    await probe_write(database)
    assert database.write_health.writes_succeed
    async with database.reading() as connection:
        assert await connection.scalar(select(func.count()).select_from(rollups_due)) == 0


async def test_error_of_a_caller_does_not_affect_write_health(database: Database) -> None:
    with pytest.raises(KeyError):
        async with database.begin():
            raise KeyError
    assert database.write_health.writes_succeed


async def test_maintenance_probes_an_idle_database(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = maintenance.Maintenance(database, Settings())
    database.write_health.failed("the disk is full")
    await keeper._probe_writes()
    assert not database.write_health.writes_succeed  # it has just failed
    monkeypatch.setattr(maintenance, "WRITE_PROBE_EVERY_S", 0.0)
    await keeper._probe_writes()
    assert database.write_health.writes_succeed


async def test_change_waits_for_at_most_one_background_write(db: AccountDb) -> None:
    """Regardless of the queue length. SQLite only: PostgreSQL has several writers at a time."""
    database = db.database
    commits, stop = 0, asyncio.Event()

    async def write() -> None:
        nonlocal commits
        while not stop.is_set():
            async with database.begin(background=True) as connection:
                await connection.execute(text("DELETE FROM rate_limit_rollups_due"))
                commits += 1

    writers = [asyncio.create_task(write()) for _ in range(BACKGROUND_WRITERS)]
    waited_for = []
    for number in range(CHANGES):
        while commits < 2 * number:  # the writers are running
            await asyncio.sleep(0)
        before = commits
        async with db.repository.change(ME) as change:
            waited_for.append(commits - before)
            await change.put_user(User(f"user-{number}"))
    stop.set()
    await asyncio.gather(*writers)
    print(waited_for)
    if database.dialect == "sqlite":
        assert max(waited_for) <= 1


@pytest.mark.slow
async def test_changes_succeed_while_many_denials_are_written(db: AccountDb) -> None:
    flood = 20 * ROWS_PER_TRANSACTION
    recorder = UsageRecorder(sample=0, max_waiting=flood)
    usage_writer = UsageWriter(db.database, recorder, server_id="here")
    call(recorder, "mallory", denied=flood)
    writing = asyncio.create_task(usage_writer.work())
    waited_for = []
    while not writing.done():
        before = usage_writer.written
        async with db.repository.change(ME) as change:
            waited_for.append(usage_writer.written - before)
            await change.put_user(User(f"user-{len(waited_for)}"))
        await asyncio.sleep(0)
    await writing
    print(waited_for)
    async with db.database.reading() as connection:
        assert await connection.scalar(select(func.count()).select_from(audit_logs)) == flood
    assert len(waited_for) > 1
    if db.database.dialect == "sqlite":
        assert max(waited_for) <= ROWS_PER_TRANSACTION
