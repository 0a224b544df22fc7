"""Where everything that administrators decide is read and changed, and nothing else of the package writes it.

    async with desk.reading() as reader: …           one consistent snapshot
    async with desk.change(actor) as change: …       one transaction: the change, its audit, its row in the feed

Changes come one after the other, so that the feed's sequence is the order of commits: who has seen up to a number has
missed nothing before it.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from sqlalchemy import delete, insert, text

from ratelimit_rls.core.accounts import KeptAnswer
from ratelimit_rls.errors import Conflict
from ratelimit_rls.records import use
from ratelimit_rls.records.change_keys import KeyChanges, TokenChanges
from ratelimit_rls.records.change_rules import RuleChanges
from ratelimit_rls.records.change_tiers import TierChanges
from ratelimit_rls.records.change_users import UserChanges
from ratelimit_rls.records.changing import Actor, bounded
from ratelimit_rls.records.checks import check_name
from ratelimit_rls.records.database import PATIENCE_S, Database
from ratelimit_rls.records.feed import FeedReader
from ratelimit_rls.records.reader import KEPT_S
from ratelimit_rls.records.tables import idempotency_keys

__all__ = ["CHANNEL", "Actor", "Change", "Desk", "Reader"]

CHANNEL = "ratelimit_rls_changes"
"""What PostgreSQL notifies on with every change. The message says nothing: the feed does."""

LOAD_S = 120.0
"""For reading everything."""

Reader = FeedReader


class Change(TierChanges, UserChanges, KeyChanges, RuleChanges, TokenChanges):
    """Everything read sees what was changed before it in the same block."""

    async def note(self, action: str, kind: str, subject: str, after: Mapping[str, Any]) -> None:
        """What was done elsewhere on the actor's behalf (counters were forgotten), for the record."""
        await self._audit(action, kind, bounded(subject), None, dict(after))

    async def keep_answer(self, token_id: str, key: str, answer: KeptAnswer) -> None:
        """With the change that it tells of, or not at all. Conflict: there is one already."""
        check_name(key, "an Idempotency-Key")
        table = idempotency_keys
        await self._connection.execute(delete(table).where(table.c.created_at <= self._now_s - KEPT_S))
        if await self.idempotent(token_id, key):
            raise Conflict("this Idempotency-Key was used by another request just now")
        row = {
            "token_id": token_id,
            "key": key,
            "request_digest": answer.request_digest,
            "status": answer.status,
            "headers": dict(answer.headers),
            "body": answer.body,
            "created_at": self._now_s,
        }
        await self._connection.execute(insert(table), [row])


class Desk:
    def __init__(
        self,
        database: Database,
        on_commit: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`on_commit` is called when something has changed for good: others may be told to look."""
        self._database = database
        self._on_commit = on_commit
        self._clock = clock

    @asynccontextmanager
    async def reading(self, patience_s: float = PATIENCE_S) -> AsyncIterator[FeedReader]:
        async with self._database.reading(patience_s) as connection:
            yield FeedReader(connection, self._clock())

    @asynccontextmanager
    async def change(
        self, actor: Actor, *, dry_run: bool = False, patience_s: float = PATIENCE_S
    ) -> AsyncIterator[Change]:
        """Undone as a whole by any exception, and by `dry_run`."""
        async with self._database.begin(patience_s) as connection:
            await self._database.serialise(connection)
            change = Change(connection, actor, self._clock())
            yield change
            if dry_run:
                transaction = connection.get_transaction()
                assert transaction is not None
                await transaction.rollback()
            elif change.has_changed and self._database.dialect == "postgresql":
                await connection.execute(text(f"NOTIFY {CHANNEL}"))  # sent with the commit
        if change.has_changed and not dry_run:
            self._on_commit()

    async def touch_keys(self, last_used: Mapping[str, tuple[int, float]]) -> None:
        """By key_id, how often since the last time, and when last. What is not there is left out."""
        if last_used:
            async with self._database.begin() as connection:
                await use.touch_keys(connection, last_used)

    async def touch_tokens(self, last_used: Mapping[str, float]) -> None:
        if last_used:
            async with self._database.begin() as connection:
                await use.touch_tokens(connection, last_used)

    async def count_users(self, counted: Mapping[str, use.Counted]) -> None:
        if counted:
            async with self._database.begin() as connection:
                await use.count_users(connection, counted)
