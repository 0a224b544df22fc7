"""Rows of administration: tokens, audit entries, stored responses and usage. No decision depends on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Role(StrEnum):
    """Roles of admin tokens. Each role includes the permissions of those before it."""

    READ = "read"
    WRITE = "write"
    ADMIN = "admin"  # may also manage tokens


@dataclass(frozen=True, slots=True)
class AdminToken:
    """A token for the admin API without its secret."""

    token_id: str
    digest: bytes = field(repr=False)
    name: str = ""
    role: Role = Role.READ
    expires_s: float | None = None
    revoked_s: float | None = None
    last_used_s: float | None = None
    created_s: float = 0.0

    @property
    def version(self) -> int:
        """Version as that of other resources: 1 when created, 2 once revoked. A token cannot change otherwise."""
        return 1 if self.revoked_s is None else 2


@dataclass(frozen=True, slots=True)
class AuditRow:
    """An audit entry: who changed what, with the values before (None: created) and after (None: deleted)."""

    audit_id: int
    at_s: float
    actor: str
    actor_token: str
    address: str
    action: str
    kind: str
    subject: str
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None
    request_id: str


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """Stored response to a request with an Idempotency-Key, returned again when the request is repeated."""

    request_digest: str
    status: int
    headers: Mapping[str, str]
    body: bytes
    at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class AccountUsage:
    """Usage of a user or an API key, as far as it has been written to the database."""

    total: int = 0  # for a key, since it was created; for a user, this month (UTC)
    today: int = 0  # users only (UTC)
    denied: int = 0  # users only, since the user was created
    last_s: float | None = None
