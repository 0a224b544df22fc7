"""The change follower: notifications, polling and outages."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest
from sqlalchemy import text
from structlog.testing import capture_logs

from ratelimit_rls.core.entitlements import Block
from ratelimit_rls.database import change_follower
from ratelimit_rls.database.account_mirror import AccountMirror
from ratelimit_rls.database.change_follower import ChangeFollower
from ratelimit_rls.database.configuration import Configuration, ConfigurationChanges
from ratelimit_rls.database.database import Database
from ratelimit_rls.database.repository import Repository
from ratelimit_rls.database.snapshot_file import SnapshotFile
from ratelimit_rls.errors import DatabaseError, DatabaseUnavailable
from ratelimit_rls.identity.accounts import Tier, User
from tests.integration.database.conftest import LIMITS, ME, AccountDb
from tests.support.databases import PASSWORD, PostgresServer

NEVER_S = 3600.0


class Process:
    """The accounts that one process knows, and how it received them."""

    def __init__(self, url: str, snapshot: SnapshotFile | None = None, poll_s: float = NEVER_S) -> None:
        self.database = Database(url)
        self.mirror = AccountMirror(Configuration())
        self.loads = 0
        self.changes = 0
        self.follower = ChangeFollower(
            Repository(self.database), self.database, self._on_accounts, self._on_changed, poll_s, snapshot
        )

    async def _on_accounts(self, accounts: Configuration) -> None:
        self.loads += 1
        self.mirror = AccountMirror(accounts)

    def _on_changed(self, changed: ConfigurationChanges) -> None:
        self.changes += 1
        self.mirror.apply(changed)

    @property
    def users(self) -> set[str]:
        return {user.user_id for user in self.mirror.accounts().users}

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not holds():
                await asyncio.sleep(0.01)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Process]:
        await self.follower.start()
        try:
            yield self
        finally:
            await self.follower.close()
            await self.database.close()


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_follower, "MAX_BACKOFF_S", 0.2)
    monkeypatch.setattr("ratelimit_rls.database.change_notifications.SQLITE_POLL_S", 0.01)


async def test_two_processes_follow_every_change(db: AccountDb, upgraded_url: str) -> None:
    await db.with_gold_and_alice()
    async with Process(upgraded_url).running() as one, Process(upgraded_url).running() as two:
        assert one.users == two.users == {"alice"}
        state = one.follower.state
        assert (state.is_connected, state.origin, state.sequence, state.last_error) == (True, "database", 2, "")
        await db.do("set_block", "alice", Block())
        await db.do("put_user", User("bob"))
        for process in (one, two):
            await process.until(lambda process=process: process.users == {"alice", "bob"})  # type: ignore[misc]
            assert process.mirror.accounts().users[0].block == Block()
            assert process.follower.state.sequence == 4
            assert process.loads == 1
        await db.do("put_users", [User("carl")])
        await one.until(lambda: "carl" in one.users)
        assert one.loads == 2


@pytest.mark.slow
async def test_lost_notification_is_compensated_by_polling(
    db: AccountDb, upgraded_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def deaf(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(change_follower, "listen_postgres", deaf)
    monkeypatch.setattr(change_follower, "poll_sqlite", deaf)
    async with (
        Process(upgraded_url, poll_s=0.02).running() as polling,
        Process(upgraded_url).running() as woken,
    ):
        await db.do("put_user", User("bob"))
        await polling.until(lambda: polling.users == {"bob"})
        assert woken.users == set()
        woken.follower.wake()  # as a notification from elsewhere does
        await woken.until(lambda: woken.users == {"bob"})


@pytest.mark.slow
async def test_follower_survives_exceptions_of_callbacks(
    db: AccountDb, upgraded_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with Process(upgraded_url).running() as process:
        heard = process.follower._on_changed
        process.follower._on_changed = lambda changed: 1 / 0  # type: ignore[assignment]
        await db.do("put_user", User("bob"))
        await process.until(
            lambda: process.users == {"bob"}
        )  # everything is read again, because the change was not applied
        process.follower._on_changed = heard
        await db.do("put_user", User("carl"))
        await process.until(lambda: process.users == {"bob", "carl"})
        assert process.follower.state.is_connected
    assert capsys.readouterr().out.count("database_follow_failed") == 1


@pytest.mark.slow
async def test_snapshot_is_used_without_a_database(db: AccountDb, upgraded_url: str, tmp_path: Path) -> None:
    await db.with_gold_and_alice()
    snapshot = SnapshotFile(tmp_path / "snapshot.gz")
    async with Process(upgraded_url, snapshot).running() as process:
        await process.until(lambda: snapshot.path.exists())
        await db.do("put_user", User("bob"))
        await process.until(lambda: "bob" in process.users)
    expected = await db.ask("accounts")
    assert snapshot.read() == expected  # the last change was written on close

    away = "postgresql://postgres@127.0.0.1:1/away"
    async with Process(away, snapshot).running() as process:
        assert process.mirror.accounts() == expected
        state = process.follower.state
        assert (state.is_connected, state.origin, state.sequence) == (False, "snapshot", 3)
        assert "Connection refused" in state.last_error
    assert snapshot.read() == expected


@pytest.mark.slow
async def test_start_without_database_and_snapshot_is_empty_and_logged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot = SnapshotFile(tmp_path / "snapshot.gz")
    snapshot.path.write_text("nonsense")
    async with Process("postgresql://postgres@127.0.0.1:1/away", snapshot).running() as process:
        assert process.follower.state.origin == "nothing"
        assert process.loads == 0
    result = capsys.readouterr().out
    assert "not a complete gzip file" in result
    assert "started_without_accounts" in result


@pytest.mark.slow
async def test_unusable_database_prevents_the_start(postgres_server: PostgresServer) -> None:
    """The process must not start: the database would never become usable by itself."""
    name = postgres_server.new_database()
    for url, expected_error in (
        (postgres_server.url(name), "db upgrade"),
        (postgres_server.url("nowhere"), "does not exist"),
        (postgres_server.url(name).replace(PASSWORD, "x"), "password authentication failed"),
    ):
        process = Process(url)
        with pytest.raises(DatabaseError, match=expected_error):
            await process.follower.start()
        await process.follower.close()
        await process.database.close()


@pytest.mark.slow
async def test_follower_survives_a_restart_of_postgresql(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with PostgresServer() as server:
        url = server.url(server.new_database())
        db = AccountDb(url)
        await db.database.upgrade()
        await db.with_gold_and_alice()
        async with Process(url).running() as process:
            for number in range(2):
                server.kill()
                await process.until(lambda: not process.follower.state.is_connected)
                assert "alice" in process.users
                server.start()
                await process.until(lambda: process.follower.state.is_connected)
                await db.do("put_user", User(f"u{number}"))  # by notification, not by polling
                await process.until(lambda number=number: f"u{number}" in process.users)  # type: ignore[misc]
        async with Process(url).running() as process:  # half-open connection: it looks alive but receives nothing
            server.sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'")
            await db.do("put_user", User("late"))
            await process.until(lambda: "late" in process.users)
        await db.database.close()
    result = capsys.readouterr().out
    assert (result.count("database_follow_failed"), result.count("database_follow_recovered")) == (2, 2)
    assert PASSWORD not in result


def moved_away(path: Path, aside: Path) -> Callable[[], None]:
    """Remove the file; return the function that puts the same file back."""
    path.rename(aside)
    return lambda: aside.rename(path) and None  # type: ignore[return-value]


def copied_and_deleted(path: Path, aside: Path) -> Callable[[], None]:
    """Remove the file; return the function that puts a backup there, made as in docs/records.md."""
    with closing(sqlite3.connect(path)) as before, closing(sqlite3.connect(aside)) as backup:
        before.backup(backup)
    path.unlink()
    return lambda: shutil.copyfile(aside, path) and None  # type: ignore[return-value]


@pytest.mark.slow
@pytest.mark.parametrize("take", [moved_away, copied_and_deleted])
async def test_missing_sqlite_file_is_an_outage(
    tmp_path: Path, take: Callable[[Path, Path], Callable[[], None]]
) -> None:
    path = tmp_path / "a b" / "ü.db"
    url = f"sqlite:///{path}"
    process = Process(url)
    here = Repository(process.database)  # in a process, follower and repository share the database
    with capture_logs() as logs:
        async with process.running(), _closing(Database(url)) as other:
            async with here.change(ME) as change:
                await change.put_user(User("alice"))
            await process.until(lambda: process.users == {"alice"})
            put_back = take(path, tmp_path / "aside.db")
            with pytest.raises(DatabaseUnavailable, match=r"SQLite file .*ü\.db does not exist: put it back"):
                async with here.change(ME) as change:
                    await change.put_user(User("bob"))
            await process.until(lambda: not process.follower.state.is_connected)
            for _ in range(5):  # it is retried, and the file is never created
                await asyncio.sleep(0.05)
                assert not path.exists()
            assert process.users == {"alice"}

            put_back()
            await process.until(lambda: process.follower.state.is_connected)
            assert process.loads == 2
            await other.require_current()
            async with Repository(other).change(ME) as change:  # it also follows changes of other processes
                await change.put_user(User("carl"))
            await process.until(lambda: process.users == {"alice", "carl"})
            async with here.change(ME) as change:
                await change.put_user(User("dora"))
            await process.until(lambda: process.users == {"alice", "carl", "dora"})
    result = [(line["event"].partition(";")[0], line["log_level"]) for line in logs if line["log_level"] != "debug"]
    followed = [one for one in result if not one[0].startswith("database_writes")]
    assert followed == [("database_follow_failed", "error"), ("database_follow_recovered", "info")]
    assert set(result) - set(followed) == {
        ("database_writes_failed", "error"),
        ("database_writes_recovered", "info"),
    }


@pytest.mark.slow
async def test_replaced_sqlite_file_is_read_before_it_is_written(tmp_path: Path) -> None:
    path, backup = tmp_path / "records.db", tmp_path / "backup.db"
    async with _closing(Database(f"sqlite:///{backup}")) as made:
        await made.require_current()
        async with Repository(made).change(ME) as change:
            await change.put_user(User("from the backup"))
    process = Process(f"sqlite:///{path}")
    here = Repository(process.database)
    async with process.running():
        async with here.change(ME) as change:
            await change.put_user(User("alice"))
        path.rename(tmp_path / "old.db")
        backup.rename(path)
        with pytest.raises(DatabaseUnavailable, match="was replaced by another file, which must be read first"):
            async with here.change(ME) as change:
                await change.put_user(User("bob"))
        await process.until(lambda: process.users == {"from the backup"})
        async with here.change(ME) as change:
            await change.put_user(User("carl"))
        await process.until(lambda: process.users == {"from the backup", "carl"})

        path.rename(backup)
        path.touch()  # as during a copy
        await process.until(lambda: "replaced by an empty file" in process.follower.state.last_error)
        with pytest.raises(DatabaseUnavailable, match="was replaced by another file"):
            async with here.change(ME) as change:
                await change.put_user(User("dora"))
        assert path.stat().st_size == 0
        assert process.users == {"from the backup", "carl"}
    async with _closing(Database(f"sqlite:///{tmp_path / 'old.db'}")) as old:  # complete, wherever it was moved
        async with Repository(old).reading() as reader:
            assert [user.user_id for user in await reader.users()] == ["alice"]
        async with old.reading() as connection:
            assert await connection.scalar(text("PRAGMA integrity_check")) == "ok"


@asynccontextmanager
async def _closing(database: Database) -> AsyncIterator[Database]:
    yield database
    await database.close()


@pytest.mark.slow
async def test_unwritable_snapshot_does_not_stop_the_follower(
    db: AccountDb, upgraded_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    async with Process(upgraded_url, SnapshotFile(tmp_path / "file" / "snapshot.gz")).running() as process:
        await db.do("add_tier", Tier("gold", LIMITS))
        await process.until(lambda: len(process.mirror.accounts().tiers) == 1)
    assert capsys.readouterr().out.count("snapshot_write_failed") == 1


async def test_follower_woken_during_close_ends(upgraded_url: str) -> None:
    process = Process(upgraded_url)
    await process.follower.start()
    await process.until(lambda: process.follower.state.is_connected)
    await asyncio.sleep(0.05)  # it is waiting by then
    process.follower.wake()
    async with asyncio.timeout(10):
        await process.follower.close()
    await process.database.close()
