"""Keys of one token issuer: a JSON Web Key Set, or one shared secret.

The algorithms of a key are determined when it is read, from its type, its curve, its `alg` and `use`, and the
algorithms of the issuer. The `alg` of a token can only select among these, so a public key is never used as a secret.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from jwt import PyJWK, PyJWTError
from jwt.algorithms import HMACAlgorithm

from ratelimit_rls.identity import strict_json

MAX_KEYS = 100
"""Maximum keys in one set. Issuers publish two or three."""

MIN_RSA_BITS = 2048

HASH_BYTES = {"HS256": 32, "HS384": 48, "HS512": 64}
"""Minimum length of a shared secret: a shorter one is weaker than the hash (RFC 7518, section 3.2)."""

MAX_BYTES = 2**20
"""Maximum size of a key set or secret."""

_PUBLIC_MEMBERS = ("kty", "crv", "n", "e", "x", "y", "k")
"""Members of a key that are read. Without `d` and the like, PyJWT makes a public key of a private one."""

_EDWARDS = frozenset({"EdDSA", "Ed25519", "Ed448"})
"""Values of `alg` in keys for Edwards curves. Tokens use EdDSA."""

_ALGORITHMS: Mapping[tuple[object, object], frozenset[str]] = {  # keyed by kty and crv
    ("RSA", None): frozenset({"RS256", "RS384", "RS512", "PS256", "PS384", "PS512"}),
    ("EC", "P-256"): frozenset({"ES256"}),
    ("EC", "P-384"): frozenset({"ES384"}),
    ("EC", "P-521"): frozenset({"ES512"}),
    ("OKP", "Ed25519"): frozenset({"EdDSA"}),
    ("OKP", "Ed448"): frozenset({"EdDSA"}),
    ("oct", None): frozenset(HASH_BYTES),
}


@dataclass(frozen=True, slots=True)
class VerificationKey:
    kid: str | None
    algorithms: frozenset[str]
    material: Any = field(repr=False)  # a public key, or the bytes of a secret


@dataclass(frozen=True, slots=True)
class KeySet:
    keys: tuple[VerificationKey, ...]
    is_for_any_kid: bool = False  # a single shared secret has no kid

    def find(self, kid: str | None, algorithm: str) -> tuple[VerificationKey, ...]:
        """Return the keys that may have signed a token. Without a `kid`, exactly one key must fit."""
        fitting = tuple(key for key in self.keys if algorithm in key.algorithms)
        if self.is_for_any_kid:
            return fitting
        if kid is None:
            return fitting if len(fitting) == 1 else ()
        return tuple(key for key in fitting if key.kid == kid)


def read_key_set(content: bytes, algorithms: Collection[str]) -> KeySet:
    """Return the keys of a set that are for `algorithms`; raises ValueError with the end of a sentence.

    Keys of other types and for other uses are ignored, as RFC 7517, section 5 requires. If a key that would be used is
    weak or malformed, the whole set is rejected, so that the mistake is noticed.
    """
    document = strict_json.parse(content)
    listed = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(listed, list):
        raise ValueError("is not a JSON Web Key Set: it has no list 'keys'")
    if len(listed) > MAX_KEYS:
        raise ValueError(f"has more than {MAX_KEYS} keys")
    keys = tuple(key for jwk in listed if (key := _read_key(jwk, frozenset(algorithms))) is not None)
    if not keys:
        raise ValueError(f"has no key for {', '.join(sorted(algorithms))}")
    return KeySet(keys)


def read_secret(content: bytes, algorithms: Collection[str]) -> KeySet:
    """Return the key in a file that is one shared secret. A trailing newline is not part of it."""
    secret = content.rstrip(b"\r\n")
    least = max(HASH_BYTES[algorithm] for algorithm in algorithms)
    if len(secret) < least:
        raise ValueError(f"is too short for a secret: {max(algorithms)} needs ≥ {least} bytes")
    try:
        HMACAlgorithm(HMACAlgorithm.SHA256).prepare_key(secret)
    except PyJWTError:
        raise ValueError("is a key or a certificate, not a secret: anyone with the public part could sign") from None
    return KeySet((VerificationKey(None, frozenset(algorithms), secret),), is_for_any_kid=True)


def _read_key(jwk: Any, allowed: frozenset[str]) -> VerificationKey | None:
    if not isinstance(jwk, dict):
        raise ValueError("has an element of 'keys' that is not an object")
    kid = jwk.get("kid")
    if kid is not None and not isinstance(kid, str):
        raise ValueError("has a key whose 'kid' is not a string")
    usable = _usable_algorithms(jwk) & allowed
    if not usable:
        return None
    described = f"the key {kid[:100]!a}" if kid is not None else "the key without a kid"
    try:
        material = PyJWK({name: jwk[name] for name in _PUBLIC_MEMBERS if name in jwk}, min(usable)).key
    except (PyJWTError, UnsupportedAlgorithm, ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"has {described}, which does not match its declared type") from None
    if isinstance(material, RSAPublicKey) and material.key_size < MIN_RSA_BITS:
        raise ValueError(f"has {described} of {material.key_size} bits; RSA keys must have ≥ {MIN_RSA_BITS} bits")
    if isinstance(material, bytes):
        usable = frozenset(name for name in usable if len(material) >= HASH_BYTES[name])
        if not usable:
            raise ValueError(f"has {described} of {len(material)} bytes; a secret must be at least as long as its hash")
    return VerificationKey(kid, usable, material)


def _usable_algorithms(jwk: Mapping[str, Any]) -> frozenset[str]:
    """Return the algorithms that the key declares. Unknown types and uses give an empty set, not an error."""
    kty, operations = jwk.get("kty"), jwk.get("key_ops")
    if not isinstance(kty, str) or jwk.get("use", "sig") != "sig":
        return frozenset()
    if operations is not None and not (isinstance(operations, list) and "verify" in operations):
        return frozenset()
    curve = jwk.get("crv") if kty in ("EC", "OKP") else None
    possible = _ALGORITHMS.get((kty, curve), frozenset()) if curve is None or isinstance(curve, str) else frozenset()
    own = jwk.get("alg")
    if own is None or (kty == "OKP" and own in _EDWARDS):
        return possible
    return possible & {own} if isinstance(own, str) else frozenset()
