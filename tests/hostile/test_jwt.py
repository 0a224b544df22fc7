"""Forged tokens at a real server: each is rejected by Check and by ShouldRateLimit, for the reason that fits.

tests/unit/identity/test_jwt.py tries more of them, without a server.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jwt
import pytest

from ratelimit_rls.identity.jwt import MAX_TOKEN_LENGTH
from ratelimit_rls.protos.messages import RateLimitResponse
from tests.hostile.envoy_calls import EnvoyCalls, counts_by_reason, series
from tests.support.jwt_factory import SECRET, b64, claims, jwk, key_set, private_key, public_pem, signed
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.slow

DOMAIN = "api"
LIMIT = 100_000
VICTIM = "alice"
ISSUER, PARTNER, SHARED = "https://issuer", "https://partner", "https://shared"
UNAUTHENTICATED = 16
"""Value of `grpc-status`."""

RULES = f"""\
domain: {DOMAIN}
answer: {{headers: [x-ratelimit]}}
identity:
  credentials: [{{kind: jwt, header: authorization}}]
  entries: [{{key: token, kind: jwt, becomes: [user]}}]
  on_invalid: refuse
ext_authz:
  descriptors: [{{entries: [{{key: user, from: user}}]}}]
descriptors: [{{key: user, rate_limit: {{unit: year, requests_per_unit: {LIMIT}}}}}]
"""
ISSUERS = f"""\
- name: accounts
  issuer: {ISSUER}
  audiences: [api]
  algorithms: [ES256, RS256]
  jwks: {{file: accounts.json}}
  claims: {{user: sub, tier: plan, org: org.id}}
- name: partner
  issuer: {PARTNER}
  audiences: [api]
  algorithms: [ES256]
  jwks: {{file: partner.json}}
  user_prefix: "partner:"
- name: shared
  issuer: {SHARED}
  audiences: [api]
  algorithms: [HS256]
  secret_file: secret
  user_prefix: "shared:"
"""
ES256 = {"alg": "ES256", "kid": "1"}
SECOND_KEY, PARTNERS_KEY, ATTACKERS_KEY = 2, 3, 4
"""Numbers of private keys; that of `accounts` under the kid 1 has none."""

TOO_LONG = "too long"
"""Marker instead of a reason: such a token is not verified and not counted."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """One server for all attacks. Afterwards it still answers the victim, whose counter is unused."""
    directory = tmp_path_factory.mktemp("tokens")
    own = jwk(private_key("ES256"), kid="1"), jwk(private_key("ES256", SECOND_KEY), kid="2")
    files = {
        "api.yaml": RULES.encode(),
        "issuers.yaml": ISSUERS.encode(),
        "accounts.json": key_set(*own, jwk(private_key("RS256"), kid="rsa")),
        "partner.json": key_set(jwk(private_key("ES256", PARTNERS_KEY), kid="1")),
        "secret": SECRET.encode(),
    }
    for name, content in files.items():
        (directory / name).write_bytes(content)
    settings = {
        "RLS_RULES": directory / "api.yaml",
        "RLS_JWT_ISSUERS": directory / "issuers.yaml",
        "LOG_LEVEL": "debug",
    }
    with ServiceProcess(settings) as running:
        yield running
        with EnvoyCalls(running.grpc_address) as calls:
            assert calls.check(bearer(signed(ES256, fresh()))).remaining == LIMIT - 1
        assert "Traceback" not in running.log()
        assert "eyJ" not in running.log(), "a token is in the log"


@pytest.fixture(scope="module")
def calls(service: ServiceProcess) -> Iterator[EnvoyCalls]:
    with EnvoyCalls(service.grpc_address) as made:
        yield made


@pytest.fixture(scope="module")
def attackers_server() -> Iterator[str]:
    """An attacker's key server. The service must never fetch from it."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/keys"
        with pytest.raises(BlockingIOError):
            listening.accept()


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def fresh(**changed: object) -> dict[str, Any]:
    """Return currently valid claims of the victim with these changes; None removes a claim."""
    now_s = time.time()
    return claims(**{"iat": now_s - 5, "exp": now_s + 600, "sub": VICTIM, **changed})


