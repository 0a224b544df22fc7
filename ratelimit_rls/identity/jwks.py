"""The keys of one issuer of tokens: a JSON Web Key Set, or one shared secret.

What a key can be used for is settled when it is read, by its type, its curve, what it says of itself and what the
issuer may use. So a token's word about its algorithm can only choose among what was settled, and a public key can never
come to be taken for a secret.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from jwt.algorithms import Algorithm, ECAlgorithm, HMACAlgorithm, OKPAlgorithm, RSAAlgorithm, get_default_algorithms
from jwt.exceptions import PyJWTError

from ratelimit_rls.identity import strict_json
from ratelimit_rls.identity.issuers import ALGORITHMS

MOST_KEYS = 100
"""Of one set. Issuers publish two or three."""

SHORTEST_RSA_BITS = 2048

HASH_BYTES = {"HS256": 32, "HS384": 48, "HS512": 64}
"""A secret shorter than the hash is weaker than the hash (RFC 7518, 3.2)."""

_IMPLEMENTED = get_default_algorithms()
_VERIFY: Mapping[str, Algorithm] = {name: _IMPLEMENTED[name] for name in ALGORITHMS}

_EDWARDS = frozenset({"EdDSA", "Ed25519", "Ed448"})
"""What keys of these curves may call their algorithm. Tokens say EdDSA."""


class _Type(NamedTuple):
    members: tuple[str, ...]  # the public ones: nothing else of a key is ever looked at
    read: Callable[[dict[str, Any]], Any]
    algorithms: frozenset[str]


_RSA = _Type(
    ("kty", "n", "e"),
    RSAAlgorithm.from_jwk,
    frozenset({"RS256", "RS384", "RS512", "PS256", "PS384", "PS512"}),
)
_TYPES: Mapping[tuple[object, object], _Type] = {  # by kty and crv
    ("RSA", None): _RSA,
    **{
        ("EC", curve): _Type(("kty", "crv", "x", "y"), ECAlgorithm.from_jwk, frozenset({algorithm}))
        for curve, algorithm in (("P-256", "ES256"), ("P-384", "ES384"), ("P-521", "ES512"))
    },
    **{
        ("OKP", curve): _Type(("kty", "crv", "x"), OKPAlgorithm.from_jwk, frozenset({"EdDSA"}))
        for curve in ("Ed25519", "Ed448")
    },
    ("oct", None): _Type(("kty", "k"), HMACAlgorithm.from_jwk, frozenset(HASH_BYTES)),
}


@dataclass(frozen=True, slots=True)
class Key:
    kid: str | None
    algorithms: frozenset[str]
    material: Any = field(repr=False)

    def verifies(self, algorithm: str, signed: bytes, signature: bytes) -> bool:
        return algorithm in self.algorithms and _VERIFY[algorithm].verify(signed, self.material, signature)


@dataclass(frozen=True, slots=True)
class KeySet:
    keys: tuple[Key, ...]
    is_for_any_kid: bool = False  # one shared secret has no name

    def find(self, kid: str | None, algorithm: str) -> tuple[Key, ...]:
        """Those that a token may be signed with. One that names none must leave no choice."""
        fitting = tuple(key for key in self.keys if algorithm in key.algorithms)
        if self.is_for_any_kid:
            return fitting
        if kid is None:
            return fitting if len(fitting) == 1 else ()
        return tuple(key for key in fitting if key.kid == kid)


def read_key_set(content: bytes, algorithms: Collection[str]) -> KeySet:
    """Those keys of a set that are for `algorithms`; raises ValueError with the end of a sentence.

    Keys of other kinds and for other uses are left out, as the standard asks (RFC 7517, 5). One that would be used and
    is weak or broken is not: then the whole set is refused, so that it is seen.
    """
    document = strict_json.parse(content)
    listed = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(listed, list):
        raise ValueError("is not a JSON Web Key Set: it has no list of 'keys'")
    if len(listed) > MOST_KEYS:
        raise ValueError(f"has more than {MOST_KEYS} keys")
    keys = tuple(key for jwk in listed if (key := _key(jwk, frozenset(algorithms))) is not None)
    if not keys:
        raise ValueError(f"has no key for {', '.join(sorted(algorithms))}")
    return KeySet(keys)


def read_secret(content: bytes, algorithms: Collection[str]) -> KeySet:
    """A file that is one secret; the end of its last line is no part of it."""
    secret = content.rstrip(b"\r\n")
    least = max(HASH_BYTES[algorithm] for algorithm in algorithms)
    if len(secret) < least:
        raise ValueError(f"is too short for a secret: {max(algorithms)} needs {least} bytes")
    try:
        HMACAlgorithm(HMACAlgorithm.SHA256).prepare_key(secret)
    except PyJWTError:
        raise ValueError("is a key or a certificate, and no secret: whoever has the public part could sign") from None
    return KeySet((Key(None, frozenset(algorithms), secret),), is_for_any_kid=True)


def _key(jwk: Any, allowed: frozenset[str]) -> Key | None:
    if not isinstance(jwk, dict):
        raise ValueError("has something in 'keys' that is not a key")
    kid = jwk.get("kid")
    if kid is not None and not isinstance(kid, str):
        raise ValueError("has a key whose 'kid' is not text")
    usable = _usable(jwk) & allowed
    if not usable:
        return None
    its_type = _TYPES[jwk["kty"], jwk.get("crv") if jwk["kty"] in ("EC", "OKP") else None]
    called = f"the key {kid[:100]!a}" if kid is not None else "the key without a name"
    try:
        material = its_type.read({name: jwk[name] for name in its_type.members})
    except (PyJWTError, UnsupportedAlgorithm, ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"has {called}, which is not of the type that it says it is") from None
    if isinstance(material, RSAPublicKey) and material.key_size < SHORTEST_RSA_BITS:
        raise ValueError(f"has {called} of {material.key_size} bits; RSA needs {SHORTEST_RSA_BITS} or more")
    if isinstance(material, bytes):
        usable = frozenset(name for name in usable if len(material) >= HASH_BYTES[name])
        if not usable:
            raise ValueError(f"has {called} of {len(material)} bytes; a secret needs as many as its hash has, or more")
    return Key(kid, usable, material)


def _usable(jwk: Mapping[str, Any]) -> frozenset[str]:
    """The algorithms that the key can be used with, by its own word. Nothing here is worth an error."""
    kty, operations = jwk.get("kty"), jwk.get("key_ops")
    if not isinstance(kty, str) or jwk.get("use", "sig") != "sig":
        return frozenset()
    if operations is not None and not (isinstance(operations, list) and "verify" in operations):
        return frozenset()
    curve = jwk.get("crv") if kty in ("EC", "OKP") else None
    its_type = _TYPES.get((kty, curve)) if curve is None or isinstance(curve, str) else None
    if its_type is None:
        return frozenset()
    own = jwk.get("alg")
    if own is None or (kty == "OKP" and own in _EDWARDS):
        return its_type.algorithms
    return its_type.algorithms & {own} if isinstance(own, str) else frozenset()
