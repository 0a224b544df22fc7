"""The database: creation, upgrades, errors and outages. No message ever contains a password."""

from __future__ import annotations

import asyncio
import logging
import stat
import traceback
from pathlib import Path

import pytest
from sqlalchemy import text

from ratelimit_rls.database import database as module
from ratelimit_rls.database import migrations
from ratelimit_rls.database.database import Database
from ratelimit_rls.errors import DatabaseError, DatabaseUnavailable
from tests.support.databases import PASSWORD, PostgresServer


@pytest.fixture
async def database(upgraded_url: str):  # type: ignore[no-untyped-def]
    database = Database(upgraded_url)
    yield database
    await database.close()


async def test_sqlite_file_is_created_private(tmp_path: Path) -> None:
    path = tmp_path / "new" / "records.db"
    database = Database(f"sqlite:///{path}")
    assert await database.revision() is None
    with pytest.raises(DatabaseUnavailable, match="does not exist"):
        async with database.begin():
            pass
    assert not path.exists()
    await database.upgrade()
    async with database.begin() as connection:
        await connection.execute(text("CREATE TABLE a (b INTEGER)"))
        assert await connection.scalar(text("PRAGMA journal_mode")) == "wal"
        assert await connection.scalar(text("PRAGMA foreign_keys")) == 1
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
    assert modes == {"records.db": 0o600, "records.db-wal": 0o600, "records.db-shm": 0o600}
    await database.close()


async def test_unwritable_directory_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    database = Database(f"sqlite:///{tmp_path}/file/records.db")
    with pytest.raises(DatabaseUnavailable, match=r"cannot be created: .*must have write access"):
        await database.upgrade()
    await database.close()


async def test_file_that_is_not_a_database_is_reported(tmp_path: Path) -> None:
    (tmp_path / "records.db").write_text("domain: edge\n" * 1000)
    database = Database(f"sqlite:///{tmp_path}/records.db")
    with pytest.raises(DatabaseError, match="is not a database, or is damaged"):
        await database.upgrade()
    await database.close()


async def test_transaction_is_atomic(database: Database) -> None:
    async with database.begin() as connection:
        await connection.execute(text("CREATE TABLE a (b INTEGER)"))
        await connection.execute(text("INSERT INTO a VALUES (1)"))
    with pytest.raises(DatabaseError, match="rejected the statement") as raised:
        await _two_then_nonsense(database)
    assert "SECRET" not in _whole(raised.value)
    async with database.reading() as connection:
        assert await connection.scalar(text("SELECT count(*) FROM a")) == 1


async def _two_then_nonsense(database: Database) -> None:
    async with database.begin() as connection:
        await connection.execute(text("INSERT INTO a VALUES (2)"))
        await connection.execute(text("SELECT SECRET FROM nowhere WHERE x = :x"), {"x": "SECRET"})


async def test_exceptions_of_the_caller_pass_unchanged(database: Database) -> None:
    for fault in (TimeoutError("mine"), OSError("mine"), KeyError("mine")):
        with pytest.raises(type(fault), match="mine"):
            async with database.begin():
                raise fault


async def test_slow_transaction_times_out(database: Database) -> None:
    with pytest.raises(DatabaseUnavailable, match=r"did not answer within 0\.05 s"):
        async with database.begin(timeout_s=0.05):
            await asyncio.sleep(5)
    async with database.begin() as connection:  # and blocks no other transaction
        await connection.execute(text("DELETE FROM changes"))


