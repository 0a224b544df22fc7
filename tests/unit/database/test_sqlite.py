"""SQLite connections that are closed while one of their cursors is still in use."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from ratelimit_rls.database.sqlite_connection import ClosingConnection


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "records.db"
    with closing(sqlite3.connect(path)) as first:
        first.execute("PRAGMA journal_mode = WAL")
        first.execute("CREATE TABLE numbers (number INTEGER)")
        first.executemany("INSERT INTO numbers VALUES (?)", [(number,) for number in range(100)])
        first.commit()
    return path


@pytest.fixture
def other(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as other:
        yield other


def abandoned(path: Path, *, writes: bool) -> tuple[ClosingConnection, sqlite3.Cursor]:
    """Return a connection in a transaction with an unfinished SELECT, and its cursor."""
    connection = sqlite3.connect(path, isolation_level=None, factory=ClosingConnection)
    assert isinstance(connection, ClosingConnection)
    connection.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
    if writes:
        connection.execute("DELETE FROM numbers WHERE number = 1")
    cursor = connection.cursor()
    cursor.execute("SELECT number FROM numbers")
    cursor.fetchone()
    return connection, cursor


def is_free(other: sqlite3.Connection) -> bool:
    """Return whether no other connection reads or writes."""
    other.execute("BEGIN IMMEDIATE")
    other.execute("UPDATE numbers SET number = number + 1")
    other.execute("COMMIT")
    busy, _, _ = other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    return not busy


@pytest.mark.parametrize("end", ["close", "rollback"])
@pytest.mark.parametrize("writes", [True, False], ids=["writer", "reader"])
def test_transaction_ends_with_the_connection(path: Path, other: sqlite3.Connection, end: str, writes: bool) -> None:
    assert is_free(other)
    other.execute("UPDATE numbers SET number = number + 1")  # in the WAL, which the reader then reads
    connection, cursor = abandoned(path, writes=writes)
    getattr(connection, end)()
    assert is_free(other)
    assert other.execute("SELECT count(*) FROM numbers").fetchone() == (100,)
    del cursor
    connection.close()
