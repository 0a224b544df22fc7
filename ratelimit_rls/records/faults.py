"""What drivers raise, in our words: whether the database is away, and one sentence that gives nothing away.

Drivers quote statements, parameters and connection strings; none of that is passed on. What a database says of itself
("the database system is starting up") is.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sqlite3

from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from ratelimit_rls.errors import RecordsError, RecordsUnavailable, one_line

_AWAY_STATES = ("08", "53", "57", "25006", "40", "55P03")
"""SQLSTATEs, or how they begin: lost connections, out of resources, shut down or cancelled, a standby that takes no
writes, deadlocks, and locks not had in time."""

_QUOTED_STATES = ("28", "3D")
"""Who may connect and to what: these name the user and the database, and nothing else."""

_AWAY_SQLITE = ("BUSY", "LOCKED", "CANTOPEN", "IOERR", "FULL", "READONLY", "PERM", "NOMEM")


def translated(error: SQLAlchemyError, shown: str) -> RecordsError:
    """To be raised `from None`: the original holds the statement."""
    if isinstance(error, PoolTimeout):
        return RecordsUnavailable(f"{shown}: every connection has been in use for too long")
    if not isinstance(error, DBAPIError) or error.orig is None:
        return RecordsError(f"{shown} cannot be used: {type(error).__name__}")
    cause: BaseException = error.orig
    if isinstance(cause, sqlite3.Error):
        return _sqlite(cause, shown)
    state = getattr(cause, "sqlstate", None)
    driver = cause.__cause__ or cause
    if state is None:  # not the server's words: the connection was lost, or is in no state to be used
        return RecordsUnavailable(f"{shown}: the connection was lost ({type(driver).__name__})")
    if error.connection_invalidated or state.startswith(_AWAY_STATES):
        return RecordsUnavailable(f"{shown} does not serve: {_said(driver)} (SQLSTATE {state})")
    # The message may quote what was to be stored, so it is left out.
    return RecordsError(f"{shown} refused what was asked of it: {type(driver).__name__} (SQLSTATE {state})")


def _sqlite(cause: sqlite3.Error, shown: str) -> RecordsError:
    name = getattr(cause, "sqlite_errorname", None)
    if name is None:  # aiosqlite's own: a connection that is closed
        return RecordsUnavailable(f"{shown}: the connection was lost")
    code = name.removeprefix("SQLITE_")
    if code.startswith(_AWAY_SQLITE):
        return RecordsUnavailable(f"{shown} does not serve: {one_line(str(cause))} ({code})")
    if code.startswith(("CORRUPT", "NOTADB")):
        return RecordsError(f"{shown} is no database, or is damaged: {one_line(str(cause))} ({code})")
    return RecordsError(f"{shown} refused what was asked of it ({code})")


def not_connected(error: BaseException, shown: str) -> RecordsError:
    """Of asyncpg.connect(): the server's refusals, and whatever kept us from reaching it."""
    import asyncpg

    if isinstance(error, asyncpg.PostgresError):
        state = getattr(error, "sqlstate", None) or "unknown"
        kind = RecordsUnavailable if state.startswith(_AWAY_STATES) else RecordsError
        # Of an option it does not know, the server quotes what was written.
        said = _said(error) if state.startswith((*_AWAY_STATES, *_QUOTED_STATES)) else type(error).__name__
        return kind(f"{shown} refuses the connection: {said} (SQLSTATE {state})")
    if isinstance(error, asyncio.TimeoutError):
        return RecordsUnavailable(f"{shown} cannot be reached: no answer in time")
    if isinstance(error, OSError):
        return RecordsUnavailable(f"{shown} cannot be reached: {_of_the_system(error)}")
    # Of what is wrong in the URL asyncpg quotes the pieces.
    return RecordsError(f"{shown} cannot be connected to with this RLS_DATABASE_URL: {type(error).__name__}")


def _said(error: BaseException) -> str:
    return one_line(str(error.args[0]) if error.args else type(error).__name__)[:300]


def _of_the_system(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return one_line(error.strerror or "no such host")
    return os.strerror(error.errno) if error.errno else _said(error)
