"""Sets of keys: which of them count, for what, and what is refused as a whole."""

from __future__ import annotations

import hmac
import json

import pytest

from ratelimit_rls.identity.jwks import MOST_KEYS, read_key_set, read_secret
from tests.unit.identity.minted import SECRET, b64, jwk, key_set, private_key, public_pem, rsa_key

EC = jwk(private_key("ES256"), kid="1")
ALL = ("RS256", "PS256", "ES256", "ES384", "EdDSA")


def algorithms(*keys: dict[str, object], allowed: tuple[str, ...] = ALL) -> list[set[str]]:
    return [set(key.algorithms) for key in read_key_set(key_set(*keys), allowed).keys]


def test_a_key_is_for_what_its_type_its_own_word_and_the_issuer_allow() -> None:
    edwards = jwk(private_key("EdDSA"))

    assert algorithms(EC) == [{"ES256"}]
    assert algorithms({**EC, "alg": "ES256", "use": "sig", "key_ops": ["verify"]}) == [{"ES256"}]
    assert algorithms(edwards) == algorithms({**edwards, "alg": "Ed25519"}) == [{"EdDSA"}]


@pytest.mark.slow  # an RSA key takes long to make
def test_an_rsa_key_is_for_either_padding_unless_it_says_which() -> None:
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
def test_keys_for_something_else_are_left_out(other: dict[str, object]) -> None:
    assert len(read_key_set(key_set(EC, other), ALL).keys) == 1
    with pytest.raises(ValueError, match="has no key for"):
        read_key_set(key_set(other), ALL)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({**EC, "x": EC["y"]}, r"the key '1', which is not of the type"),
        ({**EC, "x": ""}, "not of the type"),
        ({**EC, "x": 5}, "not of the type"),
        ({name: EC[name] for name in ("kty", "crv", "x")}, "the key without a name, which is not"),
        ({**EC, "kid": 5}, "'kid' is not text"),
        ({"kty": "RSA", "n": "AQ", "e": "AQAB"}, "not of the type"),
        ({"kty": "RSA", "n": "", "e": ""}, "not of the type"),
        ({"kty": "OKP", "crv": "Ed25519", "x": "AAAA"}, "not of the type"),
        ("not a key", "something in 'keys' that is not a key"),
    ],
)
def test_a_broken_key_is_not_passed_over(broken: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_key_set(key_set(EC, broken), ALL)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not JSON"),
        (b"<html>", "not JSON"),
        (b"[]", "no list of 'keys'"),
        (b'{"keys": {}}', "no list of 'keys'"),
        (b'{"keys": []}', "has no key for"),
        (b'{"keys": [], "keys": []}', "not of one meaning"),
        (json.dumps({"keys": [EC] * (MOST_KEYS + 1)}).encode(), "more than 100 keys"),
    ],
)
def test_what_is_no_set_of_keys_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_key_set(content, ALL)


def test_a_short_rsa_key_is_refused() -> None:
    with pytest.raises(ValueError, match="the key '1' of 1024 bits; RSA needs 2048 or more"):
        read_key_set(key_set(EC, jwk(rsa_key(bits=1024), kid="1")), ALL)


def test_of_a_private_key_only_the_public_part_is_read() -> None:
    private = {**EC, "d": "this is not looked at"}

    assert len(read_key_set(key_set(private), ALL).keys) == 1


def test_secrets_in_a_set_are_for_hashes_that_are_no_longer() -> None:
    oct_key = {"kty": "oct", "kid": "1", "k": b64(b"x" * 48)}

    assert algorithms(oct_key, allowed=("HS256", "HS384", "HS512")) == [{"HS256", "HS384"}]
    with pytest.raises(ValueError, match="of 48 bytes"):
        algorithms(oct_key, allowed=("HS512",))


def test_a_secret_is_a_file_without_its_last_line_end() -> None:
    keys = read_secret(b"x" * 32 + b"\n", {"HS256"})

    assert keys.keys[0].material == b"x" * 32
    assert keys.find("any", "HS256") == keys.find(None, "HS256") == keys.keys
    assert keys.find(None, "HS384") == ()
    assert "xxx" not in repr(keys)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"x" * 63 + b"\n", "HS512 needs 64 bytes"),
        (b"", "too short"),
        (public_pem(private_key("ES256")), "is a key or a certificate"),
        (json.dumps(EC).encode(), "is a key or a certificate"),
        (key_set(EC), "is a key or a certificate"),
    ],
)
def test_what_is_no_secret_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_secret(content, {"HS256", "HS512"})


def test_a_secret_signs_for_its_own_algorithms_alone() -> None:
    (key,) = read_secret(b"x" * 32, {"HS256"}).keys

    assert key.verifies("HS256", b"text", hmac.digest(b"x" * 32, b"text", "sha256"))
    assert not key.verifies("HS512", b"text", hmac.digest(b"x" * 32, b"text", "sha512"))


def test_a_key_does_not_show_itself() -> None:
    assert "material" not in repr(read_key_set(key_set(EC), ALL))
