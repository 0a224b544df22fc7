"""JSON Web Tokens: all algorithms, and known attacks."""

from __future__ import annotations

import hashlib
import hmac
import json
import tracemalloc
from pathlib import Path
from typing import Any

import jwt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ratelimit_rls.core.identity import Identity
from ratelimit_rls.errors import SettingsError
from ratelimit_rls.identity.issuers import ALGORITHMS, ClaimNames, KeysInFile
from ratelimit_rls.identity.jwt import INVALID_CACHE_S, REASONS, VALID_CACHE_S, JwtVerifier
from tests.support.jwt_factory import (
    NOW,
    SECRET,
    b64,
    claims,
    issuer,
    jwk,
    key_set,
    mint,
    private_key,
    public_pem,
    signed,
)

ALICE = Identity("alice")
ES256 = {"alg": "ES256", "kid": "1"}


@pytest.fixture
def tokens(tmp_path: Path) -> JwtVerifier:
    return JwtVerifier([issuer(tmp_path)])


def rejection_reason(tokens: JwtVerifier, text: str, now_s: float = NOW) -> str:
    """Return the reason why a token is rejected."""
    before = dict(tokens.rejected)
    assert tokens.identify(text, now_s) is None
    (reason,) = [reason for reason, count in tokens.rejected.items() if count != before[reason]]
    assert reason in REASONS
    return reason


def slow_with_rsa(algorithm: str) -> object:
    """Mark RSA algorithms as slow: generating keys takes long."""
    return pytest.param(algorithm, marks=pytest.mark.slow) if algorithm[:2] in ("RS", "PS") else algorithm


@pytest.mark.parametrize("algorithm", [slow_with_rsa(name) for name in ALGORITHMS])
def test_every_algorithm_verifies_for_its_issuer_only(tmp_path: Path, algorithm: str) -> None:
    tokens = JwtVerifier([issuer(tmp_path, algorithm)])
    text = mint(algorithm)

    assert tokens.identify(text, NOW) == ALICE

    body, _, signature = text.rpartition(".")
    other = "A" if signature[0] != "A" else "B"
    assert rejection_reason(tokens, f"{body}.{other}{signature[1:]}") == "signature"
    shorter = jwt.utils.base64url_decode(signature)[:-3]
    assert rejection_reason(tokens, f"{body}.{b64(shorter)}") == "signature"


def test_ed448_is_eddsa(tmp_path: Path) -> None:
    key = private_key("EdDSA", 3)
    one = issuer(tmp_path, "EdDSA")
    assert isinstance(one.keys, KeysInFile)
    one.keys.path.write_bytes(key_set(jwk(key, kid="1", alg="Ed448")))

    assert JwtVerifier([one]).identify(mint("EdDSA", key), NOW) == ALICE


def test_claims_become_the_identity(tmp_path: Path) -> None:
    namespaced = ClaimNames("account.id", "https://example.com/plan", "org.id")
    tokens = JwtVerifier([issuer(tmp_path, claims=namespaced)])
    text = mint(account={"id": 42}, org={"id": "acme"}, **{"https://example.com/plan": "gold"})

    assert tokens.identify(text, NOW) == Identity("42", "gold", "acme")


@pytest.mark.parametrize(
    ("changed", "is_valid"),
    [
        ({"sub": None}, False),
        ({"sub": ""}, False),
        ({"sub": "x" * 255}, True),
        ({"sub": "x" * 256}, False),
        ({"sub": 7}, True),
        ({"sub": True}, False),
        ({"sub": 1.5}, False),
        ({"sub": ["alice"]}, False),
        ({"sub": "al\nice"}, False),
        ({"sub": "alice\x00"}, False),
        ({"sub": "alice\u202e"}, False),
        ({"sub": "álice b"}, True),
        ({"sub": " alice"}, False),
        ({"sub": "alice "}, False),
        ({"sub": "alice\u00a0"}, False),
        ({"sub": "%20alice"}, True),
        ({"plan": "gold "}, False),
        ({"org": {"id": " acme"}}, False),
        ({"plan": "gold"}, True),
        ({"plan": ["gold"]}, False),
        ({"plan": "go\rld"}, False),
        ({"org": {"id": {}}}, False),
        ({"org": "acme"}, True),
        ({"org": {}}, True),
    ],
)
def test_claim_must_be_a_valid_name(tokens: JwtVerifier, changed: dict[str, Any], is_valid: bool) -> None:
    text = signed(ES256, claims(**changed))

    if is_valid:
        assert tokens.identify(text, NOW) is not None
    else:
        assert rejection_reason(tokens, text) == "claims"


