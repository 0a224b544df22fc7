"""A desk on each database, with a clock that tests turn by hand."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from ratelimit_rls.core.accounts import Tier, User
from ratelimit_rls.core.model import Algorithm, Limit, Unit
from ratelimit_rls.records.database import Database
from ratelimit_rls.records.desk import Actor, Desk

NOW_S = 1_786_000_000.25
"""A moment in 2026, at a quarter of a second: moments are stored with their fractions."""

ME = Actor("me", "t1", "192.0.2.7", "req-1")

LIMITS = (Limit(100, Unit.MINUTE), Limit(5, Unit.SECOND, Algorithm.TOKEN_BUCKET, 9))


class Office:
    """A desk, its database, and what it told of commits."""

    def __init__(self, url: str) -> None:
        self.database = Database(url)
        self.now_s = NOW_S
        self.commits = 0
        self.desk = Desk(self.database, self._committed, lambda: self.now_s)

    def _committed(self) -> None:
        self.commits += 1

    async def do(self, method: str, *arguments: Any, **more: Any) -> Any:
        """One change in a transaction of its own."""
        async with self.desk.change(ME) as change:
            return await getattr(change, method)(*arguments, **more)

    async def ask(self, method: str, *arguments: Any, **more: Any) -> Any:
        async with self.desk.reading() as reader:
            return await getattr(reader, method)(*arguments, **more)

    async def with_gold_and_alice(self) -> None:
        async with self.desk.change(ME) as change:
            await change.add_tier(Tier("gold", LIMITS))
            await change.put_user(User("alice", "gold"))


@pytest.fixture
async def office(upgraded_url: str) -> AsyncIterator[Office]:
    office = Office(upgraded_url)
    yield office
    await office.database.close()
