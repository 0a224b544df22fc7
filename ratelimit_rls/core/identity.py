"""Identity of callers, and where to find their credentials."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from ratelimit_rls.core.entitlements import Block

BLOCKED_STATUS = 403
"""Default HTTP status for blocked callers."""


class CredentialKind(Enum):
    """Kinds of credential. The value is the name in YAML."""

    API_KEY = "api_key"
    JWT = "jwt"


class Identity(NamedTuple):
    """Authenticated identity of a caller. Unknown fields are empty."""

    user: str = ""
    tier: str = ""
    org: str = ""
    api_key: str = ""  # public id of the key, never the key itself


ANONYMOUS = Identity()


class Verifier(Protocol):
    def identify(self, kind: CredentialKind, credential: str, now_s: float) -> Identity | None:
        """Return the identity that a credential proves; None if it is not valid. Never raises and never blocks."""
        ...

    def block_of(self, identity: Identity, now_s: float) -> Block | None:
        """Return the block of the user in effect at `now_s`, if any."""
        ...


class UnauthenticatedPolicy(Enum):
    """Treatment of unauthenticated callers. The value is the name in YAML."""

    IP = "ip"  # identify the caller by its address
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class CredentialLocation:
    """Location of a credential in an HTTP request."""

    kind: CredentialKind
    header: str = ""  # lower case
    query: str = ""
    scheme: str = ""  # lower case; precedes the credential in the header, e.g. `bearer`


@dataclass(frozen=True, slots=True)
class CredentialEntry:
    """Entry of an RLS descriptor that carries a credential, and the entries that replace it."""

    key: str
    kind: CredentialKind
    becomes: tuple[str, ...]  # fields of Identity, in order: each non-empty one becomes an entry of that name


@dataclass(frozen=True, slots=True)
class IdentityConfig:
    """The `identity` section of one domain."""

    locations: tuple[CredentialLocation, ...] = ()  # tried in order; the first credential found is used
    entries: tuple[CredentialEntry, ...] = ()
    on_invalid: UnauthenticatedPolicy = UnauthenticatedPolicy.IP
    on_missing: UnauthenticatedPolicy = UnauthenticatedPolicy.IP
    blocked_status: int = BLOCKED_STATUS  # HTTP status; used by ext_authz, not by RLS
    hidden: tuple[str, ...] = ()  # headers with credentials, removed before the request goes upstream