async def test_writers_are_serialized_and_readers_do_not_wait(upgraded_url: str) -> None:
    first, second = Database(upgraded_url), Database(upgraded_url)
    turns: list[str] = []

    async def write(database: Database, name: str) -> None:
        async with database.begin() as connection:
            await database.serialise(connection)
            turns.append(f"{name} begins")
            await asyncio.sleep(0.01)
            turns.append(f"{name} ends")

    async with first.begin() as connection:
        await first.serialise(connection)
        writing = [asyncio.create_task(write(database, name)) for database, name in ((first, "a"), (second, "b"))]
        async with second.reading() as reading:
            assert await reading.scalar(text("SELECT 1")) == 1
        await asyncio.sleep(0.02)
        assert turns == []
    await asyncio.gather(*writing)
    assert [turn.split()[1] for turn in turns] == ["begins", "ends", "begins", "ends"]
    await first.close()
    await second.close()


async def test_schema_of_another_version_is_rejected(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    database = Database(database_url)
    if database.dialect == "postgresql":
        with pytest.raises(DatabaseError, match=r"is empty and this version needs .*; run `ratelimit-rls db upgrade`"):
            await database.require_current()
        await database.upgrade("0001")
        with pytest.raises(
            DatabaseError, match=r"is at revision 0001 and this version needs .*ratelimit-rls db upgrade"
        ):
            await database.require_current()
        await database.upgrade()
    await database.require_current()  # SQLite is upgraded automatically
    assert await database.revision() == migrations.latest_revision()
    async with database.begin() as connection:
        await connection.execute(text("UPDATE alembic_version SET version_num = '0999'"))
    with pytest.raises(DatabaseError, match="0999, which this version of the service does not know"):
        await database.require_current()
    await database.close()


@pytest.mark.slow
async def test_concurrent_upgrades_run_once(database_url: str) -> None:
    databases = [Database(database_url) for _ in range(3)]
    await asyncio.gather(*(database.upgrade() for database in databases))
    assert await databases[0].revision() == migrations.latest_revision()
    for database in databases:
        await database.close()


@pytest.mark.slow
async def test_unavailable_server_is_reported_without_its_password(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dead, hanging or restarted server, wrong password, wrong name."""
    caplog.set_level(logging.DEBUG)
    with PostgresServer() as server:
        url = server.url(server.new_database())
        wrong = {
            url.replace("test_1", "nowhere"): (DatabaseError, "does not exist"),
            url.replace(PASSWORD, f"{PASSWORD}x"): (DatabaseError, "password authentication failed"),
            f"{url}?sslmode=require": (DatabaseUnavailable, "rejected SSL upgrade"),
            f"{url}?{PASSWORD}=x": (DatabaseError, "rejected the connection"),
            f"{url}?sslmode={PASSWORD}": (DatabaseError, "RLS_DATABASE_URL"),
            url.replace(f":{server.port}", ":1"): (DatabaseUnavailable, "Connection refused"),
            url.replace("127.0.0.1", "no-such-host.invalid"): (DatabaseUnavailable, "cannot be reached"),
        }
        for bad, (kind, expected_error) in wrong.items():
            await _rejected(Database(bad), kind, expected_error)

        database = Database(url)
        await database.upgrade()
        for _ in range(2):  # first with lost connections in the pool, then with an empty pool
            server.kill()
            await _rejected(database, DatabaseUnavailable, "PostgreSQL at")
            server.start()
            await database.require_current()
        monkeypatch.setattr(module, "CLOSE_TIMEOUT_S", 0.1)
        server.pause()
        with pytest.raises(DatabaseUnavailable, match="did not answer within"):
            async with database.begin(timeout_s=0.2):
                pass
        await database.close()
        server.resume()
        await database.require_current()
        await database.close()
    assert PASSWORD not in caplog.text


async def _rejected(database: Database, kind: type[DatabaseError], expected_error: str) -> None:
    with pytest.raises(kind, match=expected_error) as raised:
        await database.revision()
    assert type(raised.value) is kind, raised.value
    assert PASSWORD not in _whole(raised.value), raised.value
    assert "\n" not in str(raised.value)
    await database.close()


def _whole(error: BaseException) -> str:
    """Format an exception with all its causes, as a log would."""
    return "".join(traceback.format_exception(error)) + repr(error)
