"""Transactions on one database: a SQLite file, or PostgreSQL.

    begin()    reads and writes; SQLite: the only writer meanwhile
    reading()  reads, in one consistent snapshot

Errors of the database within either raise DatabaseError, or DatabaseUnavailable if it cannot be reached.

Only `upgrade` creates a SQLite file, and only if none was used before. Once a file was used, a missing or replaced file
is an outage. `require_current` ends it if the new file is usable. So nothing is written to a replaced file before the
change follower has read everything from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import weakref
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import URL, Connection, event, text
from sqlalchemy.exc import DisconnectionError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry

from ratelimit_rls.database import migrations
from ratelimit_rls.database.database_url import parse_database_url
from ratelimit_rls.database.driver_errors import connect_error, translate_error
from ratelimit_rls.database.pooled_connection import END_TIMEOUT_S, PooledConnection
from ratelimit_rls.database.priority_lock import PriorityLock
from ratelimit_rls.database.sqlite_connection import InterruptibleConnection
from ratelimit_rls.database.sqlite_file import SqliteFile
from ratelimit_rls.database.uncancellable import run_to_completion
from ratelimit_rls.database.write_health import WriteHealth
from ratelimit_rls.errors import DatabaseError, DatabaseUnavailable

if TYPE_CHECKING:
    import aiosqlite
    import asyncpg

TRANSACTION_TIMEOUT_S = 10.0
"""Timeout of a whole transaction, including the connection."""

BACKGROUND_TIMEOUT_S = 5.0
"""Shorter, so that a change by an administrator outlasts a background write that it waits for."""

LOCK_TIMEOUT_S = 5.0
BACKGROUND_LOCK_TIMEOUT_S = 2.0
"""Timeout of SQLite's lock while another process has it. Changes queue behind a background write that waits for it."""

OPEN_TIMEOUT_S = 10.0
"""Timeout of connecting and BEGIN. Applies even if the caller was cancelled."""

CONNECT_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 5.0
UPGRADE_TIMEOUT_S = 3600.0

POOL_SIZE = 3
MAX_CONNECTIONS = 8
"""Connections of one process, besides the one for notifications. PostgreSQL allows 100 in total by default."""

_LOCK_TIMEOUT_OPTION = "rls_lock_s"
"""Execution option of write transactions: the timeout of SQLite's lock."""

_CHANGE_LOCK = 0x726C_735F_6368  # "rls_ch"
_UPGRADE_LOCK = 0x726C_735F_7570  # "rls_up"

_SQLITE_PRAGMAS = (
    "PRAGMA journal_mode = WAL",  # readers and the writer do not block each other
    "PRAGMA synchronous = FULL",  # a confirmed change survives a power cut; NORMAL could lose the last ones
    f"PRAGMA busy_timeout = {int(LOCK_TIMEOUT_S * 1000)}",
    "PRAGMA foreign_keys = ON",
)


