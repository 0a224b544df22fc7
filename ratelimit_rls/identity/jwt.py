"""Whose JSON Web Token it is.

A library checks signatures; all else is checked here, one rule after another, the cheap ones first. A token's own word
is believed for two things before its signature is known to be good: which issuer's keys are to be tried, and which of
those keys. Keys and addresses of keys within a token are never looked at.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

from ratelimit_rls.core.accounts import LONGEST_ID
from ratelimit_rls.core.identity import Identity
from ratelimit_rls.errors import SettingsError
from ratelimit_rls.identity import strict_json
from ratelimit_rls.identity.issuers import Issuer
from ratelimit_rls.identity.key_source import KeySource
from ratelimit_rls.identity.remembered import Remembered

LONGEST_TOKEN = 16 * 1024
"""Characters: what proxies allow all headers together, and eight times the tokens seen in practice."""

MOST_VALID = 40_000
MOST_INVALID = 10_000
"""Remembered, and apart from one another: whoever invents tokens must not make us check those of others again."""

VALID_S = 900.0
INVALID_S = 60.0

REASONS = (
    "malformed",  # not a token, or too long a one
    "issuer",  # of somebody we do not believe
    "algorithm",  # not one of the issuer's
    "audience",  # for somebody else
    "expired",
    "early",  # not valid yet
    "claims",  # one that we need is missing, or is nothing we can use
    "key",  # the issuer has no such key
    "signature",
)


class _Refused(Exception):
    def __init__(self, reason: str, until_s: float = inf) -> None:
        """`until_s`: it may be another matter then."""
        super().__init__(reason)
        self.reason = reason
        self.until_s = until_s


class _Token(NamedTuple):
    """Taken apart; nothing of it is to be believed yet."""

    header: Mapping[str, Any]
    claims: Mapping[str, Any]
    signed: bytes
    signature: bytes


class Tokens:
    """The tokens of all issuers. Of the event loop's thread alone."""

    def __init__(self, issuers: Sequence[Issuer]) -> None:
        """Raises SettingsError if keys are in a file, and it cannot be used."""
        self._valid = Remembered[Identity](MOST_VALID)
        self._invalid = Remembered[str](MOST_INVALID)
        self._digest_key = secrets.token_bytes(32)
        self._sources = {issuer.issuer: KeySource(issuer, self._forget) for issuer in issuers}
        if len(self._sources) != len(issuers):
            raise SettingsError("RLS_JWT_ISSUERS: two issuers write the same `iss`")
        self._running: asyncio.Task[None] | None = None
        self.refused: Counter[str] = Counter(dict.fromkeys(REASONS, 0))

    def identify(self, text: str, now_s: float) -> Identity | None:
        """None if it is not valid now. Never raises, and asks nobody."""
        if len(text) > LONGEST_TOKEN or not text.isascii():
            self.refused["malformed"] += 1
            return None
        token = text.encode()
        digest = hashlib.blake2b(token, digest_size=16, key=self._digest_key).digest()
        identity = self._valid.get(digest, now_s)
        if identity is not None:
            return identity
        reason = self._invalid.get(digest, now_s)
        if reason is None:
            try:
                identity, until_s = self._verify(_take_apart(token), now_s)
            except _Refused as refusal:
                reason = refusal.reason
                self._invalid.put(digest, reason, min(refusal.until_s, now_s + INVALID_S))
            else:
                self._valid.put(digest, identity, min(until_s, now_s + VALID_S))
                return identity
        self.refused[reason] += 1
        return None

    def keys(self) -> dict[str, int]:
        """How many are in force, by the issuer's name."""
        return {source.issuer.name: len(source.keys.keys) for source in self._sources.values()}

    async def start(self) -> None:
        """Get the keys that have to be fetched, and keep all as they are published."""
        await asyncio.gather(*(source.first() for source in self._sources.values()))
        self._running = asyncio.create_task(self._run())

    async def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
            self._running = None

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for source in self._sources.values():
                group.create_task(source.run())

    def _forget(self) -> None:
        """Keys have changed: what was signed with one that is gone is not valid any more, and the other way round."""
        self._valid.clear()
        self._invalid.clear()

    def _verify(self, token: _Token, now_s: float) -> tuple[Identity, float]:
        """Who it is, and until when."""
        named = token.claims.get("iss")
        source = self._sources.get(named) if isinstance(named, str) else None
        if source is None:
            raise _Refused("issuer")
        issuer = source.issuer
        algorithm = _algorithm(token.header, issuer)
        _check_audience(token.claims, issuer)
        until_s = _check_times(token.claims, issuer, now_s)
        identity = Identity(
            issuer.user_prefix + _text(token.claims, issuer.claims.user, is_required=True),
            _text(token.claims, issuer.claims.tier),
            _text(token.claims, issuer.claims.org),
        )
        kid = token.header.get("kid")
        keys = source.keys.find(kid, algorithm)
        if not keys:
            source.find_again_soon()
            raise _Refused("key")
        if not any(key.verifies(algorithm, token.signed, token.signature) for key in keys):
            raise _Refused("signature")
        return identity, until_s


