"""API keys, and tokens of administrators: made, changed, revoked. Their digests never leave their columns."""

from __future__ import annotations

from sqlalchemy import insert, update

from ratelimit_rls.core.accounts import AdminToken, ApiKey
from ratelimit_rls.errors import BadRequest, Conflict, NotFound
from ratelimit_rls.records.changing import Changing, Versioned
from ratelimit_rls.records.checks import check_moment, check_name
from ratelimit_rls.records.reader import shown
from ratelimit_rls.records.rows import Fields, key_image, key_row, token_image
from ratelimit_rls.records.tables import admin_tokens, api_keys


class KeyChanges(Changing):
    async def add_key(self, key: ApiKey) -> ApiKey:
        """Of a user that is there."""
        _check(key)
        if await self.find_key(key.key_id):
            raise Conflict(f"there is a key {shown(key.key_id)} already")
        await self._require_owner(key.user_id)
        await self._require_tier(key.tier)
        row = {
            **key_row(key),
            "key_id": key.key_id,
            "api_key_hash": key.digest,
            "user_id": key.user_id,
            "total_requests": 0,
            "is_active": True,
            "version": 1,
            "created_at": self._now_s,
            "updated_at": self._now_s,
        }
        await self._connection.execute(insert(api_keys), [row])
        return await self._told_key("create", None, key.key_id)

    async def put_key(self, key: ApiKey, expected: int | None = None) -> ApiKey:
        """Replace name, tier, limits and expiry; the rest of `key` is not looked at. What is revoked stays so."""
        _check(key)
        before = await self.key(key.key_id)
        Versioned("key", key.key_id, before.version).expect(expected)
        if before.revoked_s is not None:
            raise Conflict(f"key {shown(key.key_id)} is revoked: make a new one")
        await self._require_tier(key.tier)
        return await self._write_key("replace", before, key_row(key))

    async def revoke_key(self, key_id: str) -> ApiKey:
        """Twice is as good as once."""
        before = await self.key(key_id)
        if before.revoked_s is not None:
            return before
        row = {"is_active": False, "revoked_at": self._now_s, "revoked_by": self._actor.name}
        return await self._write_key("revoke", before, row)

    async def _require_owner(self, user_id: str) -> None:
        if not await self.find_user(user_id):
            raise BadRequest(f"there is no user {shown(user_id)} to have a key: create it first")

    async def _write_key(self, action: str, before: ApiKey, row: Fields) -> ApiKey:
        written = {**row, "version": before.version + 1, "updated_at": self._now_s}
        await self._connection.execute(update(api_keys).where(api_keys.c.key_id == before.key_id).values(written))
        return await self._told_key(action, before, before.key_id)

    async def _told_key(self, action: str, before: ApiKey | None, key_id: str) -> ApiKey:
        after = await self.key(key_id)
        await self._audit(action, "key", key_id, key_image(before) if before else None, key_image(after))
        await self._feed("key", key_id)
        return after


class TokenChanges(Changing):
    """Not in the feed: only the API of administrators asks for them, and it asks the database."""

    async def add_token(self, token: AdminToken) -> AdminToken:
        check_name(token.token_id, "the id of a token")
        check_name(token.name, "the name of a token")
        check_moment(token.expires_s, "the expiry of a token")
        try:
            await self.token(token.token_id)
        except NotFound:
            pass
        else:
            raise Conflict(f"there is a token {shown(token.token_id)} already")
        row = {
            "token_id": token.token_id,
            "token_hash": token.digest,
            "name": token.name,
            "role": token.role.value,
            "expires_at": token.expires_s,
            "created_at": self._now_s,
        }
        await self._connection.execute(insert(admin_tokens), [row])
        after = await self.token(token.token_id)
        await self._audit("create", "token", token.token_id, None, token_image(after))
        return after

    async def revoke_token(self, token_id: str) -> AdminToken:
        """Twice is as good as once."""
        before = await self.token(token_id)
        if before.revoked_s is not None:
            return before
        row = {"revoked_at": self._now_s, "revoked_by": self._actor.name}
        await self._connection.execute(update(admin_tokens).where(admin_tokens.c.token_id == token_id).values(row))
        after = await self.token(token_id)
        await self._audit("revoke", "token", token_id, token_image(before), token_image(after))
        return after


def _check(key: ApiKey) -> None:
    check_name(key.key_id, "the id of a key")
    check_name(key.name, "the name of a key", may_be_empty=True)
    check_moment(key.expires_s, "the expiry of a key")