def test_lone_surrogate_in_claim_is_rejected(tokens: JwtVerifier) -> None:
    payload = json.dumps(claims(sub="@")).replace("@", r"\ud800").encode()

    assert rejection_reason(tokens, signed(ES256, payload)) == "claims"


@pytest.mark.parametrize(
    ("changed", "now_s", "reason"),
    [
        ({"exp": NOW}, NOW + 29.9, ""),
        ({"exp": NOW}, NOW + 30, "expired"),
        ({"exp": NOW - 3600}, NOW, "expired"),
        ({"exp": -1}, NOW, "expired"),
        ({"nbf": NOW + 30}, NOW, ""),
        ({"nbf": NOW + 31}, NOW, "early"),
        ({"iat": NOW + 30}, NOW, ""),
        ({"iat": NOW + 31}, NOW, "early"),
        ({"exp": None}, NOW, "claims"),
        ({"exp": "soon"}, NOW, "claims"),
        ({"exp": True}, NOW, "claims"),
        ({"exp": [NOW]}, NOW, "claims"),
        ({"nbf": "0"}, NOW, "claims"),
        ({"iat": {}}, NOW, "claims"),
        ({"exp": 10**29}, NOW, ""),
        ({"exp": 10**40}, NOW, "malformed"),
        ({"exp": 1e308}, NOW, ""),
        ({"aud": "other"}, NOW, ""),
        ({"aud": ["another-service", "api"]}, NOW, ""),
        ({"aud": "another-service"}, NOW, "audience"),
        ({"aud": ["another-service"]}, NOW, "audience"),
        ({"aud": []}, NOW, "audience"),
        ({"aud": None}, NOW, "audience"),
        ({"aud": ["api", 1]}, NOW, "audience"),
        ({"aud": {"api": 1}}, NOW, "audience"),
        ({"aud": "API"}, NOW, "audience"),
        ({"iss": "https://issuer/"}, NOW, "issuer"),
        ({"iss": None}, NOW, "issuer"),
        ({"iss": ["https://issuer"]}, NOW, "issuer"),
        ({"iss": {"https://issuer": 1}}, NOW, "issuer"),
    ],
)
def test_times_audience_and_issuer_are_checked(
    tokens: JwtVerifier, changed: dict[str, Any], now_s: float, reason: str
) -> None:
    text = signed(ES256, claims(**changed))

    if reason:
        assert rejection_reason(tokens, text, now_s) == reason
    else:
        assert tokens.identify(text, now_s) == ALICE


def test_token_without_expiry_is_valid_if_not_required(tmp_path: Path) -> None:
    tokens = JwtVerifier([issuer(tmp_path, require_expiry=False)])

    assert tokens.identify(mint(exp=None), NOW) == ALICE
    assert rejection_reason(tokens, mint(exp=NOW - 31)) == "expired"


@pytest.mark.parametrize("name", ["none", "None", "NONE", "nOnE", ""])
def test_alg_none_is_rejected(tokens: JwtVerifier, name: str) -> None:
    body = f"{b64({'alg': name, 'kid': '1'})}.{b64(claims())}"

    assert rejection_reason(tokens, body + ".") == "malformed"
    assert rejection_reason(tokens, body + "." + b64(b"x" * 64)) == "algorithm"
    assert rejection_reason(tokens, body) == "malformed"


