"""API keys and tokens of administrators that are to be created. Only a digest of their secret is stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ratelimit_rls.core.model import Limit
from ratelimit_rls.database.administration import AdminToken, Role
from ratelimit_rls.identity.accounts import ApiKey
from ratelimit_rls.identity.key_format import digest, new_secret


class NewKey(NamedTuple):
    """An API key and its text, which is returned to the administrator once."""

    key: ApiKey
    text: str


class NewAdminToken(NamedTuple):
    """A token and its text, which is returned to the administrator once."""

    token: AdminToken
    text: str


def new_key(
    key_secret: bytes,
    user_id: str,
    *,
    name: str = "",
    tier: str = "",
    limits: Sequence[Limit] = (),
    expires_s: float | None = None,
) -> NewKey:
    secret = new_secret("rlk")
    hashed = digest(key_secret, secret.text)
    return NewKey(ApiKey(secret.public_id, hashed, user_id, name, tier, tuple(limits), expires_s), secret.text)


def new_admin_token(key_secret: bytes, name: str, role: Role, expires_s: float | None = None) -> NewAdminToken:
    secret = new_secret("rla")
    hashed = digest(key_secret, secret.text)
    return NewAdminToken(AdminToken(secret.public_id, hashed, name, role, expires_s), secret.text)
