"""JWTs and keys for tests: signed by a library as by issuers, or assembled by hand as by attackers."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from ratelimit_rls.identity.issuers import ClaimNames, Issuer, KeysInFile

NOW = 1_700_000_000.0
SECRET = "a secret that is as long as the longest hash: sixty-four bytes or more"

CURVES: dict[str, Callable[[], ec.EllipticCurve]] = {
    "ES256": ec.SECP256R1,
    "ES384": ec.SECP384R1,
    "ES512": ec.SECP521R1,
}


@cache
def private_key(algorithm: str, number: int = 1) -> Any:
    """Return a cached key; `number` distinguishes several."""
    if algorithm[:2] in ("RS", "PS"):
        return rsa_key(number)
    if algorithm in CURVES:
        return ec.generate_private_key(CURVES[algorithm]())
    if algorithm == "EdDSA":
        return ed25519.Ed25519PrivateKey.generate() if number < 3 else ed448.Ed448PrivateKey.generate()
    return SECRET


@cache
def rsa_key(_number: int = 1, bits: int = 2048) -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65_537, key_size=bits)


def jwk(key: Any, **members: object) -> dict[str, Any]:
    """Return the public part of a key as a JWK."""
    public = key.public_key()
    if isinstance(public, rsa.RSAPublicKey):
        return {**RSAAlgorithm.to_jwk(public, as_dict=True), **members}
    if isinstance(public, ec.EllipticCurvePublicKey):
        return {**ECAlgorithm.to_jwk(public, as_dict=True), **members}
    return {**OKPAlgorithm.to_jwk(public, as_dict=True), **members}


def key_set(*keys: dict[str, Any]) -> bytes:
    return json.dumps({"keys": keys}).encode()


def public_pem(key: Any) -> bytes:
    encoding, form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_key().public_bytes(encoding, form)


def claims(**others: object) -> dict[str, Any]:
    """Return default claims with changes; None removes a claim."""
    usual = {"iss": "https://issuer", "aud": "api", "sub": "alice", "exp": NOW + 600, "iat": NOW}
    return {name: value for name, value in {**usual, **others}.items() if value is not None}


def mint(algorithm: str = "ES256", key: Any = None, kid: str | None = "1", **others: object) -> str:
    headers = {"kid": kid} if kid is not None else {}
    return jwt.encode(claims(**others), key or private_key(algorithm), algorithm, headers)


def b64(content: bytes | dict[str, Any]) -> str:
    raw = json.dumps(content).encode() if isinstance(content, dict) else content
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def signed(header: bytes | dict[str, Any], payload: bytes | dict[str, Any], algorithm: str = "ES256") -> str:
    """Return a token with a valid signature, whatever its content."""
    text = f"{b64(header)}.{b64(payload)}"
    signature = jwt.algorithms.get_default_algorithms()[algorithm].sign(text.encode(), private_key(algorithm))
    return f"{text}.{b64(signature)}"


def issuer(directory: Path, algorithm: str = "ES256", **others: Any) -> Issuer:
    """Return an issuer whose JWKS file contains the key of `private_key(algorithm)`, with kid 1."""
    name = others.get("name", "one")
    path = directory / f"{name}.keys"
    is_secret = algorithm.startswith("HS")
    path.write_bytes(SECRET.encode() if is_secret else key_set(jwk(private_key(algorithm), kid="1")))
    usual: dict[str, Any] = {
        "name": name,
        "issuer": "https://issuer",
        "audiences": frozenset({"api", "other"}),
        "algorithms": frozenset({algorithm}),
        "keys": KeysInFile(path, is_secret=is_secret),
        "claims": ClaimNames("sub", "plan", "org.id"),
    }
    return Issuer(**{**usual, **others})
