"""Queries within one transaction: single accounts, pages of them, and their usage.

Pages are sorted by id (rules: by priority, then name); `after` is the last id of the previous page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

from sqlalchemy import Select, Table, select, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection

from ratelimit_rls.database import row_mapping
from ratelimit_rls.database.administration import AccountUsage, AdminToken, AuditRow, StoredResponse
from ratelimit_rls.database.row_mapping import AnyRow, LimitCache
from ratelimit_rls.database.tables import (
    admin_audit_log,
    admin_tokens,
    api_keys,
    idempotency_keys,
    rate_limit_rules,
    tiers,
    user_quotas,
)
from ratelimit_rls.database.usage import counters
from ratelimit_rls.errors import BadRequest, DatabaseError, NotFound, one_line
from ratelimit_rls.identity.accounts import ApiKey, Tier, User
from ratelimit_rls.rules.stored_rule import StoredRule

IDEMPOTENCY_TTL_S = 86_400.0
"""Time for which the response to a request with an Idempotency-Key is stored."""

MAX_PAGE_SIZE = 1000

Query = Select[*tuple[Any, ...]]

T = TypeVar("T")

UNREADABLE = (ValueError, TypeError, ArithmeticError)
"""Exceptions raised by column types and row mapping for values that this service did not write."""


class AccountReader:
    """Queries within one transaction. Methods without `find_` raise NotFound if there is no such row."""

    def __init__(self, connection: AsyncConnection, now_s: float) -> None:
        self._connection = connection
        self._now_s = now_s
        self._limits = LimitCache()

    async def tier(self, name: str) -> Tier:
        return await self.find_tier(name) or _not_found("tier", name)

    async def find_tier(self, name: str) -> Tier | None:
        row = await self._one(select(*row_mapping.TIER_COLUMNS).where(tiers.c.name == name), name)
        return self._read(row_mapping.tier_from_row, row) if row else None

    async def tiers(self, after: str = "", limit: int = 100) -> list[Tier]:
        found = await self._page(select(*row_mapping.TIER_COLUMNS), tiers, "name", after, limit)
        return [self._read(row_mapping.tier_from_row, row) for row in found]

    async def user(self, user_id: str) -> User:
        return await self.find_user(user_id) or _not_found("user", user_id)

    async def find_user(self, user_id: str) -> User | None:
        row = await self._one(select(*row_mapping.USER_COLUMNS).where(user_quotas.c.user_id == user_id), user_id)
        return self._read(row_mapping.user_from_row, row) if row else None

    async def users(
        self, after: str = "", limit: int = 100, *, tier: str | None = None, blocked: bool | None = None
    ) -> list[User]:
        """`tier`: only users of this tier; "": only users without one. `blocked`: marked as such, even if the block
        ended."""
        query = select(*row_mapping.USER_COLUMNS)
        if tier is not None:
            query = query.where(user_quotas.c.tier == tier if tier else user_quotas.c.tier.is_(None))
        if blocked is not None:
            query = query.where(user_quotas.c.is_blocked.is_(blocked))
        found = await self._page(query, user_quotas, "user_id", after, limit)
        return [self._read(row_mapping.user_from_row, row) for row in found]

    async def key(self, key_id: str) -> ApiKey:
        return await self.find_key(key_id) or _not_found("key", key_id)

    async def find_key(self, key_id: str) -> ApiKey | None:
        row = await self._one(select(*row_mapping.KEY_COLUMNS).where(api_keys.c.key_id == key_id), key_id)
        return self._read(row_mapping.key_from_row, row) if row else None

    async def keys(self, after: str = "", limit: int = 100, *, user_id: str | None = None) -> list[ApiKey]:
        query = select(*row_mapping.KEY_COLUMNS)
        if user_id is not None:
            query = query.where(api_keys.c.user_id == user_id)
        found = await self._page(query, api_keys, "key_id", after, limit)
        return [self._read(row_mapping.key_from_row, row) for row in found]

    async def rule(self, rule_id: str) -> StoredRule:
        row = await self._one(select(*row_mapping.RULE_COLUMNS).where(rate_limit_rules.c.rule_id == rule_id), rule_id)
        return _rule_of(row) if row else _not_found("rule", rule_id)

    async def rule_named(self, name: str) -> StoredRule:
        row = await self._one(select(*row_mapping.RULE_COLUMNS).where(rate_limit_rules.c.rule_name == name), name)
        return _rule_of(row) if row else _not_found("rule", name)

    async def rules(
        self, after: str = "", limit: int = 100, *, domain: str | None = None, enabled: bool | None = None
    ) -> list[StoredRule]:
        table = rate_limit_rules
        query = select(*row_mapping.RULE_COLUMNS).order_by(table.c.priority, table.c.rule_name)
        if domain is not None:
            query = query.where(table.c.domain == domain)
        if enabled is not None:
            query = query.where(table.c.enabled.is_(enabled))
        if after:
            try:
                last = await self.rule(after)
            except NotFound:
                raise BadRequest(
                    "the rule at which the previous page ended was deleted: start with the first page"
                ) from None
            query = query.where(tuple_(table.c.priority, table.c.rule_name) > tuple_(last.priority, last.name))
        with _unreadable_as_error("a page of rules"):
            found = list(await self._connection.execute(query.limit(_clamp_limit(limit))))
        return [_rule_of(row) for row in found]

    async def token(self, token_id: str) -> AdminToken:
        row = await self._one(select(*row_mapping.TOKEN_COLUMNS).where(admin_tokens.c.token_id == token_id), token_id)
        return row_mapping.token_from_row(row) if row else _not_found("token", token_id)

    async def tokens(self, after: str = "", limit: int = 100) -> list[AdminToken]:
        found = await self._page(select(*row_mapping.TOKEN_COLUMNS), admin_tokens, "token_id", after, limit)
        return [row_mapping.token_from_row(row) for row in found]

    async def audit(
        self,
        before: int | None = None,
        limit: int = 100,
        *,
        kind: str | None = None,
        subject: str | None = None,
        actor: str | None = None,
    ) -> list[AuditRow]:
        """Return audit entries, newest first; `before` is the last audit_id of the previous page."""
        table = admin_audit_log
        query = select(*row_mapping.AUDIT_COLUMNS).order_by(table.c.audit_id.desc()).limit(_clamp_limit(limit))
        if before is not None:
            query = query.where(table.c.audit_id < min(before, 2**63 - 1))
        for column, wanted in ((table.c.kind, kind), (table.c.subject, subject), (table.c.actor, actor)):
            if wanted is not None:
                if not _can_be_stored(wanted):
                    return []
                query = query.where(column == wanted)
        return [row_mapping.audit_from_row(row) for row in await self._connection.execute(query)]

    async def stored_response(self, token_id: str, key: str) -> StoredResponse | None:
        """Return the response stored under an Idempotency-Key within the last day."""
        table = idempotency_keys
        query = select(table.c.request_digest, table.c.status, table.c.headers, table.c.body, table.c.created_at).where(
            table.c.token_id == token_id, table.c.key == key, table.c.created_at > self._now_s - IDEMPOTENCY_TTL_S
        )
        row = await self._one(query, key)
        return StoredResponse(row[0], row[1], row[2], bytes(row[3]), row[4]) if row else None

    async def usage_of_users(self, user_ids: Iterable[str]) -> Mapping[str, AccountUsage]:
        """Return the usage of those users that exist."""
        return await counters.usage_of_users(self._connection, user_ids, self._now_s)

    async def usage_of_keys(self, key_ids: Iterable[str]) -> Mapping[str, AccountUsage]:
        """Return the usage of those keys that exist."""
        return await counters.usage_of_keys(self._connection, key_ids)

    async def _one(self, query: Query, name: str) -> AnyRow | None:
        if not _can_be_stored(name):
            return None  # PostgreSQL rejects it in a query
        with _unreadable_as_error(name):
            return (await self._connection.execute(query)).one_or_none()

    async def _page(self, query: Query, table: Table, column: str, after: str, limit: int) -> list[AnyRow]:
        if not _can_be_stored(after):
            raise BadRequest("`after` must be a name from the previous page")
        by = table.c[column]
        with _unreadable_as_error(f"a page after {after}"):
            found = await self._connection.execute(query.where(by > after).order_by(by).limit(_clamp_limit(limit)))
            return list(found)

    def _read(self, make: Callable[[AnyRow, LimitCache], T], row: AnyRow) -> T:
        with _unreadable_as_error(row[0]):
            return make(row, self._limits)


def _rule_of(row: AnyRow) -> StoredRule:
    with _unreadable_as_error(row[1]):
        return row_mapping.rule_from_row(row)


@contextmanager
def _unreadable_as_error(name: str) -> Iterator[None]:
    """Raise DatabaseError for a row that this service cannot read, because it did not write it."""
    try:
        yield
    except UNREADABLE as error:
        raise DatabaseError(f"unreadable row, not written by this service: {quote_name(name)}: {error}") from None


def _clamp_limit(limit: int) -> int:
    return min(max(limit, 1), MAX_PAGE_SIZE)


def _can_be_stored(name: str) -> bool:
    return "\0" not in name and not any("\ud800" <= character <= "\udfff" for character in name)


def quote_name(name: str) -> str:
    """Format a name for messages: in quotes, on one line, at most 100 characters."""
    return f'"{one_line(name[:100])}"'


def _not_found(kind: str, name: str) -> NoReturn:
    raise NotFound(f"{kind} {quote_name(name)} does not exist")
