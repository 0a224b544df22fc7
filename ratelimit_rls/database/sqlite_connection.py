"""SQLite connections that really end when they are closed.

`sqlite3.Connection.close()` uses sqlite3_close_v2: while a cursor has an unfinished statement, the connection lives on
with its transaction and its write lock. A cancelled coroutine leaves such a cursor in the traceback of its exception,
which is part of a reference cycle that the tuned garbage collector may never free. So cursors are closed and the
transaction is rolled back explicitly.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import weakref
from typing import Any

import aiosqlite

CLOSE_TIMEOUT_S = 1.0


class ClosingConnection(sqlite3.Connection):
    """Closes all cursors before a rollback or close. Must be used in one thread only, as aiosqlite does."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._cursors: weakref.WeakSet[sqlite3.Cursor] = weakref.WeakSet()

    def cursor(self, *arguments: Any, **options: Any) -> Any:
        made = super().cursor(*arguments, **options)
        self._cursors.add(made)
        return made

    def rollback(self) -> None:
        """End pending reads, too: an unfinished SELECT would keep its snapshot, and the WAL could not be truncated."""
        for cursor in list(self._cursors):
            cursor.close()
        super().rollback()

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):  # if the rollback fails, the transaction ends with the connection
            self.rollback()
        super().close()


class InterruptibleConnection(aiosqlite.Connection):
    """Interrupts the running statement if its caller is cancelled, so that ROLLBACK need not wait for it."""

    def __init__(self, uri: str) -> None:
        super().__init__(lambda: sqlite3.connect(uri, uri=True, factory=ClosingConnection), iter_chunk_size=64)
        self._thread.daemon = True  # a running statement does not prevent the process from exiting

    async def _execute(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return await super()._execute(fn, *args, **kwargs)  # type: ignore[no-untyped-call]
        except asyncio.CancelledError:
            with contextlib.suppress(sqlite3.ProgrammingError):  # its thread has just closed the connection
                if self._connection is not None:
                    self._connection.interrupt()  # safe from any thread
            raise

    async def close(self) -> None:
        """Close the connection in its thread, after the running statement. Does not wait for a hanging disk."""
        if self._connection is None or not self._running:
            return
        ended = self.stop()
        if ended is not None:
            with contextlib.suppress(TimeoutError, sqlite3.Error):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await asyncio.shield(ended)
