"""A process follows the database: told of changes, asking by itself, and through outages."""

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

from ratelimit_rls.core.accounts import Accounts, Block, Changed, Tier, User
from ratelimit_rls.errors import RecordsError, RecordsUnavailable
from ratelimit_rls.records import follow
from ratelimit_rls.records.database import Database
from ratelimit_rls.records.desk import Desk
from ratelimit_rls.records.follow import Follower
from ratelimit_rls.records.held import Held
from ratelimit_rls.records.snapshot import SnapshotFile
from tests.databases import PASSWORD, PostgresServer
from tests.integration.records.conftest import LIMITS, ME, Office

NEVER_S = 3600.0


class Process:
    """What one process knows, and how it came to know it."""

    def __init__(self, url: str, snapshot: SnapshotFile | None = None, poll_s: float = NEVER_S) -> None:
        self.database = Database(url)
        self.held = Held(Accounts())
        self.loads = 0
        self.changes = 0
        self.follower = Follower(
            Desk(self.database), self.database, self._on_accounts, self._on_changed, poll_s, snapshot
        )

    async def _on_accounts(self, accounts: Accounts) -> None:
        self.loads += 1
        self.held = Held(accounts)

    def _on_changed(self, changed: Changed) -> None:
        self.changes += 1
        self.held.apply(changed)

    @property
    def users(self) -> set[str]:
        return {user.user_id for user in self.held.accounts().users}

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
    monkeypatch.setattr(follow, "LONGEST_PAUSE_S", 0.2)
    monkeypatch.setattr("ratelimit_rls.records.wakers.SQLITE_EVERY_S", 0.01)


async def test_two_processes_hear_of_every_change(office: Office, upgraded_url: str) -> None:
    await office.with_gold_and_alice()
    async with Process(upgraded_url).running() as one, Process(upgraded_url).running() as two:
        assert one.users == two.users == {"alice"}
        state = one.follower.state
        assert (state.is_connected, state.origin, state.sequence, state.last_error) == (True, "database", 2, "")
        await office.do("set_block", "alice", Block())
        await office.do("put_user", User("bob"))
        for process in (one, two):
            await process.until(lambda process=process: process.users == {"alice", "bob"})
            assert process.held.accounts().users[0].block == Block()
            assert process.follower.state.sequence == 4
            assert process.loads == 1
        await office.do("put_users", [User("carl")])
        await one.until(lambda: "carl" in one.users)
        assert one.loads == 2