@pytest.mark.parametrize("secret", ["pem", "stripped pem", "jwk", "set"])
def test_public_key_is_not_used_as_secret(tmp_path: Path, secret: str) -> None:
    one = issuer(tmp_path)
    assert isinstance(one.keys, KeysInFile)
    key = private_key("ES256")
    known_to_all = {
        "pem": public_pem(key),
        "stripped pem": public_pem(key).strip(),
        "jwk": json.dumps(jwk(key)).encode(),
        "set": one.keys.path.read_bytes(),
    }[secret]
    body = f"{b64({'alg': 'HS256', 'kid': '1'})}.{b64(claims())}"
    forged = f"{body}.{b64(hmac.digest(known_to_all, body.encode(), hashlib.sha256))}"

    assert rejection_reason(JwtVerifier([one]), forged) == "algorithm"


@pytest.mark.slow  # generating an RSA key takes long
def test_rsa_key_is_not_used_as_secret_or_with_other_algorithm(tmp_path: Path) -> None:
    one = issuer(tmp_path, "RS256")
    key = private_key("RS256")
    body = f"{b64({'alg': 'HS256', 'kid': '1'})}.{b64(claims())}"
    forged = f"{body}.{b64(hmac.digest(public_pem(key), body.encode(), hashlib.sha256))}"

    assert rejection_reason(JwtVerifier([one]), forged) == "algorithm"
    assert rejection_reason(JwtVerifier([one]), mint("PS256", key)) == "algorithm"


def test_key_is_used_for_its_own_algorithm_only(tmp_path: Path) -> None:
    """The issuer may use two curves; a token cannot select the wrong one for a key."""
    one = issuer(tmp_path, algorithms=frozenset({"ES256", "ES384"}))
    text = signed({"alg": "ES384", "kid": "1"}, claims(), "ES384")

    assert rejection_reason(JwtVerifier([one]), text) == "key"


def test_kid_is_looked_up_in_keys_of_the_issuer_only(tmp_path: Path) -> None:
    """Two issuers both have a key with kid 1: neither can sign for the other."""
    other_private_key = private_key("ES256", 2)
    one, two = issuer(tmp_path), issuer(tmp_path, name="two", issuer="https://two")
    assert isinstance(two.keys, KeysInFile)
    two.keys.path.write_bytes(key_set(jwk(other_private_key, kid="1"), jwk(other_private_key, kid="2")))
    tokens = JwtVerifier([one, two])

    assert tokens.identify(mint(key=other_private_key, iss="https://two"), NOW) == ALICE
    assert rejection_reason(tokens, mint(key=other_private_key)) == "signature"
    assert rejection_reason(tokens, mint(key=other_private_key, kid="2")) == "key"
    assert rejection_reason(tokens, mint(iss="https://two")) == "signature"


@pytest.mark.parametrize(
    "kid", ["/dev/null", "../../one.keys", "one.keys", "", "1\x00", "' OR 1=1 --", "http://127.0.0.1/keys", "x" * 5000]
)
def test_kid_is_an_opaque_name(tokens: JwtVerifier, kid: str) -> None:
    body = f"{b64({'alg': 'ES256', 'kid': kid})}.{b64(claims())}"
    assert rejection_reason(tokens, signed({"alg": "ES256", "kid": kid}, claims())) == "key"
    assert rejection_reason(tokens, f"{body}.{b64(hmac.digest(b'', body.encode(), hashlib.sha256))}") == "key"


@pytest.mark.parametrize("kid", [1, None, ["1"], {"1": 1}, True])
def test_kid_must_be_text(tokens: JwtVerifier, kid: object) -> None:
    assert rejection_reason(tokens, signed({"alg": "ES256", "kid": kid}, claims())) == "malformed"


def test_token_without_kid_needs_a_single_matching_key(tmp_path: Path) -> None:
    one = issuer(tmp_path)
    assert isinstance(one.keys, KeysInFile)
    assert JwtVerifier([one]).identify(mint(kid=None), NOW) == ALICE

    one.keys.path.write_bytes(key_set(jwk(private_key("ES256"), kid="1"), jwk(private_key("ES256", 2), kid="2")))

    assert rejection_reason(JwtVerifier([one]), mint(kid=None)) == "key"


