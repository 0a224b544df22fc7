"""A pooled connection for one transaction. It returns to the pool even if its user is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import structlog
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from ratelimit_rls.database.driver_errors import translate_error
from ratelimit_rls.database.priority_lock import PriorityLock
from ratelimit_rls.errors import DatabaseUnavailable

COMMIT_TIMEOUT_S = 5.0
END_TIMEOUT_S = 2.0
"""Timeout of ROLLBACK and the return to the pool; after it the connection is terminated."""

_log = structlog.get_logger()


class PooledConnection:
    """A pooled connection, in use. `commit` and `end` take bounded time, and are not cancelled (uncancellable.py)."""

    def __init__(self, connection: AsyncConnection, display_name: str, write_lock: PriorityLock | None) -> None:
        """`write_lock` is released at the end, when the transaction is over for the database, too."""
        self.connection = connection
        self.driver: Any = None  # the connection of asyncpg or aiosqlite, once open
        self._display_name = display_name
        self._write_lock = write_lock

    async def commit(self) -> None:
        """Commit the transaction.

        Raises DatabaseUnavailable if it was not committed, or if the server did not answer in time.
        """
        transaction = self.connection.get_transaction()
        if self.connection.invalidated:
            raise DatabaseUnavailable(f"{self._display_name}: the connection was lost before the commit")
        if transaction is None or not transaction.is_active:
            return  # rolled back by the caller
        try:
            async with asyncio.timeout(COMMIT_TIMEOUT_S):
                await transaction.commit()
        except TimeoutError as error:
            raise DatabaseUnavailable(
                f"{self._display_name} did not answer COMMIT within {COMMIT_TIMEOUT_S:g} s: the outcome is unknown"
            ) from error
        except SQLAlchemyError as error:
            failure = translate_error(error, self._display_name)
            if self.connection.invalidated:
                raise DatabaseUnavailable(f"{failure}, during COMMIT: the outcome is unknown") from None
            raise failure from None

    async def end(self) -> None:
        """Roll back unless committed, and return the connection to the pool; close it if it is unusable."""
        try:
            if self.connection.sync_connection is not None:
                async with asyncio.timeout(END_TIMEOUT_S):
                    await self.connection.close()
        except BaseException as error:
            _log.warning("database_connection_terminated", error=f"{type(error).__name__}: {error}")
            self._terminate()
            if not isinstance(error, Exception):
                raise
        finally:
            if self._write_lock is not None:
                self._write_lock.release()
                self._write_lock = None

    def _terminate(self) -> None:
        """Close the socket at once, without a message to the server, which then rolls back the transaction."""
        if self.driver is None:
            return
        with contextlib.suppress(Exception):
            if hasattr(self.driver, "terminate"):  # asyncpg
                self.driver.terminate()
            else:  # aiosqlite: in its thread, after the current statement
                self.driver.stop()