def good(**changed: object) -> str:
    """Return a token with a valid signature and these claims."""
    return signed(ES256, fresh(**changed))


def header(**changed: object) -> str:
    """Return a token with valid claims and signature, and this header."""
    return signed({**ES256, **changed}, fresh())


def payload(extra: str) -> str:
    """Return a signed token with this JSON after the valid claims."""
    return signed(ES256, f"{json.dumps(fresh())[:-1]}, {extra}}}".encode())


def expiring(exp: str) -> str:
    """Return a signed token whose payload ends in this JSON."""
    return signed(ES256, json.dumps(fresh(exp="@")).replace('"@"', exp).encode())


def unsigned(head: Mapping[str, object], signature: bytes = b"") -> str:
    return f"{b64(dict(head))}.{b64(fresh())}.{b64(signature)}"


def by_secret(secret: bytes, **changed: object) -> str:
    """Return a token with the kid 1 that is signed with a shared secret."""
    body = f"{b64({'alg': 'HS256', 'kid': changed.pop('kid', '1')})}.{b64(fresh(**changed))}"
    return f"{body}.{b64(hmac.digest(secret, body.encode(), hashlib.sha256))}"


def by_key(number: int, head: Mapping[str, object] | None = None, **changed: object) -> str:
    """Return a token that is signed with one of the EC keys."""
    headers = {"kid": "1", **(head or {})}
    return jwt.encode(fresh(**changed), private_key("ES256", number), "ES256", headers)


def resigned(change: Callable[[bytes], bytes]) -> str:
    """Return a token with another signature, which is made from the valid one."""
    body, _, signature = good().rpartition(".")
    return f"{body}.{b64(change(jwt.utils.base64url_decode(signature)))}"


def respelled(change: Callable[[str, str, str], str], wanted: str = "") -> str:
    """Return a valid token in another encoding; `wanted` is a character that it must contain."""
    while True:
        token = good()
        if wanted in token:
            return change(*token.split("."))


def der(signature: bytes) -> bytes:
    """Return a signature in the DER form of X.509; tokens have the two numbers side by side."""
    return jwt.utils.raw_to_der_signature(signature, private_key("ES256").curve)


def transplanted() -> str:
    """Return a token with the claims of one token and the signature of another."""
    head, body, _ = good().split(".")
    return f"{head}.{body}.{good(sub='mallory').split('.')[2]}"


def compressed() -> str:
    return signed({**ES256, "zip": "DEF"}, zlib.compress(json.dumps(fresh()).encode()))


