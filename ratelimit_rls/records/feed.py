"""Everything that processes hold, and what of it has changed since they last looked.

Read in small steps, with a turn of the event loop between any two: requests are decided meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import structlog
from sqlalchemy import Column, ColumnElement, func, select

from ratelimit_rls.core.accounts import Accounts, ApiKey, Changed, StoredRule, Tier, User
from ratelimit_rls.records import rows
from ratelimit_rls.records.reader import UNREADABLE, Reader, shown
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
        return (await self._last())[0]

    async def _last(self) -> tuple[int, float]:
        """The number and the moment of the last change."""
        last = select(changes.c.sequence, changes.c.at).order_by(changes.c.sequence.desc()).limit(1)
        found = (await self._connection.execute(last)).one_or_none()
        return (int(found[0]), float(found[1])) if found else (0, 0.0)

    async def accounts(self) -> Accounts:
        """All of it, in one consistent snapshot. What cannot be read is told to the log and left out."""
        sequence, at_s = await self._last()
        rules = await self._every(rows.RULE_COLUMNS, rate_limit_rules.c.rule_id, self._rule)
        return Accounts(
            sequence,
            tuple(await self._every(rows.TIER_COLUMNS, tiers.c.name, self._tier)),
            tuple(await self._every(rows.USER_COLUMNS, user_quotas.c.user_id, self._user)),
            tuple(await self._every(rows.KEY_COLUMNS, api_keys.c.key_id, self._key)),
            tuple(sorted(rules, key=lambda rule: (rule.priority, rule.name))),
            at_s,
        )

    async def changed_since(self, sequence: int, at_s: float | None = None) -> Changed | None:
        """None: too long ago, or another database's sequence; then everything is to be read.

        `at_s` is the moment of the change of that number, by which a database is known that came from a backup.
        """
        last, last_s = await self._last()
        if sequence and at_s is not None:
            known_s = await self._connection.scalar(select(changes.c.at).where(changes.c.sequence == sequence))
            if known_s != at_s:
                return None
        if sequence == last:
            return Changed(last, at_s=last_s)
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
            last_s,
        )

    def _tier(self, row: AnyRow) -> Tier:
        return rows.tier_of(row, self._limits)

    def _user(self, row: AnyRow) -> User:
        return rows.user_of(row, self._limits)

    def _key(self, row: AnyRow) -> ApiKey:
        return rows.key_of(row, self._limits)

    def _rule(self, row: AnyRow) -> StoredRule:
        return rows.rule_of(row)

    async def _every(
        self, columns: Sequence[ColumnElement[Any]], by: Column[Any], make: Callable[[AnyRow], T]
    ) -> list[T]:
        # Ordered, so that two readings of the same rows are the same.
        asked = select(*columns).order_by(by).execution_options(yield_per=STEP)
        made: list[T] = []
        try:
            async with self._connection.stream(asked) as found:
                async for step in found.partitions(STEP):
                    made += [value for row in step if (value := _readable(make, row)) is not None]
                    await asyncio.sleep(0)
        except UNREADABLE:
            names = list(await self._connection.scalars(select(by).order_by(by)))
            found_by_name = await self._named(columns, by, names, make)
            return [value for name in names if (value := found_by_name[name]) is not None]
        return made

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
            for row in await self._rows(columns, by, some):
                values[row[0]] = _readable(make, row)
            await asyncio.sleep(0)
        return values

    async def _rows(self, columns: Sequence[ColumnElement[Any]], by: Column[Any], names: Sequence[str]) -> list[AnyRow]:
        """But for those with a value that has no meaning in its column; where they are is found by halves."""
        try:
            return list(await self._connection.execute(select(*columns).where(by.in_(names))))
        except UNREADABLE as error:
            if len(names) == 1:
                _tell_unreadable(names[0], error)
                return []
            half = len(names) // 2
            return [*await self._rows(columns, by, names[:half]), *await self._rows(columns, by, names[half:])]


def _readable(make: Callable[[AnyRow], T], row: AnyRow) -> T | None:
    """A row that somebody else wrote must not keep all others from being read."""
    try:
        return make(row)
    except UNREADABLE as error:
        _tell_unreadable(str(row[0]), error)
        return None


def _tell_unreadable(name: str, error: Exception) -> None:
    _log.error("a row of the database cannot be read and is left out", row=shown(name), reason=str(error))
