"""Reading all accounts, and the changes since a sequence number of the change feed.

Rows are read in small steps with an event loop iteration between any two, so that requests are served meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import structlog
from sqlalchemy import Column, ColumnElement, func, select

from ratelimit_rls.database import row_mapping
from ratelimit_rls.database.configuration import Configuration, ConfigurationChanges
from ratelimit_rls.database.queries import UNREADABLE, AccountReader, quote_name
from ratelimit_rls.database.row_mapping import AnyRow, chunks
from ratelimit_rls.database.tables import api_keys, changes, rate_limit_rules, tiers, user_quotas
from ratelimit_rls.identity.accounts import ApiKey, Tier, User
from ratelimit_rls.rules.stored_rule import StoredRule

T = TypeVar("T")

EVERYTHING = "everything"
"""Kind of a change that affects too many accounts to list them: readers load everything again."""

ROWS_PER_STEP = 250
"""Rows converted between two event loop iterations: about a millisecond of work."""

MAX_SUBJECTS = 5000
"""Changed accounts that are read one by one; beyond that, reading everything is as fast."""

_log = structlog.get_logger()


class FeedReader(AccountReader):
    """Reads all accounts, or those that changed after a sequence number."""

    async def sequence(self) -> int:
        """Return the number of the last change; 0: there was none."""
        return (await self._last_change())[0]

    async def _last_change(self) -> tuple[int, float]:
        """Return the number and the time of the last change."""
        last = select(changes.c.sequence, changes.c.at).order_by(changes.c.sequence.desc()).limit(1)
        found = (await self._connection.execute(last)).one_or_none()
        return (int(found[0]), float(found[1])) if found else (0, 0.0)

    async def accounts(self) -> Configuration:
        """Return all accounts in one consistent snapshot. Unreadable rows are logged and skipped."""
        sequence, at_s = await self._last_change()
        rules = await self._read_all(row_mapping.RULE_COLUMNS, rate_limit_rules.c.rule_id, self._rule)
        return Configuration(
            sequence,
            tuple(await self._read_all(row_mapping.TIER_COLUMNS, tiers.c.name, self._tier)),
            tuple(await self._read_all(row_mapping.USER_COLUMNS, user_quotas.c.user_id, self._user)),
            tuple(await self._read_all(row_mapping.KEY_COLUMNS, api_keys.c.key_id, self._key)),
            tuple(sorted(rules, key=lambda rule: (rule.priority, rule.name))),
            at_s,
        )

    async def changed_since(self, sequence: int, at_s: float | None = None) -> ConfigurationChanges | None:
        """Return what changed after `sequence`. None: it is too old, or of another database; read everything then.

        `at_s` is the time of the change with that number. It tells apart a database that was restored from a backup.
        """
        last, last_s = await self._last_change()
        if sequence and at_s is not None:
            known_s = await self._connection.scalar(select(changes.c.at).where(changes.c.sequence == sequence))
            if known_s != at_s:
                return None
        if sequence == last:
            return ConfigurationChanges(last, at_s=last_s)
        oldest = int(await self._connection.scalar(select(func.min(changes.c.sequence))) or 0)
        if sequence > last or sequence < oldest - 1:
            return None
        query = select(changes.c.kind, changes.c.subject).where(changes.c.sequence > sequence).distinct()
        found = (await self._connection.execute(query.limit(MAX_SUBJECTS + 1))).all()
        if len(found) > MAX_SUBJECTS or any(kind == EVERYTHING for kind, _ in found):
            return None
        subjects: dict[str, list[str]] = {"tier": [], "user": [], "key": [], "rule": []}
        for kind, subject in found:
            if kind in subjects:
                subjects[kind].append(subject)
        return ConfigurationChanges(
            last,
            await self._read_named(row_mapping.TIER_COLUMNS, tiers.c.name, subjects["tier"], self._tier),
            await self._read_named(row_mapping.USER_COLUMNS, user_quotas.c.user_id, subjects["user"], self._user),
            await self._read_named(row_mapping.KEY_COLUMNS, api_keys.c.key_id, subjects["key"], self._key),
            await self._read_named(row_mapping.RULE_COLUMNS, rate_limit_rules.c.rule_id, subjects["rule"], self._rule),
            last_s,
        )

    def _tier(self, row: AnyRow) -> Tier:
        return row_mapping.tier_from_row(row, self._limits)

    def _user(self, row: AnyRow) -> User:
        return row_mapping.user_from_row(row, self._limits)

    def _key(self, row: AnyRow) -> ApiKey:
        return row_mapping.key_from_row(row, self._limits)

    def _rule(self, row: AnyRow) -> StoredRule:
        return row_mapping.rule_from_row(row)

    async def _read_all(
        self, columns: Sequence[ColumnElement[Any]], by: Column[Any], make: Callable[[AnyRow], T]
    ) -> list[T]:
        # Ordered, so that two reads of the same rows are equal.
        query = select(*columns).order_by(by).execution_options(yield_per=ROWS_PER_STEP)
        made: list[T] = []
        try:
            async with self._connection.stream(query) as found:
                async for step in found.partitions(ROWS_PER_STEP):
                    made += [value for row in step if (value := _make_or_skip(make, row)) is not None]
                    await asyncio.sleep(0)
        except UNREADABLE:
            names = list(await self._connection.scalars(select(by).order_by(by)))
            found_by_name = await self._read_named(columns, by, names, make)
            return [value for name in names if (value := found_by_name[name]) is not None]
        return made

    async def _read_named(
        self,
        columns: Sequence[ColumnElement[Any]],
        by: Column[Any],
        names: list[str],
        make: Callable[[AnyRow], T],
    ) -> dict[str, T | None]:
        """Return the values by name; None for deleted ones."""
        values: dict[str, T | None] = dict.fromkeys(names)
        for some in chunks(names, ROWS_PER_STEP):
            for row in await self._rows(columns, by, some):
                values[row[0]] = _make_or_skip(make, row)
            await asyncio.sleep(0)
        return values

    async def _rows(self, columns: Sequence[ColumnElement[Any]], by: Column[Any], names: Sequence[str]) -> list[AnyRow]:
        """Read rows, without those with a value that is invalid in its column. Bisects to find these."""
        try:
            return list(await self._connection.execute(select(*columns).where(by.in_(names))))
        except UNREADABLE as error:
            if len(names) == 1:
                _log_unreadable(names[0], error)
                return []
            half = len(names) // 2
            return [*await self._rows(columns, by, names[:half]), *await self._rows(columns, by, names[half:])]


def _make_or_skip(make: Callable[[AnyRow], T], row: AnyRow) -> T | None:
    """Convert a row. Returns None if it is unreadable: a foreign row must not prevent reading the others."""
    try:
        return make(row)
    except UNREADABLE as error:
        _log_unreadable(str(row[0]), error)
        return None


def _log_unreadable(name: str, error: Exception) -> None:
    _log.error("database_row_unreadable", row=quote_name(name), error=str(error))
