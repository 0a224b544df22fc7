"""Credentials in a request, and who the caller is by them: before anything is matched, so that none goes any further.

ext_authz   headers and query  ─► Identity ─► descriptors by the mapping
RLS         [x-api-key=rlk_…]  ─► Identity ─► [tier=gold, user=alice]

Who is proved to be somebody who is blocked is refused here, whatever the rules say of them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from ratelimit_rls.core.attributes import Attributes, QueryParameter
from ratelimit_rls.core.identity import (
    ANONYMOUS,
    CredentialEntry,
    CredentialKind,
    CredentialPlace,
    Identity,
    IdentityTerms,
    Otherwise,
    Verifier,
)
from ratelimit_rls.core.model import Descriptor, Entry, Refusal, Request
from ratelimit_rls.core.standing import can_be_refused, refusal_of

LONGEST_CREDENTIAL = 16 * 1024
"""Characters. Longer ones are nobody's, and are not looked at."""

IP = "ip"
"""The key of the entry by which a caller is known that proves nothing."""

REMOTE_ADDRESS = "remote_address"
"""The key under which Envoy sends the client's address."""

UNKNOWN_ADDRESS = "unknown"
"""Whose address is not in the request: all of these are one caller, so that proving nothing is no way around limits."""

_MISSING = "a credential is needed: an API key or a token"
_INVALID = "the credential is not valid, or not any more"
UNAUTHORIZED = 401


Proved = tuple[Identity, Refusal | None]
"""Who it is, and why it is refused all the same. A plain tuple: one with names takes ten times as long to make."""


def prove(attributes: Attributes, terms: IdentityTerms, verifier: Verifier | None, now_s: float) -> Proved:
    """Who asks, by the first place that has a credential."""
    for place in terms.places:
        is_plain = not place.query and not place.scheme  # as an API key mostly is: not worth a call
        credential = attributes.headers.get(place.header, "") if is_plain else _found(attributes, place)
        if credential:
            return _proved(place.kind, credential, terms, verifier, now_s)
    return _unproved(terms.on_missing, _MISSING) if terms.places else (ANONYMOUS, None)


class Resolved(NamedTuple):
    request: Request  # without credentials
    refusal: Refusal | None = None
    had_any: bool = False


def resolve(request: Request, terms: IdentityTerms, verifier: Verifier | None, now_s: float) -> Resolved:
    """The request with entries that say who is calling in place of those that carry a credential."""
    carried = {entry.key: entry for entry in terms.entries}
    if not any(entry.key in carried for descriptor in request.descriptors for entry in descriptor.entries):
        return Resolved(request)
    address = Entry(IP, _address(request))
    refusal: Refusal | None = None
    descriptors: list[Descriptor] = []
    for number, descriptor in enumerate(request.descriptors):
        entries: list[Entry] = []
        for entry in descriptor.entries:
            terms_of_it = carried.get(entry.key)
            if terms_of_it is None:
                entries.append(entry)
                continue
            identity, refused = _prove_entry(terms_of_it, entry.value, terms, verifier, now_s)
            if refusal is None and refused is not None and _is_refused(identity, request, descriptor):
                refusal = replace(refused, slot=number)
            entries.extend(_entries(identity, terms_of_it) or [address])
        descriptors.append(descriptor._replace(entries=tuple(entries)))
    return Resolved(request._replace(descriptors=tuple(descriptors)), refusal, True)


def _prove_entry(
    entry: CredentialEntry, credential: str, terms: IdentityTerms, verifier: Verifier | None, now_s: float
) -> Proved:
    if not credential:
        return _unproved(terms.on_missing, _MISSING)
    return _proved(entry.kind, credential, terms, verifier, now_s)


def _proved(
    kind: CredentialKind, credential: str, terms: IdentityTerms, verifier: Verifier | None, now_s: float
) -> Proved:
    if verifier is None or len(credential) > LONGEST_CREDENTIAL:
        return _unproved(terms.on_invalid, _INVALID)
    identity = verifier.identify(kind, credential, now_s)
    if identity is None:
        return _unproved(terms.on_invalid, _INVALID)
    block = verifier.block_of(identity, now_s)
    return identity, None if block is None else refusal_of(block, terms.blocked_status)


def _is_refused(identity: Identity, request: Request, descriptor: Descriptor) -> bool:
    """Whoever proves nothing is; of those who are blocked, what has happened is counted all the same."""
    return identity is ANONYMOUS or can_be_refused(request, descriptor)


def _entries(identity: Identity, entry: CredentialEntry) -> list[Entry]:
    """In place of the credential; nothing if none of it is known."""
    proved = ((field, getattr(identity, field)) for field in entry.becomes)
    return [Entry(field, value) for field, value in proved if value]


def _unproved(otherwise: Otherwise, message: str) -> Proved:
    refused = otherwise is Otherwise.REFUSE
    return ANONYMOUS, Refusal("unauthorized", message, UNAUTHORIZED) if refused else None


def _found(attributes: Attributes, place: CredentialPlace) -> str:
    if place.query:
        return _parameter(place.query).value(attributes) or ""
    scheme, _, credential = attributes.headers.get(place.header, "").partition(" ")
    return credential.strip(" ") if scheme.lower() == place.scheme else ""


@lru_cache(64)
def _parameter(name: str) -> QueryParameter:
    """The rules name few."""
    return QueryParameter(name)


def _address(request: Request) -> str:
    for descriptor in request.descriptors:
        for key, value in descriptor.entries:
            if key == REMOTE_ADDRESS and value:
                return value
    return UNKNOWN_ADDRESS
