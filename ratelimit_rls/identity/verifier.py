"""Who is calling, by any credential that is believed here (core.identity.Verifier), and how often it was so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from ratelimit_rls.core.accounts import Block
from ratelimit_rls.core.identity import CredentialKind, Identity
from ratelimit_rls.identity.api_keys import ApiKeys
from ratelimit_rls.identity.directory import Directory

if TYPE_CHECKING:  # brings a library of cryptography along, for those who have issuers
    from ratelimit_rls.identity.jwt import Tokens

Outcome = Literal["valid", "invalid"]


class Callers:
    def __init__(self, api_keys: ApiKeys | None, tokens: Tokens | None, directory: Directory | None = None) -> None:
        """A kind of credential that nobody is there for is invalid. `directory` knows users by more than tokens say."""
        self._api_keys = api_keys
        self._tokens = tokens
        self._directory = directory
        self._of_keys: dict[Outcome, int] = {"valid": 0, "invalid": 0}
        self._of_tokens: dict[Outcome, int] = {"valid": 0, "invalid": 0}

    def identify(self, kind: CredentialKind, credential: str, now_s: float) -> Identity | None:
        if kind is CredentialKind.API_KEY:
            identity = self._api_keys.identify(credential, now_s) if self._api_keys is not None else None
            outcomes = self._of_keys
        else:
            identity = self._tokens.identify(credential, now_s) if self._tokens is not None else None
            identity = identity and self._with_record(identity)
            outcomes = self._of_tokens
        outcomes["invalid" if identity is None else "valid"] += 1
        return identity

    def block_of(self, identity: Identity, now_s: float) -> Block | None:
        block = self._directory.block(identity.user) if self._directory is not None else None
        return block if block is not None and (block.until_s is None or now_s < block.until_s) else None

    def counts(self) -> dict[tuple[str, Outcome], int]:
        """Credentials so far, by kind (`api_key`, `jwt`) and outcome: all of them, from the start."""
        by_kind = {CredentialKind.API_KEY: self._of_keys, CredentialKind.JWT: self._of_tokens}
        return {(kind.value, outcome): count for kind, told in by_kind.items() for outcome, count in told.items()}

    def refused_tokens(self) -> dict[str, int]:
        """Invalid tokens so far, by reason (jwt.REASONS)."""
        return dict(self._tokens.refused) if self._tokens is not None else {}

    def token_keys(self) -> dict[str, int]:
        """Keys in force, by the issuer's name. None: every token of that issuer is refused."""
        return self._tokens.keys() if self._tokens is not None else {}

    async def start(self) -> None:
        if self._tokens is not None:
            await self._tokens.start()

    async def close(self) -> None:
        if self._tokens is not None:
            await self._tokens.close()

    def _with_record(self, identity: Identity) -> Identity:
        """What administrators say of a user comes before what a token says, as it does for limits."""
        user = self._directory.user(identity.user) if self._directory is not None else None
        if user is None or not (user.tier or user.org):
            return identity
        return identity._replace(tier=user.tier or identity.tier, org=user.org or identity.org)