@pytest.mark.slow
async def test_a_message_that_was_lost_is_made_up_for_by_asking(
    office: Office, upgraded_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def deaf(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(follow, "listen", deaf)
    monkeypatch.setattr(follow, "look", deaf)
    async with (
        Process(upgraded_url, poll_s=0.02).running() as polling,
        Process(upgraded_url).running() as woken,
    ):
        await office.do("put_user", User("bob"))
        await polling.until(lambda: polling.users == {"bob"})
        assert woken.users == set()
        woken.follower.wake()  # as whoever hears of it elsewhere does
        await woken.until(lambda: woken.users == {"bob"})


@pytest.mark.slow
async def test_whatever_the_listener_raises_it_goes_on(
    office: Office, upgraded_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with Process(upgraded_url).running() as process:
        heard = process.follower._on_changed
        process.follower._on_changed = lambda changed: 1 / 0  # type: ignore[assignment,return-value]
        await office.do("put_user", User("bob"))
        await process.until(lambda: process.users == {"bob"})  # read anew, since the change was not taken
        process.follower._on_changed = heard
        await office.do("put_user", User("carl"))
        await process.until(lambda: process.users == {"bob", "carl"})
        assert process.follower.state.is_connected
    assert capsys.readouterr().out.count("the database cannot be followed") == 1


@pytest.mark.slow
async def test_without_a_database_the_last_snapshot_serves(office: Office, upgraded_url: str, tmp_path: Path) -> None:
    await office.with_gold_and_alice()
    snapshot = SnapshotFile(tmp_path / "snapshot.gz")
    async with Process(upgraded_url, snapshot).running() as process:
        await process.until(lambda: snapshot.path.exists())
        await office.do("put_user", User("bob"))
        await process.until(lambda: "bob" in process.users)
    expected = await office.ask("accounts")
    assert snapshot.read() == expected  # the last change was written at the end

    away = "postgresql://postgres@127.0.0.1:1/away"
    async with Process(away, snapshot).running() as process:
        assert process.held.accounts() == expected
        state = process.follower.state
        assert (state.is_connected, state.origin, state.sequence) == (False, "snapshot", 3)
        assert "Connection refused" in state.last_error
    assert snapshot.read() == expected


@pytest.mark.slow
async def test_with_neither_it_starts_empty_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snapshot = SnapshotFile(tmp_path / "snapshot.gz")
    snapshot.path.write_text("nonsense")
    async with Process("postgresql://postgres@127.0.0.1:1/away", snapshot).running() as process:
        assert process.follower.state.origin == "nothing"
        assert process.loads == 0
    told = capsys.readouterr().out
    assert "no gzip file" in told
    assert "started without users, keys and stored rules" in told


@pytest.mark.slow
async def test_a_database_that_cannot_be_used_is_no_outage(postgres_server: PostgresServer) -> None:
    """The process does not start: it would wait for what never comes."""
    name = postgres_server.new_database()
    for url, why in (
        (postgres_server.url(name), "db upgrade"),
        (postgres_server.url("nowhere"), "does not exist"),
        (postgres_server.url(name).replace(PASSWORD, "x"), "password authentication failed"),
    ):
        process = Process(url)
        with pytest.raises(RecordsError, match=why):
            await process.follower.start()
        await process.follower.close()
        await process.database.close()


@pytest.mark.slow
async def test_postgresql_may_be_killed_and_come_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with PostgresServer() as server:
        url = server.url(server.new_database())
        office = Office(url)
        await office.database.upgrade()
        await office.with_gold_and_alice()
        async with Process(url).running() as process:
            for number in range(2):
                server.kill()
                await process.until(lambda: not process.follower.state.is_connected)
                assert "alice" in process.users
                server.start()
                await process.until(lambda: process.follower.state.is_connected)
                await office.do("put_user", User(f"u{number}"))  # is told, and not only found by asking
                await process.until(lambda number=number: f"u{number}" in process.users)
        async with Process(url).running() as process:  # half open: it looks alive and nothing comes
            server.sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'")
            await office.do("put_user", User("late"))
            await process.until(lambda: "late" in process.users)
        await office.database.close()
    told = capsys.readouterr().out
    assert (told.count("cannot be followed"), told.count("is followed again")) == (2, 2)
    assert PASSWORD not in told


def moved_away(path: Path, aside: Path) -> Callable[[], None]:
    """And how it is put back: the same file."""
    path.rename(aside)
    return lambda: aside.rename(path) and None


def copied_and_deleted(path: Path, aside: Path) -> Callable[[], None]:
    """The same, with another file: a backup, as records.md has it made."""
    with closing(sqlite3.connect(path)) as before, closing(sqlite3.connect(aside)) as backup:
        before.backup(backup)
    path.unlink()
    return lambda: shutil.copyfile(aside, path) and None


@pytest.mark.slow
@pytest.mark.parametrize("take", [moved_away, copied_and_deleted])
async def test_a_sqlite_file_that_is_taken_away_is_an_outage(
    tmp_path: Path, take: Callable[[Path, Path], Callable[[], None]]
) -> None:
    path = tmp_path / "a b" / "ü.db"
    url = f"sqlite:///{path}"
    process = Process(url)
    here = Desk(process.database)  # the follower's and the desk's database are one in a process
    with capture_logs() as logs:
        async with process.running(), _closing(Database(url)) as other:
            async with here.change(ME) as change:
                await change.put_user(User("alice"))
            await process.until(lambda: process.users == {"alice"})
            put_back = take(path, tmp_path / "aside.db")
            with pytest.raises(RecordsUnavailable, match=r"SQLite file .*ü\.db is not there: put it back where it was"):
                async with here.change(ME) as change:
                    await change.put_user(User("bob"))
            await process.until(lambda: not process.follower.state.is_connected)
            for _ in range(5):  # it is looked for again and again, and never made
                await asyncio.sleep(0.05)
                assert not path.exists()
            assert process.users == {"alice"}

            put_back()
            await process.until(lambda: process.follower.state.is_connected)
            assert process.loads == 2
            await other.require_current()
            async with Desk(other).change(ME) as change:  # and it hears of what others do
                await change.put_user(User("carl"))
            await process.until(lambda: process.users == {"alice", "carl"})
            async with here.change(ME) as change:
                await change.put_user(User("dora"))
            await process.until(lambda: process.users == {"alice", "carl", "dora"})
    told = [(line["event"].partition(";")[0], line["log_level"]) for line in logs if line["log_level"] != "debug"]
    assert told == [("the database cannot be followed", "error"), ("the database is followed again", "warning")]


@pytest.mark.slow
async def test_a_sqlite_file_in_place_of_another_is_read_before_it_is_written_to(tmp_path: Path) -> None:
    path, backup = tmp_path / "records.db", tmp_path / "backup.db"
    async with _closing(Database(f"sqlite:///{backup}")) as made:
        await made.require_current()
        async with Desk(made).change(ME) as change:
            await change.put_user(User("from the backup"))
    process = Process(f"sqlite:///{path}")
    here = Desk(process.database)
    async with process.running():
        async with here.change(ME) as change:
            await change.put_user(User("alice"))
        path.rename(tmp_path / "old.db")
        backup.rename(path)
        with pytest.raises(RecordsUnavailable, match="was replaced by another file, which has to be read first"):
            async with here.change(ME) as change:
                await change.put_user(User("bob"))
        await process.until(lambda: process.users == {"from the backup"})
        async with here.change(ME) as change:
            await change.put_user(User("carl"))
        await process.until(lambda: process.users == {"from the backup", "carl"})

        path.rename(backup)
        path.touch()  # as if it were being copied
        await process.until(lambda: "replaced by a file that is empty" in process.follower.state.last_error)
        with pytest.raises(RecordsUnavailable, match="was replaced by another file"):
            async with here.change(ME) as change:
                await change.put_user(User("dora"))
        assert path.stat().st_size == 0
        assert process.users == {"from the backup", "carl"}
    async with _closing(Database(f"sqlite:///{tmp_path / 'old.db'}")) as old:  # whole, wherever it was brought
        async with Desk(old).reading() as reader:
            assert [user.user_id for user in await reader.users()] == ["alice"]
        async with old.reading() as connection:
            assert await connection.scalar(text("PRAGMA integrity_check")) == "ok"


@asynccontextmanager
async def _closing(database: Database) -> AsyncIterator[Database]:
    yield database
    await database.close()


@pytest.mark.slow
async def test_a_snapshot_that_cannot_be_written_stops_nothing(
    office: Office, upgraded_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    async with Process(upgraded_url, SnapshotFile(tmp_path / "file" / "snapshot.gz")).running() as process:
        await office.do("add_tier", Tier("gold", LIMITS))
        await process.until(lambda: len(process.held.accounts().tiers) == 1)
    assert capsys.readouterr().out.count("the snapshot cannot be written") == 1


async def test_a_follower_that_is_woken_as_it_is_closed_ends(upgraded_url: str) -> None:
    process = Process(upgraded_url)
    await process.follower.start()
    await process.until(lambda: process.follower.state.is_connected)
    await asyncio.sleep(0.05)  # it waits to be woken by then
    process.follower.wake()
    async with asyncio.timeout(10):
        await process.follower.close()
    await process.database.close()
