"""What a body names must be there: 422 otherwise, since the path is right."""

from __future__ import annotations

from ratelimit_rls.records.desk import Reader
from ratelimit_rls.transport.http.admin.problems import wrong_field


async def require_tier(reader: Reader, name: str) -> None:
    """An empty name is that of none."""
    if name and await reader.find_tier(name) is None:
        raise wrong_field("tier", f"there is no tier '{name}'; PUT /api/v1/tiers/… makes one")


async def require_user(reader: Reader, user_id: str) -> None:
    if await reader.find_user(user_id) is None:
        raise wrong_field("user_id", f"there is no user '{user_id}'; PUT /api/v1/users/… makes one")
