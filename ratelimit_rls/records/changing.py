"""What every change has in common: its audit row, its row in the feed, and that it was meant for what is there."""

from __future__ import annotations

from typing import Any, NamedTuple

from sqlalchemy import delete, insert
from sqlalchemy.ext.asyncio import AsyncConnection

from ratelimit_rls.core.accounts import LONGEST_ID
from ratelimit_rls.errors import BadRequest, Conflict
from ratelimit_rls.records.feed import FeedReader
from ratelimit_rls.records.reader import shown
from ratelimit_rls.records.tables import admin_audit_log, changes

KEPT_CHANGES = 100_000
"""Rows of the feed that stay. Who is further behind reads everything."""

_PRUNE_EVERY = 1000


class Actor(NamedTuple):
    """On whose behalf something is changed."""

    name: str
    token_id: str = ""
    address: str = ""
    request_id: str = ""


class Changing(FeedReader):
    """Within one transaction that no other change overlaps (Database.serialise)."""

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
            await self._connection.execute(delete(changes).where(changes.c.sequence <= sequence - KEPT_CHANGES))

    async def _require_tier(self, name: str) -> None:
        """A tier that is spoken of must be there; "" is none."""
        if name and not await self.find_tier(name):
            raise BadRequest(f"there is no tier {shown(name)}: create it first")


class Versioned(NamedTuple):
    """What a change was meant for."""

    kind: str
    name: str
    version: int | None  # None: it is not there

    def expect(self, expected: int | None) -> None:
        """Conflict if it is not the one that was seen. None expects nothing."""
        if expected is None or expected == self.version:
            return
        now = f"is at version {self.version}" if self.version is not None else "is not there (any more)"
        raise Conflict(f"{self.kind} {shown(self.name)} {now}, and not at version {expected}", is_stale=True)


def bounded(text: str) -> str:
    """What a client sends beside the change itself (a request id) must not be a reason to refuse it."""
    return "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in text[:LONGEST_ID])
