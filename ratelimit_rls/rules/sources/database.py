"""Rules from the database: each is a document of its own, ranked by its priority, before all that comes from elsewhere.

They are not read here. Whoever holds what the database has (the directory in memory) puts them in whenever they are
others, so that loading rules waits for no database, and a dead one changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from ratelimit_rls.core.accounts import StoredRule
from ratelimit_rls.errors import one_line
from ratelimit_rls.rules.compile import Compiled, compile_documents
from ratelimit_rls.rules.load import LAST_RANK, Source

if TYPE_CHECKING:
    from ratelimit_rls.rules.loader import RulesSource

PREFIX = "database:"
"""Before the name of a rule, where it is told as the place of something."""


def stored_sources(rules: Iterable[StoredRule]) -> list[Source]:
    """Of those that are enabled."""
    return [
        Source(
            PREFIX + one_line(rule.name),
            rule.document.encode(errors="surrogatepass"),  # no UTF-8 then, which is told where it stands
            min(rule.priority, LAST_RANK - 1),
            rule.targeting,
        )
        for rule in rules
        if rule.enabled
    ]


def check_rule(rules: Iterable[StoredRule], files: Sequence[Source] = (), **options: Any) -> Compiled:
    """What all of them together would mean, before anything is stored; raises RulesError if they mean nothing.

    `options` are those of the loader: the same rules must mean the same wherever they are tried.
    """
    return compile_documents([*stored_sources(rules), *files], **options)


class StoredRules:
    """The rules of the database as a source, as new as whoever puts them in."""

    def __init__(self) -> None:
        self._rules: tuple[StoredRule, ...] | None = None  # replaced whole: a thread may read while others are put
        self._are_new = asyncio.Event()

    def put(self, rules: Iterable[StoredRule]) -> None:
        """All there are now, enabled or not. In the thread of the event loop."""
        rules = tuple(rules)
        if rules != self._rules:
            self._rules = rules
            self._are_new.set()

    def check(self) -> None:
        """There is nowhere that could be missing."""

    def read(self) -> list[Source] | None:
        """None until something was put in."""
        rules = self._rules
        return None if rules is None else stored_sources(rules)

    async def watch(self) -> AsyncGenerator[None, None]:
        while True:
            await self._are_new.wait()
            self._are_new.clear()
            yield


class Merged:
    """The database's rules together with those from elsewhere."""

    def __init__(self, stored: StoredRules, others: RulesSource) -> None:
        self._stored = stored
        self._others = others

    def check(self) -> None:
        self._others.check()

    def read(self) -> list[Source] | None:
        """What comes from elsewhere does not wait for the database: without it there are those rules alone.

        The other way round it waits, as it would without a database: the limits one relies on may be among them.
        """
        others = self._others.read()
        return None if others is None else [*(self._stored.read() or ()), *others]

    async def watch(self) -> AsyncGenerator[None, None]:
        """Each source goes on when what it told of was tried, and each in a task of its own."""
        told: asyncio.Queue[asyncio.Event] = asyncio.Queue()
        tasks = [asyncio.create_task(_follow(source, told)) for source in (self._stored, self._others)]
        try:
            while True:
                news = asyncio.ensure_future(told.get())
                try:
                    await asyncio.wait({news, *tasks}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    news.cancel()
                for task in tasks:
                    if task.done():
                        task.result()
                tasks = [task for task in tasks if not task.done()]
                if not news.done():
                    continue
                tried = [news.result(), *(told.get_nowait() for _ in range(told.qsize()))]
                yield
                for one in tried:
                    one.set()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _follow(source: RulesSource, told: asyncio.Queue[asyncio.Event]) -> None:
    async with aclosing(source.watch()) as times:
        async for _ in times:
            tried = asyncio.Event()
            told.put_nowait(tried)
            await tried.wait()