FORGED: dict[str, tuple[Callable[[], str], str]] = {
    # The algorithm.
    "alg none, no signature": (lambda: unsigned({"alg": "none"}), "malformed"),
    "alg none, some signature": (lambda: unsigned({"alg": "none", "kid": "1"}, b"x" * 64), "algorithm"),
    "alg nOnE": (lambda: unsigned({"alg": "nOnE", "kid": "1"}, b"x" * 64), "algorithm"),
    "no alg": (lambda: signed({"kid": "1"}, fresh()), "algorithm"),
    "alg in lower case": (lambda: header(alg="es256"), "algorithm"),
    "alg is a list": (lambda: header(alg=["ES256"]), "algorithm"),
    "HS256 with the RSA public key": (lambda: by_secret(public_pem(private_key("RS256")), kid="rsa"), "algorithm"),
    "HS256 with the EC public key": (lambda: by_secret(public_pem(private_key("ES256"))), "algorithm"),
    "HS256 with the secret of another issuer": (lambda: by_secret(SECRET.encode()), "algorithm"),
    "HS256 with a public key, of the issuer with a secret": (
        lambda: by_secret(public_pem(private_key("RS256")), iss=SHARED),
        "signature",
    ),
    "PS256 with the RS256 key": (
        lambda: jwt.encode(fresh(), private_key("RS256"), "PS256", {"kid": "rsa"}),
        "algorithm",
    ),
    "RS256 with the kid of an EC key": (
        lambda: jwt.encode(fresh(), private_key("RS256"), "RS256", {"kid": "1"}),
        "key",
    ),
    "ES384 with a key of its own": (lambda: signed({"alg": "ES384", "kid": "1"}, fresh(), "ES384"), "algorithm"),
    # The signature.
    "signature stripped": (lambda: good().rpartition(".")[0] + ".", "malformed"),
    "signature and its dot stripped": (lambda: good().rpartition(".")[0], "malformed"),
    "signature truncated": (lambda: resigned(lambda own: own[:-3]), "signature"),
    "signature extended": (lambda: resigned(lambda own: own + b"\0"), "signature"),
    "signature of zeros": (lambda: resigned(lambda own: bytes(len(own))), "signature"),
    "signature in DER": (lambda: resigned(der), "signature"),
    "signature of another payload": (transplanted, "signature"),
    "signed by the attacker": (lambda: by_key(ATTACKERS_KEY), "signature"),
    "signed by another issuer under the same kid": (lambda: by_key(PARTNERS_KEY), "signature"),
    "signed by the issuer for its partner": (lambda: good(iss=PARTNER), "signature"),
    # Key ids.
    "kid unknown": (lambda: by_key(ATTACKERS_KEY, {"kid": "attacker"}), "key"),
    "kid missing where two keys fit": (lambda: signed({"alg": "ES256"}, fresh()), "key"),
    "kid empty": (lambda: header(kid=""), "key"),
    "kid null": (lambda: header(kid=None), "malformed"),
    "kid is a number": (lambda: header(kid=1), "malformed"),
    "kid is a list": (lambda: header(kid=["1"]), "malformed"),
    "kid with a NUL": (lambda: header(kid="1\0"), "key"),
    "kid is a path": (lambda: header(kid="../../../../etc/hostname"), "key"),
    "kid is the path of the key set": (lambda: header(kid="accounts.json"), "key"),
    "kid is a URL": (lambda: header(kid="http://127.0.0.1:1/keys"), "key"),
    "kid is SQL": (lambda: header(kid="' UNION SELECT '1' --"), "key"),
    "kid is /dev/null and the secret empty": (lambda: by_secret(b"", iss=SHARED, kid="/dev/null"), "signature"),
    "key in jwk": (lambda: by_key(ATTACKERS_KEY, {"jwk": jwk(private_key("ES256", ATTACKERS_KEY))}), "signature"),
    "key in jwk under a kid of its own": (
        lambda: by_key(ATTACKERS_KEY, {"kid": "own", "jwk": jwk(private_key("ES256", ATTACKERS_KEY), kid="own")}),
        "key",
    ),
    "certificate in x5c": (lambda: by_key(ATTACKERS_KEY, {"x5c": ["MIIB"]}), "signature"),
    # Extensions.
    "crit": (lambda: header(crit=["exp"]), "malformed"),
    "crit empty": (lambda: header(crit=[]), "malformed"),
    "typ of a logout token": (lambda: header(typ="logout+jwt"), "malformed"),
    "typ of a security event": (lambda: header(typ="application/secevent+jwt"), "malformed"),
    "typ of an encrypted token": (lambda: header(typ="JWE"), "malformed"),
    "typ a number": (lambda: header(typ=7), "malformed"),
    "typ null": (lambda: header(typ=None), "malformed"),
    "b64 false": (lambda: header(b64=False), "malformed"),
    "b64 false and critical": (lambda: header(b64=False, crit=["b64"]), "malformed"),
    "compressed": (compressed, "malformed"),
    "encrypted, in five parts": (lambda: ".".join([b64({"alg": "dir", "enc": "A256GCM"}), *["AAAA"] * 4]), "malformed"),
    "a token in a token": (lambda: signed({**ES256, "cty": "JWT"}, good().encode()), "malformed"),
    # Issuer and audience.
    "another issuer": (lambda: good(iss="https://attacker"), "issuer"),
    "issuer with a slash more": (lambda: good(iss=ISSUER + "/"), "issuer"),
    "issuer in capitals": (lambda: good(iss=ISSUER.upper()), "issuer"),
    "no issuer": (lambda: good(iss=None), "issuer"),
    "a list of issuers": (lambda: good(iss=[ISSUER]), "issuer"),
    "another audience": (lambda: good(aud="billing"), "audience"),
    "audience that begins alike": (lambda: good(aud="api.attacker"), "audience"),
    "no audience": (lambda: good(aud=None), "audience"),
    "empty list of audiences": (lambda: good(aud=[]), "audience"),
    "audiences in nested lists": (lambda: good(aud=[["api"]]), "audience"),
    "audience as a key": (lambda: good(aud={"api": True}), "audience"),
    # Times.
    "expired": (lambda: good(exp=time.time() - 31), "expired"),
    "expired before 1970": (lambda: good(exp=-1), "expired"),
    "not valid yet": (lambda: good(nbf=time.time() + 60), "early"),
    "issued in the future": (lambda: good(iat=time.time() + 60), "early"),
    "no expiry": (lambda: good(exp=None), "claims"),
    "expiry null": (lambda: expiring("null"), "claims"),
    "expiry as text": (lambda: good(exp="4000000000"), "claims"),
    "expiry true": (lambda: good(exp=True), "claims"),
    "expiry in a list": (lambda: good(exp=[4_000_000_000]), "claims"),
    "not before as text": (lambda: good(nbf="0"), "claims"),
    "expiry NaN": (lambda: expiring("NaN"), "malformed"),
    "expiry infinite": (lambda: expiring("1e999"), "malformed"),
    "expiry of 10,000 digits": (lambda: expiring("9" * 10_000), "malformed"),
    # Subject.
    "no user": (lambda: good(sub=None), "claims"),
    "user empty": (lambda: good(sub=""), "claims"),
    "user in a list": (lambda: good(sub=[VICTIM]), "claims"),
    "user in an object": (lambda: good(sub={"name": VICTIM}), "claims"),
    "user true": (lambda: good(sub=True), "claims"),
    "user with a space behind": (lambda: good(sub=VICTIM + " "), "claims"),
    "user with a NUL": (lambda: good(sub=VICTIM + "\0"), "claims"),
    "user with a header behind": (lambda: good(sub=VICTIM + "\r\nx-ratelimit-tier: gold"), "claims"),
    "user with an invisible character": (lambda: good(sub=VICTIM + "\u202e"), "claims"),
    "user with half a character": (
        lambda: signed(ES256, json.dumps(fresh(sub="@")).replace("@", r"alice\ud800").encode()),
        "claims",
    ),
    "user of 256 characters": (lambda: good(sub="x" * 256), "claims"),
    "user with a space behind the prefix": (
        lambda: by_key(PARTNERS_KEY, iss=PARTNER, sub=f" {VICTIM}"),
        "claims",
    ),
    "tier in a list": (lambda: good(plan=["gold"]), "claims"),
    "tier with a header behind": (lambda: good(plan="gold\r\nx-ratelimit-user: root"), "claims"),
    "organisation with a NUL": (lambda: good(org={"id": "acme\0"}), "claims"),
    # JSON.
    "user twice": (lambda: payload('"sub": "root"'), "malformed"),
    "a name twice within an object": (lambda: payload('"org": {"id": "a", "id": "b"}'), "malformed"),
    "alg twice": (lambda: signed(b'{"alg": "none", "alg": "ES256", "kid": "1"}', fresh()), "malformed"),
    "arrays 5,000 deep": (lambda: payload('"deep": ' + "[" * 5000 + "]" * 5000), "malformed"),
    "objects 1,500 deep": (lambda: payload('"deep": ' + '{"a":' * 1500 + "1" + "}" * 1500), "malformed"),
    "claims in a list": (lambda: signed(ES256, json.dumps([fresh()]).encode()), "malformed"),
    "claims in UTF-16": (lambda: signed(ES256, json.dumps(fresh()).encode("utf-16")), "malformed"),
    "byte order mark": (lambda: signed(ES256, b"\xef\xbb\xbf" + json.dumps(fresh()).encode()), "malformed"),
    "text behind the claims": (lambda: signed(ES256, json.dumps(fresh()).encode() + b"{}"), "malformed"),
    # Encoding.
    "longer than tokens may be": (lambda: good(padding="x" * MAX_TOKEN_LENGTH), TOO_LONG),
    "padded": (lambda: respelled(lambda head, body, own: f"{head}.{body}.{own}=="), "malformed"),
    "space within": (lambda: respelled(lambda head, body, own: f"{head}.{body} .{own}"), "malformed"),
    "line break within": (lambda: respelled(lambda head, body, own: f"{head}\n.{body}.{own}"), "malformed"),
    "alphabet of base64": (
        lambda: respelled(lambda *parts: ".".join(parts).replace("-", "+").replace("_", "/"), wanted="_"),
        "malformed",
    ),
    "bits left over in base64": (
        lambda: respelled(lambda head, body, own: f"{head}.{body}.{own[:-1]}{chr(ord(own[-1]) + 1)}"),
        "malformed",
    ),
    "four parts": (lambda: good() + ".AAAA", "malformed"),
    "not ASCII": (lambda: good() + "é", "malformed"),
}


