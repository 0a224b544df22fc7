"""Who is calling, as far as a credential proves it, and where credentials are to be looked for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from ratelimit_rls.core.accounts import Block

BLOCKED_STATUS = 403
"""Of blocked callers, where the rules say nothing else."""


class CredentialKind(Enum):
    """The value is the word in YAML."""

    API_KEY = "api_key"
    JWT = "jwt"


class Identity(NamedTuple):
    """What is not known is empty."""

    user: str = ""
    tier: str = ""
    org: str = ""
    api_key: str = ""  # its public id, never the key


ANONYMOUS = Identity()


class Verifier(Protocol):
    def identify(self, kind: CredentialKind, credential: str, now_s: float) -> Identity | None:
        """Whose credential it is; None if it is nobody's, or not any more. Never raises, and waits for nothing."""
        ...

    def block_of(self, identity: Identity, now_s: float) -> Block | None:
        """The block of whoever it is, if there is one at this moment."""
        ...


class Otherwise(Enum):
    """What becomes of a caller that proves nothing. The value is the word in YAML."""

    IP = "ip"  # it is known by its address alone
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class CredentialPlace:
    """Of an HTTP request, where a credential stands."""

    kind: CredentialKind
    header: str = ""  # in lower case
    query: str = ""
    scheme: str = ""  # in lower case: what stands before it in the header, e.g. `bearer`


@dataclass(frozen=True, slots=True)
class CredentialEntry:
    """Of a descriptor that Envoy sends over RLS, the entry that carries one, and what takes its place."""

    key: str
    kind: CredentialKind
    becomes: tuple[str, ...]  # fields of Identity, in order: each that is known becomes an entry of that name


@dataclass(frozen=True, slots=True)
class IdentityTerms:
    """`identity` of one domain."""

    places: tuple[CredentialPlace, ...] = ()  # the first that has something counts
    entries: tuple[CredentialEntry, ...] = ()
    on_invalid: Otherwise = Otherwise.IP
    on_missing: Otherwise = Otherwise.IP
    blocked_status: int = BLOCKED_STATUS  # where the protocol lets us choose: ext_authz, not RLS
    hidden: tuple[str, ...] = ()  # headers with credentials that the upstream is not shown
