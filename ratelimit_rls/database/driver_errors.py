"""Translation of driver errors into DatabaseError or DatabaseUnavailable, with messages that reveal nothing secret.

Drivers quote statements, parameters and connection strings; none of that is passed on. Messages of a database about its
own state ("the database system is starting up") are.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sqlite3

from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from ratelimit_rls.errors import DatabaseError, DatabaseUnavailable, one_line

_UNAVAILABLE_STATES = ("08", "53", "57", "25006", "40", "55P03")
"""SQLSTATEs, or prefixes of them: lost connections, insufficient resources, shutdown or cancellation, a read-only
standby, deadlocks, and lock timeouts."""

_QUOTED_STATES = ("28", "3D")
"""Authentication and unknown databases: their messages name only the user and the database."""

_UNAVAILABLE_SQLITE = ("BUSY", "LOCKED", "CANTOPEN", "IOERR", "FULL", "READONLY", "PERM", "NOMEM")


def translate_error(error: SQLAlchemyError, display_name: str) -> DatabaseError:
    """Translate an error of SQLAlchemy. Raise the result `from None`: the original contains the statement."""
    if isinstance(error, PoolTimeout):
        return DatabaseUnavailable(f"{display_name}: no connection became free in time")
    if not isinstance(error, DBAPIError) or error.orig is None:
        return DatabaseError(f"{display_name} cannot be used: {type(error).__name__}")
    cause: BaseException = error.orig
    if isinstance(cause, sqlite3.Error):
        return _sqlite(cause, display_name)
    state = getattr(cause, "sqlstate", None)
    driver = cause.__cause__ or cause
    if state is None:  # not from the server: the connection was lost or is unusable
        return DatabaseUnavailable(f"{display_name}: the connection was lost ({type(driver).__name__})")
    if error.connection_invalidated or state.startswith(_UNAVAILABLE_STATES):
        return DatabaseUnavailable(f"{display_name} is unavailable: {_server_message(driver)} (SQLSTATE {state})")
    # Without the message, which may quote the values to be stored.
    return DatabaseError(f"{display_name} rejected the statement: {type(driver).__name__} (SQLSTATE {state})")


def _sqlite(cause: sqlite3.Error, display_name: str) -> DatabaseError:
    name = getattr(cause, "sqlite_errorname", None)
    if name is None:  # an error of aiosqlite: the connection is closed
        return DatabaseUnavailable(f"{display_name}: the connection was lost")
    code = name.removeprefix("SQLITE_")
    if code.startswith(_UNAVAILABLE_SQLITE):
        return DatabaseUnavailable(f"{display_name} is unavailable: {one_line(str(cause))} ({code})")
    if code.startswith(("CORRUPT", "NOTADB")):
        return DatabaseError(f"{display_name} is not a database, or is damaged: {one_line(str(cause))} ({code})")
    return DatabaseError(f"{display_name} rejected the statement ({code})")


def connect_error(error: BaseException, display_name: str) -> DatabaseError:
    """Translate an error of asyncpg.connect(): the server rejected the connection, or was not reached."""
    import asyncpg

    if isinstance(error, asyncpg.PostgresError):
        state = getattr(error, "sqlstate", None) or "unknown"
        kind = DatabaseUnavailable if state.startswith(_UNAVAILABLE_STATES) else DatabaseError
        # The server quotes unknown options.
        message = (
            _server_message(error)
            if state.startswith((*_UNAVAILABLE_STATES, *_QUOTED_STATES))
            else type(error).__name__
        )
        return kind(f"{display_name} rejected the connection: {message} (SQLSTATE {state})")
    if isinstance(error, asyncio.TimeoutError):
        return DatabaseUnavailable(f"{display_name} cannot be reached: timeout")
    if isinstance(error, OSError):
        return DatabaseUnavailable(f"{display_name} cannot be reached: {_os_message(error)}")
    # Without the message: asyncpg quotes the invalid parts of the URL.
    return DatabaseError(f"{display_name} cannot be connected to with this RLS_DATABASE_URL: {type(error).__name__}")


def _server_message(error: BaseException) -> str:
    return one_line(str(error.args[0]) if error.args else type(error).__name__)[:300]


def _os_message(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return one_line(error.strerror or "no such host")
    return os.strerror(error.errno) if error.errno else _server_message(error)
