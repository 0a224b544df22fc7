"""The database, for verbs that read or change what administrators keep: where it is, and how a verb gets at it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from ratelimit_rls.core.accounts import StoredRule
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
    if not database:
        raise click.UsageError("no --database and no RLS_DATABASE_URL: there is no database to ask")
    from ratelimit_rls.records.database import Database
    from ratelimit_rls.records.desk import Desk

    async def run() -> T:
        records = Database(database)
        try:
            await records.require_current()
            return await work(Desk(records))
        finally:
            await records.close()

    return asyncio.run(run())


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
