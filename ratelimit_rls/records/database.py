"""One database: SQLite in a file, or PostgreSQL. Whoever uses it begins a transaction and hears of nothing but it.

    begin()    reads and writes; SQLite: nobody else writes meanwhile
    reading()  reads, all of it as of one moment

Whatever goes wrong with the database inside of either is RecordsError, and RecordsUnavailable where it is away.

A SQLite file is made by `upgrade` alone, and only if none was used before. From then on another one in its place, or
none, is an outage, which `require_current` ends if what is there can be used: so nothing is written to it before those
were told who hold what the old one said, and read everything anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import URL, Connection, event, text
from sqlalchemy.exc import DisconnectionError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry

from ratelimit_rls.errors import RecordsError, RecordsUnavailable
from ratelimit_rls.records import migrations
from ratelimit_rls.records.faults import not_connected, translated
from ratelimit_rls.records.url import parse_database_url

if TYPE_CHECKING:
    import asyncpg

PATIENCE_S = 10.0
"""For a whole transaction, connecting included."""

CONNECT_S = 5.0
CLOSE_S = 5.0
UPGRADE_S = 3600.0

POOL = 3
MOST_CONNECTIONS = 8
"""Of one process, beside the one it hears of changes on. PostgreSQL has 100 for all by default."""

_CHANGE_LOCK = 0x726C_735F_6368  # "rls_ch"
_UPGRADE_LOCK = 0x726C_735F_7570  # "rls_up"

_SQLITE_PRAGMAS = (
    "PRAGMA journal_mode = WAL",  # readers and the writer do not wait for each other
    "PRAGMA synchronous = FULL",  # a change that was answered survives a power cut; NORMAL would lose the last ones
    f"PRAGMA busy_timeout = {int(PATIENCE_S * 500)}",
    "PRAGMA foreign_keys = ON",
)


FileId = tuple[int, int]
"""A file, wherever it is moved: the system's number of the disk, and of the file there."""


