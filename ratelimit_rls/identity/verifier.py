"""Verifier for all kinds of credentials (core.identity.Verifier), with counters of the outcomes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from ratelimit_rls.core.entitlements import Block
from ratelimit_rls.core.identity import CredentialKind, Identity
from ratelimit_rls.identity.api_keys import ApiKeyVerifier
from ratelimit_rls.identity.directory import Directory

if TYPE_CHECKING:  # imports `cryptography`, which is needed only if there are issuers
    from ratelimit_rls.identity.jwt import JwtVerifier

Outcome = Literal["valid", "invalid"]


class CredentialVerifier:
    def __init__(
        self, api_keys: ApiKeyVerifier | None, tokens: JwtVerifier | None, directory: Directory | None = None
    ) -> None:
        """Combine the verifiers. A credential whose kind has no verifier is invalid.

        `directory` adds the tier and organisation of users that are named by tokens.
        """
        self._api_keys = api_keys
        self._tokens = tokens
        self._directory = directory
        self._key_outcomes: dict[Outcome, int] = {"valid": 0, "invalid": 0}
        self._token_outcomes: dict[Outcome, int] = {"valid": 0, "invalid": 0}

    def identify(self, kind: CredentialKind, credential: str, now_s: float) -> Identity | None:
        if kind is CredentialKind.API_KEY:
            identity = self._api_keys.identify(credential, now_s) if self._api_keys is not None else None
            outcomes = self._key_outcomes
        else:
            identity = self._tokens.identify(credential, now_s) if self._tokens is not None else None
            identity = identity and self._with_account(identity)
            outcomes = self._token_outcomes
        outcomes["invalid" if identity is None else "valid"] += 1
        return identity

    def block_of(self, identity: Identity, now_s: float) -> Block | None:
        block = self._directory.block(identity.user) if self._directory is not None else None
        return block if block is not None and (block.until_s is None or now_s < block.until_s) else None

    def counts(self) -> dict[tuple[str, Outcome], int]:
        """Return the number of credentials since the start, by kind (`api_key`, `jwt`) and outcome."""
        by_kind = {CredentialKind.API_KEY: self._key_outcomes, CredentialKind.JWT: self._token_outcomes}
        return {
            (kind.value, outcome): count for kind, outcomes in by_kind.items() for outcome, count in outcomes.items()
        }

    def rejected_tokens(self) -> dict[str, int]:
        """Return the number of invalid tokens since the start, by reason (jwt.REASONS)."""
        return dict(self._tokens.rejected) if self._tokens is not None else {}

    def token_keys(self) -> dict[str, int]:
        """Return the number of keys by issuer name. With 0 keys, every token of that issuer is rejected."""
        return self._tokens.keys() if self._tokens is not None else {}

    async def start(self) -> None:
        if self._tokens is not None:
            await self._tokens.start()

    async def close(self) -> None:
        if self._tokens is not None:
            await self._tokens.close()

    def _with_account(self, identity: Identity) -> Identity:
        """Return the identity with the tier and organisation of the account, which take precedence over the token's."""
        user = self._directory.user(identity.user) if self._directory is not None else None
        if user is None or not (user.tier or user.org):
            return identity
        return identity._replace(tier=user.tier or identity.tier, org=user.org or identity.org)