def _take_apart(token: bytes) -> _Token:
    parts = token.split(b".", 3)
    if len(parts) != 3:
        raise _Refused("malformed")
    try:
        header, claims = strict_json.parse(_bytes(parts[0])), strict_json.parse(_bytes(parts[1]))
        signature = _bytes(parts[2])
    except ValueError:
        raise _Refused("malformed") from None
    if not isinstance(header, dict) or not isinstance(claims, dict) or not signature:
        raise _Refused("malformed")
    # Extensions that change what is signed, or that must be understood: there are none that we do.
    if "crit" in header or "b64" in header or not isinstance(header.get("kid", ""), str):
        raise _Refused("malformed")
    return _Token(header, claims, token[: len(parts[0]) + 1 + len(parts[1])], signature)


def _bytes(part: bytes) -> bytes:
    """Of base64url in its one spelling: no padding, no line ends, no bits left over."""
    try:
        decoded = base64.urlsafe_b64decode(part + b"=" * (-len(part) % 4))
    except binascii.Error as error:
        raise ValueError from error
    if base64.urlsafe_b64encode(decoded).rstrip(b"=") != part:
        raise ValueError
    return decoded


def _algorithm(header: Mapping[str, Any], issuer: Issuer) -> str:
    algorithm = header.get("alg")
    if not isinstance(algorithm, str) or algorithm not in issuer.algorithms:
        raise _Refused("algorithm")
    return algorithm


def _check_audience(claims: Mapping[str, Any], issuer: Issuer) -> None:
    audience = claims.get("aud")
    named = audience if isinstance(audience, list) else [audience]
    if not all(isinstance(one, str) for one in named) or issuer.audiences.isdisjoint(named):
        raise _Refused("audience")


def _check_times(claims: Mapping[str, Any], issuer: Issuer, now_s: float) -> float:
    """Until when it is valid."""
    begins_s = max(_moment(claims, "nbf", -inf), _moment(claims, "iat", -inf)) - issuer.leeway_s
    if now_s < begins_s:
        raise _Refused("early", begins_s)
    ends_s = _moment(claims, "exp", None if issuer.require_expiry else inf) + issuer.leeway_s
    if now_s >= ends_s:
        raise _Refused("expired")
    return ends_s


def _moment(claims: Mapping[str, Any], name: str, default: float | None) -> float:
    value = claims.get(name, default)
    # What is true is a number to Python, too.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _Refused("claims")
    return float(value)


def _text(claims: Mapping[str, Any], path: str, *, is_required: bool = False) -> str:
    """A claim as a name: printable, so that it can be shown and sent on. Absent and null are the same."""
    value = _claim(claims, path) if path else None
    if value is None and not is_required:
        return ""
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not 0 < len(value) <= LONGEST_ID or not value.isprintable():
        raise _Refused("claims")
    return value


def _claim(claims: Mapping[str, Any], path: str) -> Any:
    """Under that very name, or by way of objects: names of claims may have dots in them."""
    if path in claims:
        return claims[path]
    value: Any = claims
    for name in path.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(name)
    return value
