"""Changes of tiers: create, replace, delete."""

from __future__ import annotations

from sqlalchemy import delete, insert, select, update

from ratelimit_rls.database.queries import quote_name
from ratelimit_rls.database.row_mapping import tier_image, tier_row
from ratelimit_rls.database.tables import api_keys, tiers, user_quotas
from ratelimit_rls.database.validation import check_caller_name, check_text
from ratelimit_rls.database.writes.audited import AuditedWrites, VersionCheck
from ratelimit_rls.errors import Conflict
from ratelimit_rls.identity.accounts import Tier


class TierWrites(AuditedWrites):
    """Changes of tiers."""

    async def add_tier(self, tier: Tier) -> Tier:
        _check(tier)
        if await self.find_tier(tier.name):
            raise Conflict(f"tier {quote_name(tier.name)} already exists")
        return await self._write_tier(tier, None)

    async def put_tier(self, tier: Tier, expected: int | None = None) -> Tier:
        """Create or replace a tier."""
        _check(tier)
        before = await self.find_tier(tier.name)
        VersionCheck("tier", tier.name, before.version if before else None).expect(expected)
        return await self._write_tier(tier, before)

    async def delete_tier(self, name: str, expected: int | None = None) -> None:
        """Delete a tier. Raises Conflict while users or keys have it."""
        before = await self.tier(name)
        VersionCheck("tier", name, before.version).expect(expected)
        for table, what in ((user_quotas, "users"), (api_keys, "keys")):
            if (await self._connection.execute(select(table.c.tier).where(table.c.tier == name).limit(1))).first():
                raise Conflict(f"tier {quote_name(name)} still has {what}: give them another tier first")
        await self._connection.execute(delete(tiers).where(tiers.c.name == name))
        await self._audit("delete", "tier", name, tier_image(before), None)
        await self._feed("tier", name)

    async def _write_tier(self, tier: Tier, before: Tier | None) -> Tier:
        row = {**tier_row(tier), "updated_at": self._now_s}
        if before is None:
            await self._connection.execute(insert(tiers), [{**row, "version": 1, "created_at": self._now_s}])
        else:
            written = {**row, "version": before.version + 1}
            await self._connection.execute(update(tiers).where(tiers.c.name == tier.name).values(written))
        after = await self.tier(tier.name)
        action = "replace" if before else "create"
        await self._audit(action, "tier", tier.name, tier_image(before) if before else None, tier_image(after))
        await self._feed("tier", tier.name)
        return after


def _check(tier: Tier) -> None:
    check_caller_name(tier.name, "the name of a tier")
    check_text(tier.description, "the description of a tier")
