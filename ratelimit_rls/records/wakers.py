"""How a process hears that something has changed: PostgreSQL notifies it, and of SQLite it asks whether anybody wrote.

Both run until cancelled, and raise RecordsError when they cannot go on. What is missed meanwhile is seen by asking.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Callable
from typing import Any

from ratelimit_rls.errors import RecordsUnavailable, one_line
from ratelimit_rls.records.database import CLOSE_S, Database
from ratelimit_rls.records.desk import CHANNEL

SQLITE_EVERY_S = 0.25
PING_EVERY_S = 10.0
PING_S = 5.0
"""A connection that a firewall has forgotten looks as if nothing changed: it must answer now and then."""


async def listen(database: Database, wake: Callable[[], None]) -> None:
    """To PostgreSQL. Wakes once at the start: whatever was told before nobody heard."""
    import asyncpg

    connection = await database.connect_alone()
    lost = asyncio.Event()
    try:
        connection.add_termination_listener(lambda _: lost.set())
        await connection.add_listener(CHANNEL, lambda *_: wake())
        wake()
        while not lost.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PING_EVERY_S):
                    await lost.wait()
                break
            await connection.fetchval("SELECT 1", timeout=PING_S)
    except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
        pass  # it is lost, however that shows
    finally:
        await _bye(connection)
    raise RecordsUnavailable(f"{database.shown}: the connection that changes are told on was lost")


async def _bye(connection: Any) -> None:
    try:
        async with asyncio.timeout(CLOSE_S):
            await connection.close()
    except Exception:
        connection.terminate()


async def look(database: Database, wake: Callable[[], None]) -> None:
    """At SQLite's own count of commits by others: a look at shared memory, so that no thread is needed for it."""
    seen: int | None = None
    try:
        # Never one that makes the file: it would be for everybody to read.
        with contextlib.closing(sqlite3.connect(f"{database.path.absolute().as_uri()}?mode=rw", uri=True)) as watch:
            while True:
                database.require_same_file()  # the count is that of the file that was opened, be it moved
                (now,) = watch.execute("PRAGMA data_version").fetchone()
                if now != seen:
                    seen = now
                    wake()
                await asyncio.sleep(SQLITE_EVERY_S)
    except sqlite3.Error as error:
        raise RecordsUnavailable(f"{database.shown} cannot be watched: {one_line(str(error))}") from None
