"""Changes of users: tier and custom limits, overrides and blocks; single users, or a hundred thousand at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import delete, func, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite

from ratelimit_rls.core.entitlements import Block
from ratelimit_rls.database.change_feed import EVERYTHING
from ratelimit_rls.database.queries import quote_name
from ratelimit_rls.database.row_mapping import (
    KEY_COLUMNS,
    ZERO_USAGE,
    Fields,
    block_row,
    chunks,
    key_from_row,
    key_image,
    override_row,
    user_image,
    user_row,
)
from ratelimit_rls.database.tables import api_keys, user_quotas
from ratelimit_rls.database.validation import check_caller_name, check_text, check_timestamp
from ratelimit_rls.database.writes.audited import AuditedWrites, VersionCheck
from ratelimit_rls.identity.accounts import Override, User


class UserWrites(AuditedWrites):
    """Changes of users."""

    async def put_user(self, user: User, expected: int | None = None) -> User:
        """Create a user, or replace its tier, org and custom limits. An override and a block stay."""
        _check(user)
        before = await self.find_user(user.user_id)
        VersionCheck("user", user.user_id, before.version if before else None).expect(expected)
        await self._require_tier(user.tier)
        return await self._write_user("replace", before, user_row(user))

    async def set_tier(self, user_id: str, tier: str) -> User:
        """Set the tier of a user, who may be new. "" removes it."""
        await self._require_tier(tier)
        return await self._set("tier", user_id, {"tier": tier or None})

    async def set_override(self, user_id: str, override: Override | None) -> User:
        """Set the override of a user, who may be new. None removes it."""
        if override is None:
            await self.user(user_id)
            return await self._set("end override", user_id, override_row(None))
        check_text(override.reason, "the reason of an override")
        check_timestamp(override.until_s, "the end of an override")
        return await self._set("override", user_id, override_row(override))

    async def set_block(self, user_id: str, block: Block | None) -> User:
        """Block a user, who may be new: unknown users can be blocked, too. None removes the block."""
        if block is None:
            await self.user(user_id)
            return await self._set("unblock", user_id, block_row(None))
        check_text(block.reason, "the reason of a block")
        check_timestamp(block.until_s, "the end of a block")
        return await self._set("block", user_id, block_row(block))

    async def delete_user(self, user_id: str, expected: int | None = None) -> None:
        """Delete a user and its keys."""
        before = await self.user(user_id)
        VersionCheck("user", user_id, before.version).expect(expected)
        keys = await self._connection.execute(select(*KEY_COLUMNS).where(api_keys.c.user_id == user_id))
        for key in [key_from_row(row, self._limits) for row in keys]:
            await self._audit("delete", "key", key.key_id, key_image(key), None)
            await self._feed("key", key.key_id)
        await self._connection.execute(delete(api_keys).where(api_keys.c.user_id == user_id))
        await self._connection.execute(delete(user_quotas).where(user_quotas.c.user_id == user_id))
        await self._audit("delete", "user", user_id, user_image(before), None)
        await self._feed("user", user_id)

    async def put_users(self, users: Iterable[User]) -> int:
        """Create or replace many users, with one audit entry and one change feed row for all. Return their number."""
        given = {user.user_id: user for user in users}
        for user in given.values():
            _check(user)
        for tier in {user.tier for user in given.values()}:
            await self._require_tier(tier)
        before = await self._count_all_users()
        for ids in chunks(given, 1000):
            await self._connection.execute(self._upsert(), [_new_row(self._now_s, user_row(given[one])) for one in ids])
        created = await self._count_all_users() - before
        summary = {"created": created, "replaced": len(given) - created}
        await self._audit("import", "user", "*", None, summary)
        await self._feed(EVERYTHING, "*")
        return len(given)

    async def _count_all_users(self) -> int:
        return int(await self._connection.scalar(select(func.count()).select_from(user_quotas)) or 0)

    def _upsert(self) -> postgresql.Insert | sqlite.Insert:
        of_dialect = postgresql.insert if self._connection.dialect.name == "postgresql" else sqlite.insert
        statement = of_dialect(user_quotas)
        replaced = {name: statement.excluded[name] for name in ("tier", "org", "custom_limits", "updated_at")}
        return statement.on_conflict_do_update(
            index_elements=[user_quotas.c.user_id], set_={**replaced, "version": user_quotas.c.version + 1}
        )

    async def _set(self, action: str, user_id: str, what: Fields) -> User:
        before = await self.find_user(user_id)
        if before is None:
            check_caller_name(user_id, "the id of a user")
        return await self._write_user(action, before, {"user_id": user_id, **what})

    async def _write_user(self, action: str, before: User | None, row: Fields) -> User:
        user_id: str = row["user_id"]
        if before is None:
            await self._connection.execute(insert(user_quotas), [_new_row(self._now_s, row)])
        else:
            written = {**row, "version": before.version + 1, "updated_at": self._now_s}
            await self._connection.execute(update(user_quotas).where(user_quotas.c.user_id == user_id).values(written))
        after = await self.user(user_id)
        if before is None and action == "replace":
            action = "create"
        await self._audit(action, "user", user_id, user_image(before) if before else None, user_image(after))
        await self._feed("user", user_id)
        return after


def _new_row(now_s: float, row: Fields) -> dict[str, Any]:
    """Return a row with every column, so that one statement inserts all rows."""
    nothing = {"tier": None, "org": None, "custom_limits": None, **override_row(None), **block_row(None)}
    return {**nothing, **ZERO_USAGE, **row, "version": 1, "created_at": now_s, "updated_at": now_s}


def _check(user: User) -> None:
    check_caller_name(user.user_id, "the id of a user")
    check_caller_name(user.org, f"the org of user {quote_name(user.user_id)}", may_be_empty=True)