class Database:
    """Connects when first used, so that one can be had while the database is away."""

    def __init__(self, url: str) -> None:
        """SettingsError if the URL cannot be used."""
        self._url = parse_database_url(url)
        self.dialect = self._url.dialect
        self.shown = self._url.shown
        """For messages: where it is, and nothing else."""
        # SQLite has one writer at a time, and lets others try again now and then: ours wait in a queue instead.
        self._turn = asyncio.Lock() if self.dialect == "sqlite" else None
        self._file: FileId | None = None  # SQLite's, which all connections are to; None: it was not used yet
        self._was_current = False
        self._engine = self._sqlite_engine() if self.dialect == "sqlite" else self._postgres_engine()

    @property
    def path(self) -> Path:
        """Of SQLite's file."""
        return self._url.path

    def require_same_file(self) -> None:
        """RecordsUnavailable unless SQLite's file is the one that was used before. The first one is."""
        there = self._file_there()
        if there is None:
            raise RecordsUnavailable(f"{self.shown} is not there: put it back where it was")
        if self._file is None:
            self._file = there
        elif there != self._file:
            raise RecordsUnavailable(f"{self.shown} was replaced by another file, which has to be read first")

    @contextlib.asynccontextmanager
    async def begin(self, patience_s: float = PATIENCE_S) -> AsyncIterator[AsyncConnection]:
        """One transaction, committed at the end, undone by any exception."""
        async with self._transaction(patience_s, {"rls_immediate": True}, self._turn) as connection:
            yield connection

    @contextlib.asynccontextmanager
    async def reading(self, patience_s: float = PATIENCE_S) -> AsyncIterator[AsyncConnection]:
        """One snapshot: what others commit meanwhile is not seen."""
        options: dict[str, Any] = {}
        if self.dialect == "postgresql":
            options = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
        async with self._transaction(patience_s, options) as connection:
            yield connection

    async def serialise(self, connection: AsyncConnection) -> None:
        """Until the transaction ends, no other that calls this goes on: what they write is in the order of commits."""
        if self.dialect == "postgresql":  # SQLite's begin() did it
            await connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _CHANGE_LOCK})

    @contextlib.asynccontextmanager
    async def _transaction(
        self,
        patience_s: float,
        options: dict[str, Any],
        turn: AbstractAsyncContextManager[Any] | None = None,
    ) -> AsyncIterator[AsyncConnection]:
        """The exceptions of the caller's own block pass as they are, as long as they are not the database's."""
        turn = turn or contextlib.nullcontext()
        try:
            async with asyncio.timeout(patience_s) as patience, turn, self._connected() as connection:
                if options:
                    await connection.execution_options(**options)
                async with connection.begin():
                    if self.dialect == "postgresql":  # should the answer never reach us, the server need not go on
                        await connection.execute(text(f"SET LOCAL statement_timeout = {int(patience_s * 1000)}"))
                    yield connection
        except TimeoutError as error:
            if not patience.expired():
                raise
            raise RecordsUnavailable(f"{self.shown} did not answer within {patience_s:g} s") from error
        except SQLAlchemyError as error:
            raise translated(error, self.shown) from None

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncIterator[AsyncConnection]:
        if self.dialect == "sqlite":
            try:
                self.require_same_file()
            except RecordsUnavailable:
                await self._let_go()
                raise
        async with self._engine.connect() as connection:
            yield connection

    async def revision(self) -> str | None:
        """Of its schema; None: there is none yet."""
        if self.dialect == "sqlite" and self._file is None and self._file_there() is None:
            return None  # looking makes no file
        async with self.reading() as connection:
            if not await connection.run_sync(_has_versions):
                return None
            found: str | None = await connection.scalar(text("SELECT version_num FROM alembic_version"))
            return found

    async def upgrade(self, to: str = "head") -> None:
        """To the newest schema, all or nothing. Two that do so at once do it one after the other."""
        if self.dialect == "sqlite" and self._file is None:
            self._make_file()
        async with self.begin(UPGRADE_S) as connection:
            if self.dialect == "postgresql":
                await connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _UPGRADE_LOCK})
            await connection.run_sync(migrations.upgrade, to)

    async def require_current(self) -> None:
        """RecordsError unless the schema is this version's. The embedded database is brought there."""
        used = self._file
        if self.dialect == "sqlite":
            await self._take_file()
        try:
            await self._become_current()
        except BaseException:
            self._file = used or self._file  # what cannot be used is not used in place of what could
            raise
        self._was_current = True

    async def _become_current(self) -> None:
        needed, has = migrations.newest(), await self.revision()
        if has == needed:
            return
        if has is not None and has not in migrations.known():
            raise RecordsError(
                f"the database is at revision {has}, which is newer than this version of the service; it knows "
                f"{needed} and older: run the version that upgraded it, or one after that"
            )
        if self.dialect == "sqlite":
            if has is None and self._was_current:
                raise self._is_empty()
            await self.upgrade()
            return
        at = f"at revision {has}" if has else "empty"
        raise RecordsError(f"the database is {at} and this version needs {needed}; run `ratelimit-rls db upgrade`")

    async def connect_alone(self) -> asyncpg.Connection[Any]:
        """A connection to PostgreSQL that is nobody else's; the caller closes it."""
        import asyncpg

        named = {} if "application_name=" in self._url.dsn else {"application_name": "ratelimit-rls"}
        try:
            return await asyncpg.connect(self._url.dsn, timeout=CONNECT_S, server_settings=named)
        except (OSError, ValueError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            raise not_connected(error, self.shown) from None

    async def close(self) -> None:
        with contextlib.suppress(TimeoutError, SQLAlchemyError, OSError):
            async with asyncio.timeout(CLOSE_S):  # a server that hangs says no goodbye
                await self._engine.dispose()

    def _postgres_engine(self) -> AsyncEngine:
        return create_async_engine(
            "postgresql+asyncpg://",
            async_creator=self.connect_alone,
            pool_size=POOL,
            max_overflow=MOST_CONNECTIONS - POOL,
            pool_timeout=PATIENCE_S / 2,
            pool_pre_ping=True,
            hide_parameters=True,
        )

    def _sqlite_engine(self) -> AsyncEngine:
        engine = create_async_engine(
            # Never one that makes the file: it would be for everybody to read, and in place of one that was moved.
            URL.create("sqlite+aiosqlite", database=self.path.absolute().as_uri(), query={"uri": "true", "mode": "rw"}),
            pool_size=POOL,
            max_overflow=MOST_CONNECTIONS - POOL,
            pool_timeout=PATIENCE_S / 2,
            hide_parameters=True,
        )

        @event.listens_for(engine.sync_engine, "connect")
        def prepare(connection: Any, record: ConnectionPoolEntry) -> None:
            self.require_same_file()  # before anything is written to it
            record.info["file"] = self._file
            connection.isolation_level = None  # the driver would begin transactions when it sees fit
            cursor = connection.cursor()
            for pragma in _SQLITE_PRAGMAS:
                cursor.execute(pragma)
            cursor.close()

        @event.listens_for(engine.sync_engine, "checkout")
        def check(_connection: Any, record: ConnectionPoolEntry, _proxy: object) -> None:
            if record.info["file"] != self._file:
                raise DisconnectionError  # it was in use when the file was replaced: another one is made

        @event.listens_for(engine.sync_engine, "begin")
        def begin(connection: Connection) -> None:
            # A transaction that reads first and then wants to write is refused if another wrote meanwhile: so those
            # that will write say so at once, and wait for their turn.
            is_immediate = connection.get_execution_options().get("rls_immediate")
            connection.exec_driver_sql("BEGIN IMMEDIATE" if is_immediate else "BEGIN")

        return engine

    def _file_there(self) -> FileId | None:
        try:
            found = self.path.stat()
        except OSError:  # also one that cannot be looked at
            return None
        return found.st_dev, found.st_ino

    async def _take_file(self) -> None:
        """From now on the one that is there, if it is another one: it may have come from a backup."""
        there = self._file_there()
        if self._file is None or there in (None, self._file):
            return
        await self._let_go()
        with contextlib.suppress(OSError):  # it went again
            if self._was_current and self.path.stat().st_size == 0:  # not opened: it may be about to be filled
                raise self._is_empty()
        self._file = there

    def _is_empty(self) -> RecordsUnavailable:
        return RecordsUnavailable(f"{self.shown} was replaced by a file that is empty: put the right one there")

    async def _let_go(self) -> None:
        """Of the file that connections are open to, wherever it is now.

        What was committed last is in a second file, beside where it was. It is moved into the first, so that this is
        whole wherever it was brought, and nothing of it is taken for a part of the file that comes in its place.
        """
        for _ in range(self._engine.pool.checkedin()):  # type: ignore[attr-defined]
            with contextlib.suppress(SQLAlchemyError, sqlite3.Error, RecordsUnavailable):  # some are closed already
                async with self._engine.connect() as connection:
                    await connection.run_sync(_checkpoint)
                    await connection.invalidate()  # those in use are closed when they are not

    def _make_file(self) -> None:
        """For its owner alone, before SQLite makes one for everybody; whole at once, should another make it, too."""
        path = self._url.path
        if path.exists():
            return
        fresh = path.with_name(f".{path.name}.{os.getpid()}.new")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(fresh, os.O_CREAT | os.O_RDWR, 0o600))
            with contextlib.closing(sqlite3.connect(fresh)) as new:
                # Before anything is in it, or never: what retention deletes gives its space back.
                new.execute("PRAGMA auto_vacuum = INCREMENTAL")
                new.execute("PRAGMA journal_mode = WAL")
            with contextlib.suppress(FileExistsError):
                os.link(fresh, path)
        except (OSError, sqlite3.Error) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise RecordsUnavailable(
                f"{self.shown} cannot be made: {why}; the service's user must be able to write there"
            ) from None
        finally:
            with contextlib.suppress(OSError):
                fresh.unlink()


def _has_versions(connection: Connection) -> bool:
    return connection.dialect.has_table(connection, "alembic_version")


def _checkpoint(connection: Connection) -> None:
    """Of SQLite, outside of any transaction."""
    cursor = connection.connection.cursor()
    cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    cursor.close()
