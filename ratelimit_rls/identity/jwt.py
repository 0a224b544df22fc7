"""Verification of JSON Web Tokens.

PyJWT verifies signature, issuer and audience. Checked here, and before, is what it leaves open: JSON without duplicate
keys, canonical base64, `typ`, critical extensions, which key may verify which algorithm, and times. PyJWT would compare
times with a clock of its own, and accepts `exp` as text. Before the signature is verified, a token is trusted for two
things only: which issuer's keys to try, and which of these keys. Keys and key URLs within a token are never used.
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

import jwt
from jwt import InvalidAudienceError, MissingRequiredClaimError, PyJWTError
from jwt.types import Options

from ratelimit_rls.common.bounded_cache import BoundedCache
from ratelimit_rls.core.identity import Identity
from ratelimit_rls.core.names import name_error
from ratelimit_rls.errors import SettingsError
from ratelimit_rls.identity import strict_json
from ratelimit_rls.identity.issuers import Issuer
from ratelimit_rls.identity.jwks_source import JwksSource

MAX_TOKEN_LENGTH = 16 * 1024
"""Maximum characters of a token: what proxies allow for all headers together, eight times the size seen in practice."""

MAX_VALID_TOKENS = 40_000
MAX_INVALID_TOKENS = 10_000
"""Maximum cached results. Invalid tokens have a cache of their own, so that forged ones do not evict valid ones."""

VALID_CACHE_S = 900.0
INVALID_CACHE_S = 60.0

REASONS = (
    "malformed",  # not a token, or too long
    "issuer",  # not a trusted issuer
    "algorithm",  # not allowed for the issuer
    "audience",  # meant for another service
    "expired",
    "early",  # not valid yet
    "claims",  # a required claim is missing or unusable
    "key",  # the issuer has no such key
    "signature",
)

_TYPES = frozenset({"jwt", "at+jwt"})
"""Media types of access tokens, in lower case and without `application/`. A header without `typ` is accepted."""


class _RejectedToken(Exception):
    def __init__(self, reason: str, until_s: float = inf) -> None:
        """Create the error. `until_s` is the time after which the token must be checked again."""
        super().__init__(reason)
        self.reason = reason
        self.until_s = until_s


class _Token(NamedTuple):
    """A parsed token. Nothing in it is verified yet."""

    text: bytes
    header: Mapping[str, Any]
    claims: Mapping[str, Any]


_SIGNATURE_AND_CLAIMS: Options = {
    "verify_exp": False,
    "verify_nbf": False,
    "verify_iat": False,
    "verify_sub": False,  # another claim may name the user, and numbers are accepted
    "verify_jti": False,
}
_CLAIMS: Options = {"verify_signature": False, "verify_aud": True, "verify_iss": True}


class _Valid(NamedTuple):
    identity: Identity
    until_s: float  # when the token is verified again


class _Invalid(NamedTuple):
    reason: str
    until_s: float


class JwtVerifier:
    """Verifier for the tokens of all issuers. Used by the event loop thread only."""

    def __init__(self, issuers: Sequence[Issuer]) -> None:
        """Read the keys that are in files. Raises SettingsError if one cannot be used."""
        self._valid = BoundedCache[bytes, _Valid](MAX_VALID_TOKENS)
        self._invalid = BoundedCache[bytes, _Invalid](MAX_INVALID_TOKENS)
        self._digest_key = secrets.token_bytes(32)
        self._sources = {issuer.issuer: JwksSource(issuer, self._clear_caches) for issuer in issuers}
        if len(self._sources) != len(issuers):
            raise SettingsError("RLS_JWT_ISSUERS: two issuers have the same `iss`")
        self._running: asyncio.Task[None] | None = None
        self.rejected: Counter[str] = Counter(dict.fromkeys(REASONS, 0))

    def identify(self, text: str, now_s: float) -> Identity | None:
        """Return the identity of a token; None if it is not valid at `now_s`. Never raises and does no I/O."""
        if len(text) > MAX_TOKEN_LENGTH or not text.isascii():
            self.rejected["malformed"] += 1
            return None
        token = text.encode()
        digest = hashlib.blake2b(token, digest_size=16, key=self._digest_key).digest()
        valid = self._valid.get(digest)
        if valid is not None and now_s < valid.until_s:
            return valid.identity
        invalid = self._invalid.get(digest)
        if invalid is None or now_s >= invalid.until_s:
            try:
                identity, until_s = self._verify(_parse(token), now_s)
            except _RejectedToken as rejection:
                invalid = _Invalid(rejection.reason, min(rejection.until_s, now_s + INVALID_CACHE_S))
                self._invalid.put(digest, invalid)
            else:
                self._valid.put(digest, _Valid(identity, min(until_s, now_s + VALID_CACHE_S)))
                return identity
        self.rejected[invalid.reason] += 1
        return None

    def keys(self) -> dict[str, int]:
        """Return the number of keys by issuer name."""
        return {source.issuer.name: len(source.keys.keys) for source in self._sources.values()}

    async def start(self) -> None:
        """Fetch the first keys, and start to keep all keys up to date."""
        await asyncio.gather(*(source.fetch_initial() for source in self._sources.values()))
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

    def _clear_caches(self) -> None:
        """Clear both caches after a change of keys, which can make valid tokens invalid and vice versa."""
        self._valid.clear()
        self._invalid.clear()

    def _verify(self, token: _Token, now_s: float) -> tuple[Identity, float]:
        """Return the identity, and the end of its validity."""
        named = token.claims.get("iss")
        source = self._sources.get(named) if isinstance(named, str) else None
        if source is None:
            raise _RejectedToken("issuer")
        issuer = source.issuer
        algorithm = token.header.get("alg")
        if not isinstance(algorithm, str) or algorithm not in issuer.algorithms:
            raise _RejectedToken("algorithm")
        until_s = _check_times(token.claims, issuer, now_s)
        user = issuer.user_prefix + _name_claim(token.claims, issuer.claims.user, is_required=True)
        if name_error(user) is not None:  # e.g. too long with the prefix
            raise _RejectedToken("claims")
        identity = Identity(
            user,
            _name_claim(token.claims, issuer.claims.tier),
            _name_claim(token.claims, issuer.claims.org),
        )
        keys = source.keys.find(token.header.get("kid"), algorithm)
        if not keys:
            _is_verified(token, issuer, algorithm)  # a token for another audience says nothing about keys
            source.request_refresh()
            raise _RejectedToken("key")
        if not any(_is_verified(token, issuer, algorithm, key.material) for key in keys):
            raise _RejectedToken("signature")
        return identity, until_s


def _parse(text: bytes) -> _Token:
    parts = text.split(b".", 3)
    if len(parts) != 3 or not parts[2]:
        raise _RejectedToken("malformed")
    try:
        header, claims, _ = *map(strict_json.parse, map(_decode_base64url, parts[:2])), _decode_base64url(parts[2])
    except ValueError:
        raise _RejectedToken("malformed") from None
    if not isinstance(header, dict) or not isinstance(claims, dict):
        raise _RejectedToken("malformed")
    # No critical extension and no unencoded payload is supported.
    if "crit" in header or "b64" in header or not isinstance(header.get("kid", ""), str):
        raise _RejectedToken("malformed")
    # A token of another kind (logout+jwt, secevent+jwt) from the same issuer is not an access token (RFC 8725, 3.11).
    media_type = header.get("typ", "JWT")
    if not isinstance(media_type, str) or media_type.lower().removeprefix("application/") not in _TYPES:
        raise _RejectedToken("malformed")
    return _Token(text, header, claims)


def _decode_base64url(part: bytes) -> bytes:
    """Decode canonical base64url: no padding, no line breaks, no leftover bits."""
    try:
        decoded = base64.urlsafe_b64decode(part + b"=" * (-len(part) % 4))
    except binascii.Error as error:
        raise ValueError from error
    if base64.urlsafe_b64encode(decoded).rstrip(b"=") != part:
        raise ValueError
    return decoded


def _is_verified(token: _Token, issuer: Issuer, algorithm: str, key: Any = None) -> bool:
    """Check issuer and audience; return whether the key verifies the signature. None: check claims only.

    Raises _RejectedToken if the token is for another audience.
    """
    try:
        jwt.decode(
            token.text,
            key or "",
            [algorithm],
            _SIGNATURE_AND_CLAIMS if key is not None else _CLAIMS,
            audience=issuer.audiences,
            issuer=issuer.issuer,
        )
    except (InvalidAudienceError, MissingRequiredClaimError):
        raise _RejectedToken("audience") from None
    except PyJWTError:
        return False
    return True


def _check_times(claims: Mapping[str, Any], issuer: Issuer, now_s: float) -> float:
    """Check exp, nbf and iat, and return the end of the validity."""
    begins_s = max(_timestamp(claims, "nbf", -inf), _timestamp(claims, "iat", -inf)) - issuer.leeway_s
    if now_s < begins_s:
        raise _RejectedToken("early", begins_s)
    ends_s = _timestamp(claims, "exp", None if issuer.require_expiry else inf) + issuer.leeway_s
    if now_s >= ends_s:
        raise _RejectedToken("expired")
    return ends_s


def _timestamp(claims: Mapping[str, Any], name: str, default: float | None) -> float:
    value = claims.get(name, default)
    # bool is a subclass of int.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _RejectedToken("claims")
    return float(value)


def _name_claim(claims: Mapping[str, Any], path: str, *, is_required: bool = False) -> str:
    """Return a claim as a valid name (core/names.py); "" if absent or null and not required."""
    value = _claim(claims, path) if path else None
    if value is None and not is_required:
        return ""
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or name_error(value) is not None:
        raise _RejectedToken("claims")
    return value


def _claim(claims: Mapping[str, Any], path: str) -> Any:
    """Return the claim of that exact name, or the member at that path: names of claims may contain dots."""
    if path in claims:
        return claims[path]
    value: Any = claims
    for name in path.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(name)
    return value