@pytest.mark.parametrize(("forge", "reason"), FORGED.values(), ids=FORGED.keys())
def test_forged_token_is_rejected(
    service: ServiceProcess, calls: EnvoyCalls, forge: Callable[[], str], reason: str
) -> None:
    token = forge()
    before = counts_by_reason(service, "ratelimit_tokens_rejected_total")

    rejected = calls.check(bearer(token))
    answer = calls.should_rate_limit(DOMAIN, [("token", token)])

    assert (rejected.status, rejected.headers["www-authenticate"]) == (401, "Bearer")
    assert not rejected.upstream
    assert answer.overall_code == RateLimitResponse.OVER_LIMIT
    after = counts_by_reason(service, "ratelimit_tokens_rejected_total")
    grown = {name: count - before[name] for name, count in after.items() if count != before[name]}
    assert grown == ({reason: 2} if reason != TOO_LONG else {})


@pytest.mark.parametrize("name", ["jku", "x5u"])
def test_keys_are_not_fetched_from_where_a_token_says(calls: EnvoyCalls, attackers_server: str, name: str) -> None:
    for kid in ("1", "attacker"):
        forged = by_key(ATTACKERS_KEY, {"kid": kid, name: attackers_server})
        assert calls.check(bearer(forged)).status == 401


UNREADABLE: dict[str, Callable[[str], str]] = {
    "empty": lambda _: "",
    "scheme alone": lambda _: "Bearer",
    "no scheme": lambda token: token,
    "another scheme": lambda token: f"Basic {token}",
    "tab after the scheme": lambda token: f"Bearer\t{token}",
    "scheme twice": lambda token: f"Bearer Bearer {token}",
    "two tokens joined by a comma": lambda token: f"Bearer {token},Bearer {token}",
    "another scheme before": lambda token: f"Basic x, Bearer {token}",
    "token in quotes": lambda token: f'Bearer "{token}"',
    "token as a parameter": lambda token: f"Bearer token={token}",
}


