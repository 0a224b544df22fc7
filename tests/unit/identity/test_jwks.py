"""JSON Web Key Sets: which keys are used for which algorithms, and which sets are rejected."""

from __future__ import annotations

import json

import jwt
import pytest

from ratelimit_rls.identity.jwks import MAX_KEYS, read_key_set, read_secret
from tests.support.jwt_factory import SECRET, b64, jwk, key_set, private_key, public_pem, rsa_key

EC = jwk(private_key("ES256"), kid="1")
ALL = ("RS256", "PS256", "ES256", "ES384", "EdDSA")


def algorithms(*keys: dict[str, object], allowed: tuple[str, ...] = ALL) -> list[set[str]]:
    return [set(key.algorithms) for key in read_key_set(key_set(*keys), allowed).keys]


def test_algorithms_depend_on_key_type_alg_and_issuer() -> None:
    edwards = jwk(private_key("EdDSA"))

    assert algorithms(EC) == [{"ES256"}]
    assert algorithms({**EC, "alg": "ES256", "use": "sig", "key_ops": ["verify"]}) == [{"ES256"}]
    assert algorithms(edwards) == algorithms({**edwards, "alg": "Ed25519"}) == [{"EdDSA"}]


@pytest.mark.slow  # generating an RSA key takes long
def test_rsa_key_allows_both_paddings_unless_alg_is_set() -> None:
    key = jwk(rsa_key())

    assert algorithms(key) == [{"RS256", "PS256"}]
    assert algorithms({**key, "alg": "PS256"}) == [{"PS256"}]
    assert algorithms(key, allowed=("RS256",)) == [{"RS256"}]


@pytest.mark.parametrize(
    "other",
    [
        {**EC, "use": "enc"},
        {**EC, "key_ops": ["sign"]},
        {**EC, "key_ops": "verify"},
        {**EC, "alg": "ES384"},
        {**EC, "alg": "HS256"},
        {**EC, "alg": ["ES256"]},
        {**EC, "crv": "secp256k1"},
        {**EC, "crv": ["P-256"]},
        {**EC, "kty": "RSA2"},
        {**EC, "kty": ["EC"]},
        {"kty": "oct", "k": b64(SECRET.encode())},
        {},
    ],
)
def test_keys_for_other_uses_are_ignored(other: dict[str, object]) -> None:
    assert len(read_key_set(key_set(EC, other), ALL).keys) == 1
    with pytest.raises(ValueError, match="has no key for"):
        read_key_set(key_set(other), ALL)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({**EC, "x": EC["y"]}, r"the key '1', which does not match its declared type"),
        ({**EC, "x": ""}, "does not match its declared type"),
        ({**EC, "x": 5}, "does not match its declared type"),
        ({name: EC[name] for name in ("kty", "crv", "x")}, "the key without a kid, which does not"),
        ({**EC, "kid": 5}, "'kid' is not a string"),
        ({"kty": "RSA", "n": "AQ", "e": "AQAB"}, "does not match its declared type"),
        ({"kty": "RSA", "n": "", "e": ""}, "does not match its declared type"),
        ({"kty": "OKP", "crv": "Ed25519", "x": "AAAA"}, "does not match its declared type"),
        ("not a key", "an element of 'keys' that is not an object"),
    ],
)
def test_malformed_key_rejects_the_set(broken: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_key_set(key_set(EC, broken), ALL)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not JSON"),
        (b"<html>", "not JSON"),
        (b"[]", "no list 'keys'"),
        (b'{"keys": {}}', "no list 'keys'"),
        (b'{"keys": []}', "has no key for"),
        (b'{"keys": [], "keys": []}', "is ambiguous"),
        (json.dumps({"keys": [EC] * (MAX_KEYS + 1)}).encode(), "more than 100 keys"),
    ],
)
def test_invalid_key_set_is_rejected(content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_key_set(content, ALL)


def test_short_rsa_key_is_rejected() -> None:
    with pytest.raises(ValueError, match="the key '1' of 1024 bits; RSA keys must have ≥ 2048 bits"):
        read_key_set(key_set(EC, jwk(rsa_key(bits=1024), kid="1")), ALL)


def test_private_key_members_are_ignored() -> None:
    private = {**EC, "d": "this is ignored"}

    assert len(read_key_set(key_set(private), ALL).keys) == 1


def test_secret_in_a_set_must_be_as_long_as_its_hash() -> None:
    oct_key = {"kty": "oct", "kid": "1", "k": b64(b"x" * 48)}

    assert algorithms(oct_key, allowed=("HS256", "HS384", "HS512")) == [{"HS256", "HS384"}]  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="of 48 bytes"):
        algorithms(oct_key, allowed=("HS512",))  # type: ignore[arg-type]


def test_trailing_newline_of_secret_is_ignored() -> None:
    keys = read_secret(b"x" * 32 + b"\n", {"HS256"})

    assert keys.keys[0].material == b"x" * 32
    assert keys.find("any", "HS256") == keys.find(None, "HS256") == keys.keys
    assert keys.find(None, "HS384") == ()
    assert "xxx" not in repr(keys)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"x" * 63 + b"\n", "HS512 needs ≥ 64 bytes"),
        (b"", "too short"),
        (public_pem(private_key("ES256")), "is a key or a certificate"),
        (json.dumps(EC).encode(), "is a key or a certificate"),
        (key_set(EC), "is a key or a certificate"),
    ],
)
def test_invalid_secret_is_rejected(content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_secret(content, {"HS256", "HS512"})


def test_secret_verifies_its_own_algorithms_only() -> None:
    keys = read_secret(b"x" * 32, {"HS256"})
    (key,) = keys.find("any", "HS256")

    assert jwt.decode(jwt.encode({"sub": "a"}, "x" * 32, "HS256"), key.material, [*key.algorithms]) == {"sub": "a"}
    assert keys.find("any", "HS512") == ()


def test_key_repr_has_no_key_material() -> None:
    assert "material" not in repr(read_key_set(key_set(EC), ALL))
