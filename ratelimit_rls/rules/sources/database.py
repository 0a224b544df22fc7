"""Rules from the database, as a source.

Each rule is a document of its own, ranked by its priority, with precedence over all other sources. This module does not
query the database. `DatabaseServices` (server/database.py) puts the rules in whenever they change, so that loading
rules never waits for the database, and a database outage changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from ratelimit_rls.errors import one_line
from ratelimit_rls.rules.compile import CompiledRules, compile_documents
from ratelimit_rls.rules.source_document import LAST_RANK, SourceDocument
from ratelimit_rls.rules.stored_rule import StoredRule

if TYPE_CHECKING:
    from ratelimit_rls.rules.reloader import RulesSource

PREFIX = "database:"
"""Prefix of a rule's name in positions."""


def stored_sources(rules: Iterable[StoredRule]) -> list[SourceDocument]:
    """Return the source documents of the enabled rules."""
    return [
        SourceDocument(
            PREFIX + one_line(rule.name),
            rule.document.encode(errors="surrogatepass"),  # the parser reports invalid UTF-8 with its position
            min(rule.priority, LAST_RANK - 1),
            rule.targeting,
        )
        for rule in rules
        if rule.enabled
    ]


def check_rules(rules: Iterable[StoredRule], files: Sequence[SourceDocument] = (), **options: Any) -> CompiledRules:
    """Compile all rules together before one is stored. Raise RulesError if they are invalid.

    `options` are those of the reloader: the same rules must compile in the same way everywhere.
    """
    return compile_documents([*stored_sources(rules), *files], **options)


class StoredRulesSource:
    """The rules of the database as a source, as last put in."""

    def __init__(self) -> None:
        self._rules: tuple[StoredRule, ...] | None = None  # replaced as a whole: a thread may be reading
        self._changed = asyncio.Event()

    def put(self, rules: Iterable[StoredRule]) -> None:
        """Set all rules there are now, enabled or not. Call it from the event loop's thread."""
        rules = tuple(rules)
        if rules != self._rules:
            self._rules = rules
            self._changed.set()

    def check(self) -> None:
        """Do nothing: there is no location that could be missing."""

    def read(self) -> list[SourceDocument] | None:
        """Return the enabled rules; None before the first `put`."""
        rules = self._rules
        return None if rules is None else stored_sources(rules)

    async def watch(self) -> AsyncGenerator[None, None]:
        while True:
            await self._changed.wait()
            self._changed.clear()
            yield


class MergedSource:
    """The database's rules merged with those of another source."""

    def __init__(self, stored: StoredRulesSource, others: RulesSource) -> None:
        self._stored = stored
        self._others = others

    def check(self) -> None:
        self._others.check()

    def read(self) -> list[SourceDocument] | None:
        """Return the rules of both sources; None until the other source has some.

        The other source does not wait for the database: until the database's rules arrive, only the others are active.
        Conversely the database's rules wait, as the start would without a database: essential limits may be among the
        others.
        """
        others = self._others.read()
        return None if others is None else [*(self._stored.read() or ()), *others]

    async def watch(self) -> AsyncGenerator[None, None]:
        """Yield when either source changes. Each source is watched in its own task and resumed after its attempt."""
        queue: asyncio.Queue[asyncio.Event] = asyncio.Queue()
        tasks = [asyncio.create_task(_follow(source, queue)) for source in (self._stored, self._others)]
        try:
            while True:
                change = asyncio.ensure_future(queue.get())
                try:
                    await asyncio.wait({change, *tasks}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    change.cancel()
                for task in tasks:
                    if task.done():
                        task.result()
                tasks = [task for task in tasks if not task.done()]
                if not change.done():
                    continue
                tried = [change.result(), *(queue.get_nowait() for _ in range(queue.qsize()))]
                yield
                for one in tried:
                    one.set()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _follow(source: RulesSource, queue: asyncio.Queue[asyncio.Event]) -> None:
    async with aclosing(source.watch()) as times:
        async for _ in times:
            tried = asyncio.Event()
            queue.put_nowait(tried)
            await tried.wait()
