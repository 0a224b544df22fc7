"""Option and connection of verbs that read or change the database."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from ratelimit_rls.database.configuration import Configuration
    from ratelimit_rls.database.database import Database
    from ratelimit_rls.database.repository import Repository

T = TypeVar("T")

PAGE = 1000


def database_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --database to a command; its default is the server's RLS_DATABASE_URL."""
    return click.option(
        "--database",
        metavar="URL",
        default="",
        envvar="RLS_DATABASE_URL",
        help="Database, sqlite:///file or postgresql://…; pass passwords in the variable. [RLS_DATABASE_URL]",
    )(command)


def with_repository(database: str, work: Callable[[Repository], Coroutine[Any, Any, T]]) -> T:
    """Run `work` with a repository and return its result. Raises DatabaseError if the database fails."""
    from ratelimit_rls.database.repository import Repository

    return with_database(database, lambda opened: work(Repository(opened)))


def with_database(
    database: str, work: Callable[[Database], Coroutine[Any, Any, T]], *, of_any_revision: bool = False
) -> T:
    """Run `work` with the database and return its result.

    The schema must be this version's unless `of_any_revision` is set. Raises DatabaseError if the database fails.
    """
    if not database:
        raise click.UsageError("no database: set --database or RLS_DATABASE_URL")
    from ratelimit_rls.database.database import Database

    async def run() -> T:
        opened = Database(database)
        try:
            if not of_any_revision:
                await opened.require_current()
            return await work(opened)
        finally:
            await opened.close()

    with _log_on_stderr():
        return asyncio.run(run())


@contextmanager
def _log_on_stderr() -> Iterator[None]:
    """Log warnings and errors to stderr; stdout is reserved for results."""
    import structlog

    before = structlog.get_config()
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    try:
        yield
    finally:
        structlog.configure(**before)


async def all_accounts(repository: Repository) -> Configuration:
    """Return all accounts and stored rules, from one consistent snapshot."""
    from ratelimit_rls.database.repository import LOAD_TIMEOUT_S

    async with repository.reading(LOAD_TIMEOUT_S) as reader:
        return await reader.accounts()
