"""Parts common to all changes: the audit entry, the change feed row, and the version check."""

from __future__ import annotations

from typing import Any, NamedTuple

from sqlalchemy import delete, insert
from sqlalchemy.ext.asyncio import AsyncConnection

from ratelimit_rls.core.names import MAX_ID_LENGTH
from ratelimit_rls.database.change_feed import FeedReader
from ratelimit_rls.database.queries import quote_name
from ratelimit_rls.database.tables import admin_audit_log, changes
from ratelimit_rls.errors import BadRequest, Conflict

MAX_FEED_ROWS = 100_000
"""Rows kept in the change feed. A reader that is further behind loads everything."""

_PRUNE_EVERY = 1000


class Actor(NamedTuple):
    """The administrator or command that makes a change."""

    name: str
    token_id: str = ""
    address: str = ""
    request_id: str = ""


class AuditedWrites(FeedReader):
    """Base of all changes, within one transaction that no other change overlaps (Database.serialise)."""

    def __init__(self, connection: AsyncConnection, actor: Actor, now_s: float) -> None:
        super().__init__(connection, now_s)
        self._actor = actor
        self.has_changed = False

    async def _audit(
        self, action: str, kind: str, subject: str, before: dict[str, Any] | None, after: dict[str, Any] | None
    ) -> None:
        row = {
            "at": self._now_s,
            "actor": bounded(self._actor.name),
            "actor_token": bounded(self._actor.token_id),
            "address": bounded(self._actor.address),
            "action": action,
            "kind": kind,
            "subject": subject,
            "before": before,
            "after": after,
            "request_id": bounded(self._actor.request_id),
        }
        await self._connection.execute(insert(admin_audit_log), [row])

    async def _feed(self, kind: str, subject: str) -> None:
        self.has_changed = True
        row = {"at": self._now_s, "kind": kind, "subject": subject}
        added = await self._connection.execute(insert(changes).values(row).returning(changes.c.sequence))
        sequence = added.scalar_one()
        if sequence % _PRUNE_EVERY == 0:
            await self._connection.execute(delete(changes).where(changes.c.sequence <= sequence - MAX_FEED_ROWS))

    async def _require_tier(self, name: str) -> None:
        """Raise BadRequest unless the tier exists. "" means no tier."""
        if name and not await self.find_tier(name):
            raise BadRequest(f"tier {quote_name(name)} does not exist: create it first", field="tier")


class VersionCheck(NamedTuple):
    """The current version of a resource that is to be changed."""

    kind: str
    name: str
    version: int | None  # None: it does not exist

    def expect(self, expected: int | None) -> None:
        """Raise Conflict unless the current version is `expected`. None accepts any version."""
        if expected is None or expected == self.version:
            return
        now = f"is at version {self.version}" if self.version is not None else "does not exist"
        raise Conflict(f"{self.kind} {quote_name(self.name)} {now}, expected version {expected}", is_stale=True)


def bounded(text: str) -> str:
    """Truncate a text and replace unprintable characters. A bad request id must not fail the change itself."""
    return "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in text[:MAX_ID_LENGTH])
