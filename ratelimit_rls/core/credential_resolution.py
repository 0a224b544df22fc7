"""Replace the credentials of a request by the identity they prove, before matching, so that they are not passed on.

ext_authz   headers and query  ─► Identity ─► descriptors by the mapping
RLS         [x-api-key=rlk_…]  ─► Identity ─► [tier=gold, user=alice]

Authenticated callers that are blocked are rejected here, regardless of the rules.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from ratelimit_rls.core.attributes import Attributes, QueryParameterSource
from ratelimit_rls.core.entitlements import block_rejection, can_be_rejected
from ratelimit_rls.core.identity import (
    ANONYMOUS,
    CredentialEntry,
    CredentialKind,
    CredentialLocation,
    Identity,
    IdentityConfig,
    UnauthenticatedPolicy,
    Verifier,
)
from ratelimit_rls.core.model import Descriptor, Entry, Rejection, Request
from ratelimit_rls.errors import TooComplex

MAX_CREDENTIALS = 16
"""Different ones in a request of RLS. Verifying a signature takes 50 to 300 µs."""

MAX_CREDENTIAL_LENGTH = 16 * 1024
"""Maximum characters of a credential. Longer ones are invalid and are not verified."""

IP = "ip"
"""Key of the entry that identifies an unauthenticated caller by its address."""

REMOTE_ADDRESS = "remote_address"
"""Key of the entry in which Envoy sends the client's address."""

UNKNOWN_ADDRESS = "unknown"
"""Address used if the request has none. All such callers share counters, so that omitting it does not evade limits."""

_MISSING = "a credential is required: an API key or a token"
_INVALID = "the credential is not valid, or no longer valid"
UNAUTHORIZED = 401


Authentication = tuple[Identity, Rejection | None]
"""Identity of the caller, and why it is rejected, if it is. A plain tuple: a named one takes ten times as long."""


def authenticate(
    attributes: Attributes, config: IdentityConfig, verifier: Verifier | None, now_s: float
) -> Authentication:
    """Authenticate an HTTP request by the first location that has a credential."""
    for location in config.locations:
        is_plain = not location.query and not location.scheme  # as API keys usually are: saves a function call
        credential = attributes.headers.get(location.header, "") if is_plain else _find_credential(attributes, location)
        if credential:
            return _verify(location.kind, credential, config, verifier, now_s)
    if config.on_invalid is UnauthenticatedPolicy.REFUSE and _has_unreadable(attributes, config.locations):
        return _unauthenticated(UnauthenticatedPolicy.REFUSE, _INVALID)
    return _unauthenticated(config.on_missing, _MISSING) if config.locations else (ANONYMOUS, None)


class ResolvedRequest(NamedTuple):
    request: Request  # without credentials
    rejection: Rejection | None = None
    had_credentials: bool = False


def resolve_credentials(
    request: Request, config: IdentityConfig, verifier: Verifier | None, now_s: float
) -> ResolvedRequest:
    """Replace the descriptor entries that carry credentials by entries that name the caller.

    Raises TooComplex if the request carries more than MAX_CREDENTIALS different credentials.
    """
    carried = {entry.key: entry for entry in config.entries}
    if not any(entry.key in carried for descriptor in request.descriptors for entry in descriptor.entries):
        return ResolvedRequest(request)
    address = Entry(IP, _remote_address(request))
    rejection: Rejection | None = None
    verified: dict[tuple[str, str], Authentication] = {}  # each credential is verified once
    descriptors: list[Descriptor] = []
    for number, descriptor in enumerate(request.descriptors):
        entries: list[Entry] = []
        for entry in descriptor.entries:
            carrier = carried.get(entry.key)
            if carrier is None:
                entries.append(entry)
                continue
            if entry not in verified:
                if len(verified) == MAX_CREDENTIALS:
                    raise TooComplex(f"the request carries more than {MAX_CREDENTIALS} different credentials")
                verified[entry] = _verify_entry(carrier, entry.value, config, verifier, now_s)
            identity, rejected = verified[entry]
            if rejection is None and rejected is not None and _is_rejected(identity, request, descriptor):
                rejection = replace(rejected, descriptor_index=number)
            entries.extend(_identity_entries(identity, carrier) or [address])
        descriptors.append(descriptor._replace(entries=tuple(entries)))
    return ResolvedRequest(request._replace(descriptors=tuple(descriptors)), rejection, True)


def _verify_entry(
    entry: CredentialEntry, credential: str, config: IdentityConfig, verifier: Verifier | None, now_s: float
) -> Authentication:
    if not credential:
        return _unauthenticated(config.on_missing, _MISSING)
    return _verify(entry.kind, credential, config, verifier, now_s)


def _verify(
    kind: CredentialKind, credential: str, config: IdentityConfig, verifier: Verifier | None, now_s: float
) -> Authentication:
    if verifier is None or len(credential) > MAX_CREDENTIAL_LENGTH:
        return _unauthenticated(config.on_invalid, _INVALID)
    identity = verifier.identify(kind, credential, now_s)
    if identity is None:
        return _unauthenticated(config.on_invalid, _INVALID)
    block = verifier.block_of(identity, now_s)
    return identity, None if block is None else block_rejection(block, config.blocked_status)


def _is_rejected(identity: Identity, request: Request, descriptor: Descriptor) -> bool:
    """Return whether the rejection applies. Reports and refunds of blocked callers are still counted."""
    return identity is ANONYMOUS or can_be_rejected(request, descriptor)


def _identity_entries(identity: Identity, entry: CredentialEntry) -> list[Entry]:
    """Return the entries that replace the credential; empty if the identity has none of the fields."""
    fields = ((field, getattr(identity, field)) for field in entry.becomes)
    return [Entry(field, value) for field, value in fields if value]


def _unauthenticated(policy: UnauthenticatedPolicy, message: str) -> Authentication:
    is_rejected = policy is UnauthenticatedPolicy.REFUSE
    return ANONYMOUS, Rejection("unauthorized", message, UNAUTHORIZED) if is_rejected else None


def _find_credential(attributes: Attributes, location: CredentialLocation) -> str:
    if location.query:
        return _parameter(location.query).value(attributes) or ""
    scheme, _, credential = attributes.headers.get(location.header, "").partition(" ")
    return credential.strip(" ") if scheme.lower() == location.scheme else ""


def _has_unreadable(attributes: Attributes, locations: tuple[CredentialLocation, ...]) -> bool:
    """Return whether a header that should have a scheme and a credential is present, although no credential was found.

    It has another scheme, no credential, or several joined into one. In each case the caller did send something.
    """
    return any(location.scheme and location.header in attributes.headers for location in locations)


@lru_cache(64)
def _parameter(name: str) -> QueryParameterSource:
    """Return the source of a query parameter. The rules name only a few, so they are cached."""
    return QueryParameterSource(name)


def _remote_address(request: Request) -> str:
    for descriptor in request.descriptors:
        for key, value in descriptor.entries:
            if key == REMOTE_ADDRESS and value:
                return value
    return UNKNOWN_ADDRESS