class Database:
    """A database. Connects on first use, so it can be created while the database is unavailable."""

    def __init__(self, url: str) -> None:
        """Raises SettingsError if the URL is invalid."""
        self._url = parse_database_url(url)
        self.dialect = self._url.dialect
        self.display_name = self._url.display_name
        """Location for messages, without credentials."""
        # SQLite has one writer at a time, and others only retry now and then: writers of this process queue instead.
        self._write_lock = PriorityLock() if self.dialect == "sqlite" else None
        self._write_health = WriteHealth()
        self._ending: set[asyncio.Task[None]] = set()  # ends of connections whose callers were cancelled while opening
        self._drivers: weakref.WeakSet[asyncpg.Connection[Any]] = weakref.WeakSet()
        self._file = SqliteFile(self._url.path, self.display_name)  # without use for PostgreSQL
        self._was_current = False
        self._engine = self._sqlite_engine() if self.dialect == "sqlite" else self._postgres_engine()

    @property
    def path(self) -> Path:
        """Path of the SQLite file."""
        return self._url.path

    def require_same_file(self) -> None:
        """Raise DatabaseUnavailable unless the SQLite file is the one used before. The first call accepts any file."""
        self._file.require_same()

    @contextlib.asynccontextmanager
    async def begin(
        self, timeout_s: float | None = None, *, background: bool = False
    ) -> AsyncIterator[AsyncConnection]:
        """Run one transaction: committed at the end, rolled back by an exception or a cancellation.

        A cancellation during COMMIT is delivered afterwards, at the caller's next await: if the block ends without an
        exception, the transaction is committed. `background` is for writes that can wait: with SQLite all others go
        first, and they have shorter timeouts.
        """
        if timeout_s is None:
            timeout_s = BACKGROUND_TIMEOUT_S if background else TRANSACTION_TIMEOUT_S
        try:
            options = {_LOCK_TIMEOUT_OPTION: BACKGROUND_LOCK_TIMEOUT_S if background else LOCK_TIMEOUT_S}
            async with self._transaction(timeout_s, options, background=background) as connection:
                yield connection
        except DatabaseUnavailable as error:
            self._write_health.failed(str(error))
            raise
        self._write_health.succeeded()

    @contextlib.asynccontextmanager
    async def reading(self, timeout_s: float = TRANSACTION_TIMEOUT_S) -> AsyncIterator[AsyncConnection]:
        """Run a read-only transaction in one snapshot: concurrent commits are not visible."""
        options: dict[str, Any] = {}
        if self.dialect == "postgresql":
            options = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
        async with self._transaction(timeout_s, options) as connection:
            yield connection

    async def serialise(self, connection: AsyncConnection) -> None:
        """Block other transactions that call this until this one ends, so that their writes are in commit order."""
        if self.dialect == "postgresql":  # for SQLite, begin() did it
            await connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _CHANGE_LOCK})

    @property
    def write_health(self) -> WriteHealth:
        """Health of write transactions."""
        return self._write_health

    @contextlib.asynccontextmanager
    async def _transaction(
        self, timeout_s: float, options: dict[str, Any], *, background: bool = False
    ) -> AsyncIterator[AsyncConnection]:
        """Run a transaction and translate errors of the database. The caller's own exceptions pass unchanged.

        A cancellation reaches the driver only within the caller's block. Everything before and after runs in separate
        tasks that are never cancelled and end in bounded time: `_open`, COMMIT, and `PooledConnection.end`.
        """
        pooled: PooledConnection | None = None
        try:
            try:
                async with asyncio.timeout(timeout_s) as patience:
                    pooled = await self._acquire(timeout_s, options, background=background)
                    yield pooled.connection
                if _LOCK_TIMEOUT_OPTION in options:
                    await run_to_completion(pooled.commit())
            finally:
                if pooled is not None:
                    await run_to_completion(pooled.end())
        except TimeoutError as error:
            if not patience.expired():
                raise
            raise DatabaseUnavailable(f"{self.display_name} did not answer within {timeout_s:g} s") from error
        except SQLAlchemyError as error:
            raise translate_error(error, self.display_name) from None

    async def _acquire(self, timeout_s: float, options: dict[str, Any], *, background: bool) -> PooledConnection:
        """Open a connection with a transaction. If the caller is cancelled, it is returned once it is open."""
        turn = self._write_lock if _LOCK_TIMEOUT_OPTION in options else None
        if turn is not None:
            await turn.acquire(background=background)
        opening = asyncio.ensure_future(self._open(timeout_s, options, turn))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            self._in_background(_end_when_open(opening))
            raise

    async def _open(
        self, timeout_s: float, options: dict[str, Any], write_lock: PriorityLock | None
    ) -> PooledConnection:
        pooled = PooledConnection(self._engine.connect(), self.display_name, write_lock)
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                if self.dialect == "sqlite":
                    await self._require_file()
                await pooled.connection.start()
                pooled.driver = (await pooled.connection.get_raw_connection()).driver_connection
                if options:
                    await pooled.connection.execution_options(**options)
                await pooled.connection.begin()
                if self.dialect == "postgresql":  # the server stops even if its response never arrives
                    limit = f"SET LOCAL statement_timeout = {int(timeout_s * 1000)}"
                    await pooled.connection.execute(text(limit))
        except TimeoutError as error:
            await pooled.end()
            raise DatabaseUnavailable(f"{self.display_name} did not answer within {OPEN_TIMEOUT_S:g} s") from error
        except BaseException:
            await pooled.end()
            raise
        return pooled

    async def _require_file(self) -> None:
        try:
            self.require_same_file()
        except DatabaseUnavailable:
            await self._release_file()
            raise

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def revision(self) -> str | None:
        """Return the schema revision; None: there is no schema yet."""
        if self.dialect == "sqlite" and self._file.used is None and self._file.on_disk() is None:
            return None  # do not create a file by connecting
        async with self.reading() as connection:
            if not await connection.run_sync(_has_versions):
                return None
            found: str | None = await connection.scalar(text("SELECT version_num FROM alembic_version"))
            return found

    async def upgrade(self, to: str = "head") -> None:
        """Upgrade the schema in one transaction. Concurrent upgrades run one after the other."""
        if self.dialect == "sqlite" and self._file.used is None:
            self._file.create()
        async with self.begin(UPGRADE_TIMEOUT_S) as connection:
            if self.dialect == "postgresql":
                await connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _UPGRADE_LOCK})
            await connection.run_sync(migrations.upgrade, to)

    async def require_current(self) -> None:
        """Raise DatabaseError unless the schema is that of this version. SQLite is upgraded automatically."""
        used = self._file.used
        if self.dialect == "sqlite":
            await self._adopt_file()
        try:
            await self._ensure_current()
        except BaseException:
            self._file.used = used or self._file.used  # keep the previous file if the new one is unusable
            raise
        self._was_current = True

    async def _ensure_current(self) -> None:
        needed, has = migrations.latest_revision(), await self.revision()
        if has == needed:
            return
        if has is not None and has not in migrations.revisions():
            raise DatabaseError(
                f"the database is at revision {has}, which this version of the service does not know: it knows "
                f"{needed} and older; run the version that upgraded it, or a later one"
            )
        if self.dialect == "sqlite":
            if has is None and self._was_current:
                raise self._file.empty_error()
            await self.upgrade()
            return
        at = f"at revision {has}" if has else "empty"
        raise DatabaseError(f"the database is {at} and this version needs {needed}; run `ratelimit-rls db upgrade`")

    async def connect_unpooled(self) -> asyncpg.Connection[Any]:
        """Return a PostgreSQL connection that is not pooled; the caller closes it."""
        import asyncpg

        named = {} if "application_name=" in self._url.dsn else {"application_name": "ratelimit-rls"}
        try:
            return await asyncpg.connect(self._url.dsn, timeout=CONNECT_TIMEOUT_S, server_settings=named)
        except (OSError, ValueError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            raise connect_error(error, self.display_name) from None

    async def close(self) -> None:
        """Close all connections in bounded time, even if the server hangs."""
        with contextlib.suppress(TimeoutError, SQLAlchemyError, OSError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):  # a hanging server does not complete the shutdown
                if self._ending:
                    await asyncio.wait(self._ending)
                await self._engine.dispose()
        for driver in list(self._drivers):
            if not driver.is_closed():
                driver.terminate()
        for task in self._ending:
            task.cancel()
        if self._ending:
            await asyncio.wait(self._ending, timeout=END_TIMEOUT_S)

    async def _connect_pooled(self) -> asyncpg.Connection[Any]:
        driver = await self.connect_unpooled()
        self._drivers.add(driver)
        return driver

    async def _connect_sqlite(self) -> aiosqlite.Connection:
        # mode=rw never creates the file: a new one would be readable by everyone, and replace one that was moved.
        return await InterruptibleConnection(f"{self.path.absolute().as_uri()}?mode=rw")

    def _postgres_engine(self) -> AsyncEngine:
        return create_async_engine(
            "postgresql+asyncpg://",
            async_creator=self._connect_pooled,
            pool_size=POOL_SIZE,
            max_overflow=MAX_CONNECTIONS - POOL_SIZE,
            pool_timeout=TRANSACTION_TIMEOUT_S / 2,
            pool_pre_ping=True,
            hide_parameters=True,
        )

    def _sqlite_engine(self) -> AsyncEngine:
        engine = create_async_engine(
            URL.create("sqlite+aiosqlite", database=str(self.path.absolute())),
            async_creator=self._connect_sqlite,
            pool_size=POOL_SIZE,
            max_overflow=MAX_CONNECTIONS - POOL_SIZE,
            pool_timeout=TRANSACTION_TIMEOUT_S / 2,
            hide_parameters=True,
        )

        @event.listens_for(engine.sync_engine, "connect")
        def prepare(connection: Any, record: ConnectionPoolEntry) -> None:
            self.require_same_file()  # before anything is written
            record.info["file"] = self._file.used
            connection.isolation_level = None  # else the driver begins transactions by itself
            cursor = connection.cursor()
            for pragma in _SQLITE_PRAGMAS:
                cursor.execute(pragma)
            cursor.close()

        @event.listens_for(engine.sync_engine, "checkout")
        def check(_connection: Any, record: ConnectionPoolEntry, _proxy: object) -> None:
            if record.info["file"] != self._file.used:
                raise DisconnectionError  # in use when the file was replaced: the pool opens a new one

        @event.listens_for(engine.sync_engine, "begin")
        def begin(connection: Connection) -> None:
            # SQLite rejects a transaction that reads first and then writes if another has written in between. So
            # write transactions take the lock at once, and wait for it.
            lock_s = connection.get_execution_options().get(_LOCK_TIMEOUT_OPTION)
            if lock_s is not None:
                connection.exec_driver_sql(f"PRAGMA busy_timeout = {int(lock_s * 1000)}")
            connection.exec_driver_sql("BEGIN" if lock_s is None else "BEGIN IMMEDIATE")

        return engine

    async def _adopt_file(self) -> None:
        """Use the file that is now at the path if it was replaced, e.g. by a backup."""
        there = self._file.on_disk()
        if self._file.used is None or there in (None, self._file.used):
            return
        await run_to_completion(self._release_file())
        if self._was_current:
            self._file.require_content()
        self._file.used = there

    async def _release_file(self) -> None:
        """Close the connections to the current file, wherever it was moved.

        The last commits are in the WAL file beside its old path. They are checkpointed into the database file, so that
        it is complete wherever it was moved, and its WAL is not mistaken for that of a new file.
        """
        for _ in range(self._engine.pool.checkedin()):  # type: ignore[attr-defined]
            with contextlib.suppress(SQLAlchemyError, sqlite3.Error, DatabaseUnavailable):  # some may be closed already
                async with self._engine.connect() as connection:
                    await connection.run_sync(_checkpoint)
                    await connection.invalidate()  # those in use are closed on return


async def _end_when_open(opening: asyncio.Task[PooledConnection]) -> None:
    try:
        pooled = await opening
    except Exception:
        return  # it failed to open and has ended; the caller is gone
    await pooled.end()


def _has_versions(connection: Connection) -> bool:
    return connection.dialect.has_table(connection, "alembic_version")


def _checkpoint(connection: Connection) -> None:
    """Checkpoint the WAL of SQLite. Must run outside of a transaction."""
    cursor = connection.connection.cursor()
    cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    cursor.close()
