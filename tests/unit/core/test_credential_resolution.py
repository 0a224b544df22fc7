"""Credentials in entries of RLS descriptors: each is verified once, and their number in a request is limited."""

from __future__ import annotations

import pytest

from ratelimit_rls.core.credential_resolution import MAX_CREDENTIALS, resolve_credentials
from ratelimit_rls.core.entitlements import Block
from ratelimit_rls.core.identity import CredentialEntry, CredentialKind, Identity, IdentityConfig
from ratelimit_rls.core.model import Descriptor, Entry, Request
from ratelimit_rls.errors import TooComplex

TERMS = IdentityConfig(entries=(CredentialEntry("jwt", CredentialKind.JWT, ("user",)),))


class Verifier:
    def __init__(self) -> None:
        self.verified: list[str] = []

    def identify(self, kind: CredentialKind, credential: str, now_s: float) -> Identity | None:
        self.verified.append(credential)
        return Identity(f"user of {credential}")

    def block_of(self, identity: Identity, now_s: float) -> Block | None:
        return None


def request(*credentials: str) -> Request:
    return Request("domain", tuple(Descriptor((Entry("jwt", one),)) for one in credentials))


def test_credential_that_occurs_often_is_verified_once() -> None:
    verifier = Verifier()
    resolved = resolve_credentials(request("a", "b", "a", "a"), TERMS, verifier, 0.0)
    assert verifier.verified == ["a", "b"]
    users = [descriptor.entries[0].value for descriptor in resolved.request.descriptors]
    assert users == ["user of a", "user of b", "user of a", "user of a"]


def test_request_with_too_many_credentials_is_rejected() -> None:
    verifier = Verifier()
    credentials = [str(number) for number in range(MAX_CREDENTIALS)]
    resolve_credentials(request(*credentials), TERMS, verifier, 0.0)
    with pytest.raises(TooComplex, match="more than 16 different credentials"):
        resolve_credentials(request(*credentials, "one more"), TERMS, verifier, 0.0)
    assert "one more" not in verifier.verified
