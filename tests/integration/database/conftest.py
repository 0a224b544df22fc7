"""A repository on each database, with a manual clock."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from ratelimit_rls.core.model import Algorithm, Limit, Unit
from ratelimit_rls.database.database import Database
from ratelimit_rls.database.repository import Actor, Repository
from ratelimit_rls.identity.accounts import Tier, User

NOW_S = 1_786_000_000.25
"""A timestamp in 2026 with a fraction, because fractions are stored."""

ME = Actor("me", "t1", "192.0.2.7", "req-1")

LIMITS = (Limit(100, Unit.MINUTE), Limit(5, Unit.SECOND, Algorithm.TOKEN_BUCKET, 9))


class AccountDb:
    """A repository, its database, and the number of commits it reported."""

    def __init__(self, url: str) -> None:
        self.database = Database(url)
        self.now_s = NOW_S
        self.commits = 0
        self.repository = Repository(self.database, self._committed, lambda: self.now_s)

    def _committed(self) -> None:
        self.commits += 1

    async def do(self, method: str, *arguments: Any, **more: Any) -> Any:
        """Call one method of a unit of work in a transaction of its own."""
        async with self.repository.change(ME) as change:
            return await getattr(change, method)(*arguments, **more)

    async def ask(self, method: str, *arguments: Any, **more: Any) -> Any:
        async with self.repository.reading() as reader:
            return await getattr(reader, method)(*arguments, **more)

    async def with_gold_and_alice(self) -> None:
        async with self.repository.change(ME) as change:
            await change.add_tier(Tier("gold", LIMITS))
            await change.put_user(User("alice", "gold"))


@pytest.fixture
async def db(upgraded_url: str) -> AsyncIterator[AccountDb]:
    db = AccountDb(upgraded_url)
    yield db
    await db.database.close()
