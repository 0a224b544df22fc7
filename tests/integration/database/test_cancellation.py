"""Transactions that are cancelled or time out at any await.

They are committed or rolled back as a whole, the caller learns which, and no lock, connection, task or row is left
behind. The garbage collector is off: what only it would clean up counts as left behind.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import sqlite3
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import closing

import pytest
from sqlalchemy import select, text

from ratelimit_rls.database import database as database_module
from ratelimit_rls.database import pooled_connection
from ratelimit_rls.database.database import POOL_SIZE, Database
from ratelimit_rls.database.tables import admin_audit_log, changes, user_quotas
from ratelimit_rls.errors import DatabaseUnavailable
from ratelimit_rls.identity.accounts import User
from tests.integration.database.conftest import ME, AccountDb
from tests.support.cancellation import Moment, run_cancelled
from tests.support.databases import PostgresServer

SETTLED_S = 20.0
TRANSACTIONS = 1000
AT_ONCE = 4


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
async def fresh(upgraded_url: str) -> AsyncIterator[AccountDb]:
    """Use instead of `db`, whose teardown must not find a task of ours either."""
    db = AccountDb(upgraded_url)
    yield db
    await db.database.close()
    await settled()


async def settled() -> None:
    """Wait until no other task is left: work in the background ends soon."""
    until_s = time.monotonic() + SETTLED_S
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        assert time.monotonic() < until_s, f"left behind: {others}"
        await asyncio.sleep(0.001)


async def assert_nothing_is_open(db: AccountDb) -> None:
    await settled()
    database = db.database
    assert database._engine.pool.checkedout() == 0  # type: ignore[attr-defined]
    assert database._write_lock is None or not database._write_lock.is_locked
    if database.dialect == "sqlite":
        with closing(sqlite3.connect(database.path, timeout=0)) as other:
            other.execute("BEGIN IMMEDIATE")  # must succeed at once
        return
    other = await database.connect_unpooled()
    try:
        own_backends = "datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
        until_s = time.monotonic() + SETTLED_S
        # A server notices a closed connection slightly later than the client.
        while await other.fetchval(f"SELECT count(*) FROM pg_stat_activity WHERE {own_backends} AND state <> 'idle'"):
            assert time.monotonic() < until_s, await other.fetch(f"SELECT * FROM pg_stat_activity WHERE {own_backends}")
            await asyncio.sleep(0.01)
        assert await other.fetchval("SELECT pg_try_advisory_lock($1)", database_module._CHANGE_LOCK)
    finally:
        await other.close()


async def connections(db: AccountDb) -> int:
    """Return the open connections of the pool, as counted by the system or the server."""
    if db.database.dialect == "sqlite":
        names = []
        for number in os.listdir("/proc/self/fd"):
            try:
                names.append(os.readlink(f"/proc/self/fd/{number}"))
            except OSError:
                continue  # the file descriptor of the listing itself
        return names.count(str(db.database.path.resolve()))
    other = await db.database.connect_unpooled()
    try:
        own_backends = "datname = current_database() AND backend_type = 'client backend'"
        return int(await other.fetchval(f"SELECT count(*) - 1 FROM pg_stat_activity WHERE {own_backends}"))
    finally:
        await other.close()


async def stored(db: AccountDb) -> tuple[set[str], set[str], set[str]]:
    """Return the users in the table, in the audit log, and in the change feed."""
    async with db.database.reading() as connection:
        users = set(await connection.scalars(select(user_quotas.c.user_id)))
        audited = set(await connection.scalars(select(admin_audit_log.c.subject)))
        fed = set(await connection.scalars(select(changes.c.subject)))
    return users, audited, fed


class Changes:
    """Adds users, and records those whose commit was confirmed."""

    def __init__(self, db: AccountDb) -> None:
        self._db = db
        self.result: set[str] = set()

    async def add(self, user: str) -> None:
        async with self._db.repository.change(ME) as change:
            await change.put_user(User(user))
        self.result.add(user)

    async def read(self) -> None:
        """Read a stream: one that is cancelled before its end leaves a statement open."""
        async with self._db.repository.reading() as reader:
            await reader.accounts()


@pytest.mark.parametrize("moment", Moment, ids=[moment.name.lower() for moment in Moment])
@pytest.mark.parametrize("is_connected", [False, True], ids=["connecting", "connected"])
async def test_change_can_be_cancelled_at_every_await(fresh: AccountDb, moment: Moment, is_connected: bool) -> None:
    done = Changes(fresh)
    if is_connected:
        await done.add("first")
    number = suspensions = 0
    while suspensions >= number:  # there was an await to cancel
        number += 1
        if not is_connected:
            await fresh.database._engine.dispose()
        suspensions = await run_cancelled(done.add(f"user-{number}"), number, moment)
        await assert_nothing_is_open(fresh)
        assert await stored(fresh) == (done.result, done.result, done.result), number
    assert number > 10
    assert f"user-{number}" in done.result


@pytest.mark.slow
@pytest.mark.parametrize("moment", Moment, ids=[moment.name.lower() for moment in Moment])
async def test_reader_can_be_cancelled_at_every_await(fresh: AccountDb, moment: Moment) -> None:
    done = Changes(fresh)
    async with fresh.repository.change(ME) as change:
        for number in range(300):  # more than one batch of the stream
            await change.put_user(User(f"user-{number}"))
    number = suspensions = 0
    while suspensions >= number:  # there was an await to cancel
        number += 1
        suspensions = await run_cancelled(done.read(), number, moment)
        await assert_nothing_is_open(fresh)
        if fresh.database.dialect == "sqlite":  # no reader blocks a checkpoint
            with closing(sqlite3.connect(fresh.database.path, timeout=0)) as other:
                other.execute("PRAGMA busy_timeout = 0")
                assert other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0
    assert number > 10


@pytest.mark.slow
async def test_a_thousand_transactions_cancelled_at_random(fresh: AccountDb) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")  # shown if the test fails
    choose = random.Random(seed)
    done = Changes(fresh)
    whole = await run_cancelled(done.add("first"), 0)
    names = iter(range(TRANSACTIONS))

    async def some() -> None:
        for name in names:
            work = done.read() if choose.random() < 0.1 else done.add(f"user-{name}")
            await run_cancelled(work, choose.randint(1, whole), choose.choice(list(Moment)))

    await asyncio.gather(*(some() for _ in range(AT_ONCE)))
    await assert_nothing_is_open(fresh)
    assert await stored(fresh) == (done.result, done.result, done.result)
    assert await connections(fresh) <= POOL_SIZE


async def test_timed_out_transaction_is_rolled_back_and_releases_all(fresh: AccountDb) -> None:
    """Time out within a statement, which used to leave SQLite locked."""
    done = Changes(fresh)
    await done.add("first")

    async def block_all(count: int) -> None:
        slow = (
            f"WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {count}) SELECT max(i) FROM n"
        )
        async with fresh.database.begin(timeout_s=0.1) as connection:
            await connection.execute(text("UPDATE user_quotas SET is_blocked = TRUE"))
            await connection.execute(text(slow))

    began_s = time.monotonic()
    with pytest.raises(DatabaseUnavailable, match=r"did not answer within 0\.1 s"):
        await block_all(2_000_000_000)
    assert time.monotonic() - began_s < 30, "the statement was interrupted"
    await assert_nothing_is_open(fresh)
    async with fresh.database.reading() as connection:
        assert not await connection.scalar(select(user_quotas.c.is_blocked))


async def test_cancelled_waiter_does_not_affect_the_running_change(fresh: AccountDb) -> None:
    done = Changes(fresh)
    async with fresh.repository.change(ME) as change:
        waiting = asyncio.create_task(done.add("second"))
        await change.put_user(User("first"))
        waiting.cancel()
        await asyncio.wait([waiting])
    await done.add("third")
    await assert_nothing_is_open(fresh)
    assert (await stored(fresh))[0] == {"first", "third"}


@pytest.mark.slow
async def test_hanging_server_blocks_no_caller_and_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is paused before, within, and at the end of a transaction."""
    monkeypatch.setattr(database_module, "OPEN_TIMEOUT_S", 1.0)
    monkeypatch.setattr(pooled_connection, "END_TIMEOUT_S", 0.5)
    monkeypatch.setattr(pooled_connection, "COMMIT_TIMEOUT_S", 0.5)
    with PostgresServer() as server:
        url = server.url(server.new_database())
        await Database(url).upgrade()
        database = Database(url)
        await database.require_current()
        server.pause()
        with pytest.raises(DatabaseUnavailable, match="did not answer within"):
            async with database.begin(timeout_s=0.2):
                pass
        await settled()
        assert database._engine.pool.checkedout() == 0  # type: ignore[attr-defined]
        server.resume()

        async def pause_within() -> None:
            async with database.begin(timeout_s=2) as connection:
                await connection.execute(text("SELECT 1"))
                server.pause()
                await connection.execute(text("SELECT 2"))

        with pytest.raises(DatabaseUnavailable):
            await pause_within()
        await settled()
        assert database._engine.pool.checkedout() == 0  # type: ignore[attr-defined]
        server.resume()

        async def pause_before_commit() -> None:
            async with database.begin() as connection:
                await connection.execute(text("DELETE FROM changes"))
                server.pause()

        with pytest.raises(DatabaseUnavailable, match=r"COMMIT within 0\.5 s: the outcome is unknown"):
            await pause_before_commit()
        await settled()
        assert database._engine.pool.checkedout() == 0  # type: ignore[attr-defined]
        server.resume()
        async with database.begin() as connection:
            assert await connection.scalar(text("SELECT 1")) == 1
        await database.close()