def test_keys_within_a_token_are_ignored(tokens: JwtVerifier) -> None:
    own = private_key("ES256", 2)
    headers = {
        "jwk": {"jwk": jwk(own, kid="1")},
        "jku": {"jku": "http://127.0.0.1:1/keys"},
        "x5u": {"x5u": "http://127.0.0.1:1/chain"},
        "x5c": {"x5c": ["MII="]},
    }

    for header in headers.values():
        forged = jwt.encode(claims(), own, "ES256", {"kid": "1", **header})  # type: ignore[dict-item]
        assert rejection_reason(tokens, forged) == "signature"


@pytest.mark.parametrize("header", [{"crit": ["exp"]}, {"crit": []}, {"b64": False}, {"b64": True, "crit": ["b64"]}])
def test_critical_extensions_are_rejected(tokens: JwtVerifier, header: dict[str, Any]) -> None:
    assert rejection_reason(tokens, signed({**ES256, **header}, claims())) == "malformed"


@pytest.mark.parametrize("media_type", ["JWT", "jwt", "at+jwt", "application/at+JWT"])
def test_typ_of_an_access_token_is_accepted(tokens: JwtVerifier, media_type: str) -> None:
    assert tokens.identify(signed({**ES256, "typ": media_type}, claims()), NOW) == ALICE


@pytest.mark.parametrize("media_type", ["logout+jwt", "JWE", "application/", "", None, 7, ["JWT"]])
def test_typ_of_another_kind_of_token_is_rejected(tokens: JwtVerifier, media_type: object) -> None:
    assert rejection_reason(tokens, signed({**ES256, "typ": media_type}, claims())) == "malformed"


def test_duplicate_json_keys_are_rejected(tokens: JwtVerifier) -> None:
    usual = json.dumps(claims())
    twice = usual[:-1] + ', "sub": "root"}'
    nested = usual[:-1] + ', "org": {"id": "a", "id": "b"}}'

    for payload in twice, nested:
        assert rejection_reason(tokens, signed(ES256, payload.encode())) == "malformed"
    assert rejection_reason(tokens, signed(b'{"alg": "none", "alg": "ES256", "kid": "1"}', claims())) == "malformed"


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"null",
        b"[]",
        b'"text"',
        b"1",
        b"{",
        b"[" * 12_000,
        b'{"a":' * 2_400,
        b'{"exp": NaN}',
        b'{"exp": Infinity}',
        b'{"exp": 1e999}',
        b'{"exp": ' + b"9" * 10_000 + b"}",
        b'{"exp": -' + b"9" * 10_000 + b"}",
        b"\xff\xfe",
        b'\xef\xbb\xbf{"iss": "https://issuer"}',
        '{"iss": "https://issuer"}'.encode("utf-16"),
    ],
    ids=lambda payload: payload[:12].decode("latin-1"),
)
def test_payload_must_be_a_json_object(tokens: JwtVerifier, payload: bytes) -> None:
    assert rejection_reason(tokens, signed(ES256, payload)) == "malformed"
    assert rejection_reason(tokens, signed(payload, claims())) == "malformed"


def test_non_canonical_encoding_is_rejected(tokens: JwtVerifier) -> None:
    text = mint()
    header, payload, signature = text.split(".")
    assert tokens.identify(text, NOW) == ALICE
    others = [
        text + "=",
        text + "==",
        text + "\n",
        " " + text,
        text + "\u00a0",
        f"{header}=.{payload}.{signature}",
        f"{header}.{payload}\n.{signature}",
        f"{header}.{payload}.{signature[:20]}\n{signature[20:]}",
        f"{header}.{payload}.{signature[:20]}!{signature[20:]}",
        f"{header}.{payload}.{signature[:-1]}{chr(ord(signature[-1]) + 1)}",  # only two of its bits are used
        f"{header}.{payload}.{signature}.",
        f"{header}.{payload}.{signature}.{signature}.{signature}",
        f".{header}.{payload}.{signature}",
        f"{header}..{signature}",
        f"..{signature}",
        "..",
        "",
        ".",
    ]
    if "-" in text or "_" in text:
        others.append(text.replace("-", "+").replace("_", "/"))

    assert {rejection_reason(tokens, other) for other in others} == {"malformed"}


