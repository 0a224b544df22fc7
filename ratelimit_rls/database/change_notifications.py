"""Notifications of changes: LISTEN/NOTIFY of PostgreSQL, and polling the data version of SQLite.

Both functions run until cancelled, and raise DatabaseError when they cannot go on. Changes missed in between are found
by reading the change feed.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Callable
from typing import Any

from ratelimit_rls.database.database import CLOSE_TIMEOUT_S, Database
from ratelimit_rls.database.repository import NOTIFY_CHANNEL
from ratelimit_rls.errors import DatabaseUnavailable, one_line

SQLITE_POLL_S = 0.25
PING_INTERVAL_S = 10.0
PING_TIMEOUT_S = 5.0
"""A connection dropped by a firewall looks like one without changes, so it is checked regularly."""


async def listen_postgres(database: Database, wake: Callable[[], None]) -> None:
    """Listen to PostgreSQL. Calls `wake` once at the start, because earlier notifications were missed."""
    import asyncpg

    connection = await database.connect_unpooled()
    lost = asyncio.Event()
    try:
        connection.add_termination_listener(lambda _: lost.set())
        await connection.add_listener(NOTIFY_CHANNEL, lambda *_: wake())
        wake()
        while not lost.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PING_INTERVAL_S):
                    await lost.wait()
                break
            await connection.fetchval("SELECT 1", timeout=PING_TIMEOUT_S)
    except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
        pass  # the connection was lost; all of these mean that
    finally:
        await _close(connection)
    raise DatabaseUnavailable(f"{database.display_name}: the connection for change notifications was lost")


async def _close(connection: Any) -> None:
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await connection.close()
    except BaseException as error:
        connection.terminate()
        if not isinstance(error, Exception):
            raise


async def poll_sqlite(database: Database, wake: Callable[[], None]) -> None:
    """Poll SQLite's count of commits by other connections. It is read from shared memory, so no thread is needed."""
    seen: int | None = None
    try:
        # mode=rw never creates the file: a new one would be readable by everyone.
        with contextlib.closing(sqlite3.connect(f"{database.path.absolute().as_uri()}?mode=rw", uri=True)) as watch:
            while True:
                database.require_same_file()  # the count belongs to the file that was opened, even if moved
                (now,) = watch.execute("PRAGMA data_version").fetchone()
                if now != seen:
                    seen = now
                    wake()
                await asyncio.sleep(SQLITE_POLL_S)
    except sqlite3.Error as error:
        raise DatabaseUnavailable(f"{database.display_name} cannot be watched: {one_line(str(error))}") from None
