"""Changes of API keys and of tokens of administrators. Audit entries never contain digests."""

from __future__ import annotations

from sqlalchemy import insert, update

from ratelimit_rls.database.administration import AdminToken
from ratelimit_rls.database.queries import quote_name
from ratelimit_rls.database.row_mapping import Fields, key_image, key_row, token_image
from ratelimit_rls.database.tables import admin_tokens, api_keys
from ratelimit_rls.database.validation import check_name, check_timestamp
from ratelimit_rls.database.writes.audited import AuditedWrites, VersionCheck
from ratelimit_rls.errors import BadRequest, Conflict, NotFound
from ratelimit_rls.identity.accounts import ApiKey


class KeyWrites(AuditedWrites):
    """Changes of API keys."""

    async def add_key(self, key: ApiKey) -> ApiKey:
        """Create a key. Its user must exist."""
        _check(key)
        if await self.find_key(key.key_id):
            raise Conflict(f"key {quote_name(key.key_id)} already exists")
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
        return await self._record_key("create", None, key.key_id)

    async def put_key(self, key: ApiKey, expected: int | None = None) -> ApiKey:
        """Replace name, tier, limits and expiry; the rest of `key` is ignored. Raises Conflict if it is revoked."""
        _check(key)
        before = await self.key(key.key_id)
        VersionCheck("key", key.key_id, before.version).expect(expected)
        if before.revoked_s is not None:
            raise Conflict(f"key {quote_name(key.key_id)} is revoked: create a new one")
        await self._require_tier(key.tier)
        return await self._write_key("replace", before, key_row(key))

    async def revoke_key(self, key_id: str) -> ApiKey:
        """Revoke it permanently. Idempotent."""
        before = await self.key(key_id)
        if before.revoked_s is not None:
            return before
        row = {"is_active": False, "revoked_at": self._now_s, "revoked_by": self._actor.name}
        return await self._write_key("revoke", before, row)

    async def _require_owner(self, user_id: str) -> None:
        if not await self.find_user(user_id):
            raise BadRequest(f"user {quote_name(user_id)} does not exist: create it first", field="user_id")

    async def _write_key(self, action: str, before: ApiKey, row: Fields) -> ApiKey:
        written = {**row, "version": before.version + 1, "updated_at": self._now_s}
        await self._connection.execute(update(api_keys).where(api_keys.c.key_id == before.key_id).values(written))
        return await self._record_key(action, before, before.key_id)

    async def _record_key(self, action: str, before: ApiKey | None, key_id: str) -> ApiKey:
        after = await self.key(key_id)
        await self._audit(action, "key", key_id, key_image(before) if before else None, key_image(after))
        await self._feed("key", key_id)
        return after


class TokenWrites(AuditedWrites):
    """Changes of tokens. They are not in the change feed: only the admin API needs them, and it reads the database."""

    async def add_token(self, token: AdminToken) -> AdminToken:
        check_name(token.token_id, "the id of a token")
        check_name(token.name, "the name of a token")
        check_timestamp(token.expires_s, "the expiry of a token")
        try:
            await self.token(token.token_id)
        except NotFound:
            pass
        else:
            raise Conflict(f"token {quote_name(token.token_id)} already exists")
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
        """Revoke it permanently. Idempotent."""
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
    check_timestamp(key.expires_s, "the expiry of a key")