@pytest.mark.parametrize("write", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_header_without_a_readable_token_is_rejected(calls: EnvoyCalls, write: Callable[[str], str]) -> None:
    """A missing credential is accepted by these rules, but an invalid one never is."""
    assert calls.check({"authorization": write(good())}).status == 401


ELSEWHERE: dict[str, Callable[[str], dict[str, str]]] = {
    "nowhere": lambda _: {},
    "in another header": lambda token: {"x-authorization": f"Bearer {token}"},
    "for a proxy": lambda token: {"proxy-authorization": f"Bearer {token}"},
    "in a cookie": lambda token: {"cookie": f"authorization=Bearer {token}; token={token}"},
    "in an entry of RLS": lambda token: {"token": token},
    "as a name for the upstream": lambda _: {"x-ratelimit-user": VICTIM, "x-ratelimit-tier": "gold"},
}


@pytest.mark.parametrize("headers", ELSEWHERE.values(), ids=ELSEWHERE.keys())
def test_token_elsewhere_proves_nothing(calls: EnvoyCalls, headers: Callable[[str], dict[str, str]]) -> None:
    passed = calls.check(headers(good()))
    assert set(passed.upstream) == {"x-ratelimit-ip"}
    assert passed.removed >= {"x-ratelimit-user", "x-ratelimit-tier", "x_ratelimit_user"}
    assert "x-ratelimit-remaining" not in passed.headers, "some user's limit was asked for"


def test_token_in_the_query_proves_nothing(calls: EnvoyCalls) -> None:
    passed = calls.check(path=f"/?access_token={good()}&authorization=Bearer%20{good()}")
    assert set(passed.upstream) == {"x-ratelimit-ip"}


def test_grpc_client_receives_unauthenticated(calls: EnvoyCalls) -> None:
    rejected = calls.check({**bearer(good(aud="billing")), "content-type": "application/grpc"})
    assert rejected.headers["grpc-status"] == str(UNAUTHENTICATED)


ACCEPTED: dict[str, tuple[Callable[[], str], str]] = {
    "ES256": (lambda: good(sub="carol"), "carol"),
    "RS256": (lambda: jwt.encode(fresh(sub="carol"), private_key("RS256"), "RS256", {"kid": "rsa"}), "carol"),
    "HS256 of the issuer with a secret": (lambda: by_secret(SECRET.encode(), iss=SHARED), f"shared:{VICTIM}"),
    "ES256 of the partner": (lambda: by_key(PARTNERS_KEY, iss=PARTNER), f"partner:{VICTIM}"),
    "just below the bound": (lambda: good(sub="carol", padding="x" * (MAX_TOKEN_LENGTH * 7 // 10)), "carol"),
}


@pytest.mark.parametrize(("mint", "user"), ACCEPTED.values(), ids=ACCEPTED.keys())
def test_good_token_is_accepted(calls: EnvoyCalls, mint: Callable[[], str], user: str) -> None:
    token = mint()
    passed = calls.check({**bearer(token), "x-ratelimit-user": "root"})
    answer = calls.should_rate_limit(DOMAIN, [("token", token)])

    assert (passed.status, passed.upstream["x-ratelimit-user"]) == (200, user)
    assert answer.overall_code == RateLimitResponse.OK
    assert answer.statuses[0].limit_remaining == passed.remaining - 1, "both count for the same user"


def test_invented_names_in_tokens_make_no_series(service: ServiceProcess, calls: EnvoyCalls) -> None:
    calls.check(bearer(good(iss="https://attacker")))
    before = series(service)
    for number in range(300):
        name = f"invented-{number}"
        head = {**ES256, **({"kid": name} if number % 3 else {"alg": name})}
        forged = signed(head, fresh(sub=name, iss=ISSUER if number % 2 else f"https://{name}"))
        assert calls.check(bearer(forged)).status == 401
    assert series(service) == before
    assert "invented-" not in service.log()