def test_oversized_token_is_rejected_without_parsing(tokens: JwtVerifier) -> None:
    long = signed(ES256, claims(padding="x" * 1_000_000))
    texts = [long, long[1:], long.replace(".", ""), "." * len(long), "é" * len(long)]
    tokens.identify("x", NOW)  # warm up
    tracemalloc.start()
    try:
        for text in texts * 5:
            assert tokens.identify(text, NOW) is None
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 10_000


def test_results_are_cached_for_a_while(tokens: JwtVerifier) -> None:
    valid, brief, invalid = mint(exp=NOW + 86_400), mint(exp=NOW + 100), mint(aud="another-service", exp=NOW + 86_400)
    assert tokens.identify(valid, NOW) == tokens.identify(brief, NOW) == ALICE
    assert rejection_reason(tokens, invalid) == "audience"
    tokens._verify = None  # type: ignore[method-assign, assignment]  # fails if called

    assert tokens.identify(valid, NOW + VALID_CACHE_S - 1) == ALICE
    assert tokens.identify(brief, NOW + 129) == ALICE
    assert rejection_reason(tokens, invalid, NOW + INVALID_CACHE_S - 1) == "audience"
    for text, later_s in (valid, VALID_CACHE_S), (brief, 130), (invalid, INVALID_CACHE_S):
        with pytest.raises(TypeError):
            tokens.identify(text, NOW + later_s)


def test_early_token_becomes_valid_in_time(tokens: JwtVerifier) -> None:
    text = mint(nbf=NOW + 40)

    assert rejection_reason(tokens, text) == "early"
    assert tokens.identify(text, NOW + 10) == ALICE


def test_forged_tokens_do_not_evict_valid_ones(tokens: JwtVerifier) -> None:
    tokens._invalid._max_entries = 10
    text = mint()
    assert tokens.identify(text, NOW) == ALICE

    for number in range(100):
        tokens.identify(f"{number}", NOW)

    assert (len(tokens._valid), len(tokens._invalid)) == (1, 10)


def test_token_is_not_stored(tmp_path: Path) -> None:
    tokens = JwtVerifier([issuer(tmp_path, "HS256")])
    text = mint("HS256")
    tokens.identify(text, NOW)

    seen = repr(vars(tokens)) + repr(vars(tokens._valid)) + repr([vars(one) for one in tokens._sources.values()])

    assert text not in seen
    assert text.rpartition(".")[2] not in seen
    assert SECRET not in seen


def test_two_issuers_with_the_same_iss_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="the same `iss`"):
        JwtVerifier([issuer(tmp_path), issuer(tmp_path)])


@pytest.fixture(scope="module")
def shared_tokens(tmp_path_factory: pytest.TempPathFactory) -> JwtVerifier:
    return JwtVerifier([issuer(tmp_path_factory.mktemp("keys"))])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
some_claims = st.dictionaries(st.sampled_from(["iss", "aud", "sub", "exp", "nbf", "iat", "plan", "org"]), json_values)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
@given(some_claims, st.dictionaries(st.sampled_from(["alg", "kid", "typ", "crit"]), json_values))
def test_no_token_raises(shared_tokens: JwtVerifier, changed: dict[str, Any], header: dict[str, Any]) -> None:
    text = signed({**ES256, **header}, {**claims(), **changed})

    found = shared_tokens.identify(text, NOW)

    assert found is None or found.user.isprintable()


@given(st.text(alphabet=st.characters(codec=None), max_size=50) | st.text("abcAB019-_.=+/ \n", max_size=50))
def test_no_text_raises(shared_tokens: JwtVerifier, text: str) -> None:
    assert shared_tokens.identify(text, NOW) is None


def test_user_prefix_separates_issuers(tmp_path: Path) -> None:
    tokens = JwtVerifier([issuer(tmp_path, user_prefix="accounts:")])
    assert tokens.identify(mint(sub="alice"), NOW) == Identity("accounts:alice")
    assert rejection_reason(tokens, mint(sub=" alice")) == "claims"
    assert tokens.identify(mint(sub="x" * 246), NOW) == Identity("accounts:" + "x" * 246)
    assert rejection_reason(tokens, mint(sub="x" * 247)) == "claims"
