"""The repository of tiers, users, keys, rules and tokens. No other module writes them.

    async with repository.reading() as reader: …      one consistent snapshot
    async with repository.change(actor) as change: …  one transaction: the change, its audit entry, its change feed row

Changes are serialized, so that the sequence numbers of the change feed are in commit order: a reader that has seen a
number has missed nothing before it.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from sqlalchemy import delete, insert, text

from ratelimit_rls.database.administration import StoredResponse
from ratelimit_rls.database.change_feed import FeedReader
from ratelimit_rls.database.database import TRANSACTION_TIMEOUT_S, Database
from ratelimit_rls.database.queries import IDEMPOTENCY_TTL_S
from ratelimit_rls.database.tables import idempotency_keys
from ratelimit_rls.database.usage import counters
from ratelimit_rls.database.validation import check_name
from ratelimit_rls.database.writes.audited import Actor, bounded
from ratelimit_rls.database.writes.keys import KeyWrites, TokenWrites
from ratelimit_rls.database.writes.rules import RuleWrites
from ratelimit_rls.database.writes.tiers import TierWrites
from ratelimit_rls.database.writes.users import UserWrites
from ratelimit_rls.errors import Conflict

__all__ = ["NOTIFY_CHANNEL", "Actor", "Reader", "Repository", "UnitOfWork"]

NOTIFY_CHANNEL = "ratelimit_rls_changes"
"""PostgreSQL channel that is notified of every change. The message is empty: the change feed has the details."""

LOAD_TIMEOUT_S = 120.0
"""Timeout of reading all accounts."""

Reader = FeedReader


class UnitOfWork(TierWrites, UserWrites, KeyWrites, RuleWrites, TokenWrites):
    """One transaction of changes. Reads see the changes made before them in the same transaction."""

    async def note(self, action: str, kind: str, subject: str, after: Mapping[str, Any]) -> None:
        """Write an audit entry for an action outside of the database, e.g. a counter reset."""
        await self._audit(action, kind, bounded(subject), None, dict(after))

    async def store_response(self, token_id: str, key: str, answer: StoredResponse) -> None:
        """Store the response to a request in the transaction of its change. Raises Conflict if there is one already."""
        check_name(key, "an Idempotency-Key")
        table = idempotency_keys
        await self._connection.execute(delete(table).where(table.c.created_at <= self._now_s - IDEMPOTENCY_TTL_S))
        if await self.stored_response(token_id, key):
            raise Conflict("this Idempotency-Key is in use by a concurrent request")
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


class Repository:
    """Reads and changes accounts in transactions."""

    def __init__(
        self,
        database: Database,
        on_commit: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`on_commit` is called after a change was committed, e.g. to notify other processes."""
        self._database = database
        self._on_commit = on_commit
        self._clock = clock

    @asynccontextmanager
    async def reading(self, timeout_s: float = TRANSACTION_TIMEOUT_S) -> AsyncIterator[FeedReader]:
        async with self._database.reading(timeout_s) as connection:
            yield FeedReader(connection, self._clock())

    @asynccontextmanager
    async def change(
        self, actor: Actor, *, dry_run: bool = False, timeout_s: float = TRANSACTION_TIMEOUT_S
    ) -> AsyncIterator[UnitOfWork]:
        """Run one unit of work. An exception rolls it back, and so does `dry_run`."""
        async with self._database.begin(timeout_s) as connection:
            await self._database.serialise(connection)
            change = UnitOfWork(connection, actor, self._clock())
            yield change
            if dry_run:
                transaction = connection.get_transaction()
                assert transaction is not None
                await transaction.rollback()
            elif change.has_changed and self._database.dialect == "postgresql":
                await connection.execute(text(f"NOTIFY {NOTIFY_CHANNEL}"))  # sent with the commit
        if change.has_changed and not dry_run:
            self._on_commit()

    async def touch_keys(self, last_used: Mapping[str, tuple[int, float]]) -> None:
        """Add the number of uses since the last call and the time of the last use, by key_id. Unknown keys are
        skipped."""
        if last_used:
            async with self._database.begin(background=True) as connection:
                await counters.touch_keys(connection, last_used)

    async def touch_tokens(self, last_used: Mapping[str, float]) -> None:
        if last_used:
            async with self._database.begin(background=True) as connection:
                await counters.touch_tokens(connection, last_used)

    async def count_users(self, counted: Mapping[str, counters.UserUsage]) -> None:
        if counted:
            async with self._database.begin(background=True) as connection:
                await counters.count_users(connection, counted)
