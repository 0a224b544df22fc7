"""What is there, as of one moment: values by name, pages of them, and how much each was used.

Pages are sorted by id (rules: by priority, then name); `after` is the last id of the page before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

from sqlalchemy import Select, Table, select, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection

from ratelimit_rls.core.accounts import (
    AdminToken,
    ApiKey,
    AuditRow,
    KeptAnswer,
    StoredRule,
    Tier,
    Use,
    User,
)
from ratelimit_rls.errors import BadRequest, NotFound, RecordsError, one_line
from ratelimit_rls.records import rows, use
from ratelimit_rls.records.rows import AnyRow, Limits
from ratelimit_rls.records.tables import (
    admin_audit_log,
    admin_tokens,
    api_keys,
    idempotency_keys,
    rate_limit_rules,
    tiers,
    user_quotas,
)

KEPT_S = 86_400.0
"""For how long an answer is kept for whoever sends a request again."""

MOST_ON_A_PAGE = 1000

Query = Select[*tuple[Any, ...]]

T = TypeVar("T")

UNREADABLE = (ValueError, TypeError, ArithmeticError)
"""What columns raise, and what is made of them, where somebody else has written what has no meaning there."""


class Reader:
    """Within one transaction. NotFound where there is nothing of that name."""

    def __init__(self, connection: AsyncConnection, now_s: float) -> None:
        self._connection = connection
        self._now_s = now_s
        self._limits = Limits()

    async def tier(self, name: str) -> Tier:
        return await self.find_tier(name) or _missing("tier", name)

    async def find_tier(self, name: str) -> Tier | None:
        row = await self._one(select(*rows.TIER_COLUMNS).where(tiers.c.name == name), name)
        return self._read(rows.tier_of, row) if row else None

    async def tiers(self, after: str = "", limit: int = 100) -> list[Tier]:
        found = await self._page(select(*rows.TIER_COLUMNS), tiers, "name", after, limit)
        return [self._read(rows.tier_of, row) for row in found]

    async def user(self, user_id: str) -> User:
        return await self.find_user(user_id) or _missing("user", user_id)

    async def find_user(self, user_id: str) -> User | None:
        row = await self._one(select(*rows.USER_COLUMNS).where(user_quotas.c.user_id == user_id), user_id)
        return self._read(rows.user_of, row) if row else None

    async def users(
        self, after: str = "", limit: int = 100, *, tier: str | None = None, blocked: bool | None = None
    ) -> list[User]:
        """`tier`: those that have it, "" those that have none. `blocked`: marked so, be it that the block has ended."""
        query = select(*rows.USER_COLUMNS)
        if tier is not None:
            query = query.where(user_quotas.c.tier == tier if tier else user_quotas.c.tier.is_(None))
        if blocked is not None:
            query = query.where(user_quotas.c.is_blocked.is_(blocked))
        found = await self._page(query, user_quotas, "user_id", after, limit)
        return [self._read(rows.user_of, row) for row in found]

    async def key(self, key_id: str) -> ApiKey:
        return await self.find_key(key_id) or _missing("key", key_id)

    async def find_key(self, key_id: str) -> ApiKey | None:
        row = await self._one(select(*rows.KEY_COLUMNS).where(api_keys.c.key_id == key_id), key_id)
        return self._read(rows.key_of, row) if row else None

    async def keys(self, after: str = "", limit: int = 100, *, user_id: str | None = None) -> list[ApiKey]:
        query = select(*rows.KEY_COLUMNS)
        if user_id is not None:
            query = query.where(api_keys.c.user_id == user_id)
        found = await self._page(query, api_keys, "key_id", after, limit)
        return [self._read(rows.key_of, row) for row in found]

    async def rule(self, rule_id: str) -> StoredRule:
        row = await self._one(select(*rows.RULE_COLUMNS).where(rate_limit_rules.c.rule_id == rule_id), rule_id)
        return _rule_of(row) if row else _missing("rule", rule_id)

    async def rule_named(self, name: str) -> StoredRule:
        row = await self._one(select(*rows.RULE_COLUMNS).where(rate_limit_rules.c.rule_name == name), name)
        return _rule_of(row) if row else _missing("rule", name)

    async def rules(
        self, after: str = "", limit: int = 100, *, domain: str | None = None, enabled: bool | None = None
    ) -> list[StoredRule]:
        table = rate_limit_rules
        query = select(*rows.RULE_COLUMNS).order_by(table.c.priority, table.c.rule_name)
        if domain is not None:
            query = query.where(table.c.domain == domain)
        if enabled is not None:
            query = query.where(table.c.enabled.is_(enabled))
        if after:
            try:
                last = await self.rule(after)
            except NotFound:
                raise BadRequest("the rule that this page begins after is gone: begin with the first page") from None
            query = query.where(tuple_(table.c.priority, table.c.rule_name) > tuple_(last.priority, last.name))
        with _telling("of a page of rules"):
            found = list(await self._connection.execute(query.limit(_at_most(limit))))
        return [_rule_of(row) for row in found]

    async def token(self, token_id: str) -> AdminToken:
        row = await self._one(select(*rows.TOKEN_COLUMNS).where(admin_tokens.c.token_id == token_id), token_id)
        return rows.token_of(row) if row else _missing("token", token_id)

    async def tokens(self, after: str = "", limit: int = 100) -> list[AdminToken]:
        found = await self._page(select(*rows.TOKEN_COLUMNS), admin_tokens, "token_id", after, limit)
        return [rows.token_of(row) for row in found]

    async def audit(
        self,
        before: int | None = None,
        limit: int = 100,
        *,
        kind: str | None = None,
        subject: str | None = None,
        actor: str | None = None,
    ) -> list[AuditRow]:
        """Newest first; `before` is the last audit_id of the page before."""
        table = admin_audit_log
        query = select(*rows.AUDIT_COLUMNS).order_by(table.c.audit_id.desc()).limit(_at_most(limit))
        if before is not None:
            query = query.where(table.c.audit_id < min(before, 2**63 - 1))
        for column, wanted in ((table.c.kind, kind), (table.c.subject, subject), (table.c.actor, actor)):
            if wanted is not None:
                if not _can_be_stored(wanted):
                    return []
                query = query.where(column == wanted)
        return [rows.audit_of(row) for row in await self._connection.execute(query)]

    async def idempotent(self, token_id: str, key: str) -> KeptAnswer | None:
        """What was answered to it in the last day."""
        table = idempotency_keys
        query = select(table.c.request_digest, table.c.status, table.c.headers, table.c.body, table.c.created_at).where(
            table.c.token_id == token_id, table.c.key == key, table.c.created_at > self._now_s - KEPT_S
        )
        row = await self._one(query, key)
        return KeptAnswer(row[0], row[1], row[2], bytes(row[3]), row[4]) if row else None

    async def use_of_users(self, user_ids: Iterable[str]) -> Mapping[str, Use]:
        """Of those there are."""
        return await use.use_of_users(self._connection, user_ids, self._now_s)

    async def use_of_keys(self, key_ids: Iterable[str]) -> Mapping[str, Use]:
        """Of those there are."""
        return await use.use_of_keys(self._connection, key_ids)

    async def _one(self, query: Query, name: str) -> AnyRow | None:
        if not _can_be_stored(name):
            return None  # some databases refuse to look for it
        with _telling(name):
            return (await self._connection.execute(query)).one_or_none()

    async def _page(self, query: Query, table: Table, column: str, after: str, limit: int) -> list[AnyRow]:
        if not _can_be_stored(after):
            raise BadRequest("a page begins after a name, and this is none")
        by = table.c[column]
        with _telling(f"after {after}"):
            found = await self._connection.execute(query.where(by > after).order_by(by).limit(_at_most(limit)))
            return list(found)

    def _read(self, make: Callable[[AnyRow, Limits], T], row: AnyRow) -> T:
        with _telling(row[0]):
            return make(row, self._limits)


def _rule_of(row: AnyRow) -> StoredRule:
    with _telling(row[1]):
        return rows.rule_of(row)


@contextmanager
def _telling(name: str) -> Iterator[None]:
    """What this service did not write may not be what it can read."""
    try:
        yield
    except UNREADABLE as error:
        raise RecordsError(f"a row was not stored by this service: {shown(name)}: {error}") from None


def _at_most(limit: int) -> int:
    return min(max(limit, 1), MOST_ON_A_PAGE)


def _can_be_stored(name: str) -> bool:
    return "\0" not in name and not any("\ud800" <= character <= "\udfff" for character in name)


def shown(name: str) -> str:
    """For messages: in quotes, on one line, and not without end."""
    return f'"{one_line(name[:100])}"'


def _missing(kind: str, name: str) -> NoReturn:
    raise NotFound(f"there is no {kind} {shown(name)}")
