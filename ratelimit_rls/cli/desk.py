"""The database, for verbs that read or change what administrators keep: where it is, and how a verb gets at it."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from ratelimit_rls.core.accounts import Accounts, StoredRule
    from ratelimit_rls.records.database import Database
    from ratelimit_rls.records.desk import Desk, Reader

T = TypeVar("T")

PAGE = 1000


def database_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """The flag that says where the database is; without it, the server's variable does."""
    return click.option(
        "--database",
        metavar="URL",
        default="",
        envvar="RLS_DATABASE_URL",
        help="sqlite:///file or postgresql://…; give a password in the variable. [RLS_DATABASE_URL]",
    )(command)


def at_desk(database: str, work: Callable[[Desk], Coroutine[Any, Any, T]]) -> T:
    """What `work` comes to. Raises RecordsError if the database cannot be used, or is lost on the way."""
    from ratelimit_rls.records.desk import Desk

    return with_records(database, lambda records: work(Desk(records)))


def with_records(
    database: str, work: Callable[[Database], Coroutine[Any, Any, T]], *, of_any_revision: bool = False
) -> T:
    """The same with the database itself, be it that its schema is another version's."""
    if not database:
        raise click.UsageError("no --database and no RLS_DATABASE_URL: there is no database")
    from ratelimit_rls.records.database import Database

    async def run() -> T:
        records = Database(database)
        try:
            if not of_any_revision:
                await records.require_current()
            return await work(records)
        finally:
            await records.close()

    with _log_on_stderr():
        return asyncio.run(run())


@contextmanager
def _log_on_stderr() -> Iterator[None]:
    """Warnings, and nothing less: a verb tells what it did by itself, and on stdout there is nothing else."""
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


async def every_rule(reader: Reader) -> list[StoredRule]:
    """By priority, then name."""
    found: list[StoredRule] = []
    while True:
        page = await reader.rules(after=found[-1].rule_id if found else "", limit=PAGE)
        found += page
        if len(page) < PAGE:
            return found


async def stored_rules(desk: Desk) -> list[StoredRule]:
    async with desk.reading() as reader:
        return await every_rule(reader)


async def every_account(desk: Desk) -> Accounts:
    """With the rules, as of one moment."""
    from ratelimit_rls.records.desk import LOAD_S

    async with desk.reading(LOAD_S) as reader:
        return await reader.accounts()
