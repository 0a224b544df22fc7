"""Everything that processes hold, and what of it has changed since they last looked.

Read in small steps, with a turn of the event loop between any two: requests are decided meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

import structlog
from sqlalchemy import Column, ColumnElement, func, select

from ratelimit_rls.core.accounts import Accounts, ApiKey, Changed, StoredRule, Tier, User
from ratelimit_rls.records import rows
from ratelimit_rls.records.reader import Reader, shown
from ratelimit_rls.records.rows import AnyRow, chunks
from ratelimit_rls.records.tables import api_keys, changes, rate_limit_rules, tiers, user_quotas

T = TypeVar("T")

EVERYTHING = "everything"
"""The kind of a change that is told as a whole, not one by one."""

STEP = 250
"""Rows made into values between two turns of the loop: about a millisecond."""

MOST_SUBJECTS = 5000
"""Changed since then; beyond that, reading everything is as quick."""

_log = structlog.get_logger()


class FeedReader(Reader):
    async def sequence(self) -> int:
        """Of the last change; 0: there has been none."""
        return int(await self._connection.scalar(select(func.max(changes.c.sequence))) or 0)

    async def accounts(self) -> Accounts:
        """All of it, in one consistent snapshot. What cannot be read is told to the log and left out."""
        sequence = await self.sequence()
        return Accounts(
            sequence,
            tuple([tier async for tier in self._every(rows.TIER_COLUMNS, tiers.c.name, self._tier)]),
            tuple([user async for user in self._every(rows.USER_COLUMNS, user_quotas.c.user_id, self._user)]),
            tuple([key async for key in self._every(rows.KEY_COLUMNS, api_keys.c.key_id, self._key)]),
            tuple(sorted([rule async for rule in self._every_rule()], key=lambda rule: (rule.priority, rule.name))),
        )

    async def changed_since(self, sequence: int) -> Changed | None:
        """None: too long ago, or another database's sequence; then everything is to be read."""
        last = await self.sequence()
        if sequence == last:
            return Changed(last)
        oldest = int(await self._connection.scalar(select(func.min(changes.c.sequence))) or 0)
        if sequence > last or sequence < oldest - 1:
            return None
        query = select(changes.c.kind, changes.c.subject).where(changes.c.sequence > sequence).distinct()
        found = (await self._connection.execute(query.limit(MOST_SUBJECTS + 1))).all()
        if len(found) > MOST_SUBJECTS or any(kind == EVERYTHING for kind, _ in found):
            return None
        subjects: dict[str, list[str]] = {"tier": [], "user": [], "key": [], "rule": []}
        for kind, subject in found:
            if kind in subjects:
                subjects[kind].append(subject)
        return Changed(
            last,
            await self._named(rows.TIER_COLUMNS, tiers.c.name, subjects["tier"], self._tier),
            await self._named(rows.USER_COLUMNS, user_quotas.c.user_id, subjects["user"], self._user),
            await self._named(rows.KEY_COLUMNS, api_keys.c.key_id, subjects["key"], self._key),
            await self._named(rows.RULE_COLUMNS, rate_limit_rules.c.rule_id, subjects["rule"], self._rule),
        )

    def _tier(self, row: AnyRow) -> Tier:
        return rows.tier_of(row, self._limits)

    def _user(self, row: AnyRow) -> User:
        return rows.user_of(row, self._limits)

    def _key(self, row: AnyRow) -> ApiKey:
        return rows.key_of(row, self._limits)

    def _rule(self, row: AnyRow) -> StoredRule:
        return rows.rule_of(row)

    def _every_rule(self) -> AsyncIterator[StoredRule]:
        return self._every(rows.RULE_COLUMNS, rate_limit_rules.c.rule_id, self._rule)

    async def _every(
        self, columns: Sequence[ColumnElement[Any]], by: Column[Any], make: Callable[[AnyRow], T]
    ) -> AsyncIterator[T]:
        # Ordered, so that two readings of the same rows are the same.
        found = await self._connection.stream(select(*columns).order_by(by).execution_options(yield_per=STEP))
        async for step in found.partitions(STEP):
            for row in step:
                value = _readable(make, row)
                if value is not None:
                    yield value
            await asyncio.sleep(0)

    async def _named(
        self,
        columns: Sequence[ColumnElement[Any]],
        by: Column[Any],
        names: list[str],
        make: Callable[[AnyRow], T],
    ) -> dict[str, T | None]:
        """None for those that are gone."""
        values: dict[str, T | None] = dict.fromkeys(names)
        for some in chunks(names, STEP):
            for row in await self._connection.execute(select(*columns).where(by.in_(some))):
                values[row[0]] = _readable(make, row)
            await asyncio.sleep(0)
        return values


def _readable(make: Callable[[AnyRow], T], row: AnyRow) -> T | None:
    """A row that somebody else wrote must not keep all others from being read."""
    try:
        return make(row)
    except (ValueError, TypeError) as error:
        _log.error("a row of the database cannot be read and is left out", row=shown(str(row[0])), reason=str(error))
        return None
