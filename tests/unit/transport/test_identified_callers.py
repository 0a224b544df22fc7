"""Identified callers: their limits, blocks and credentials, and the validity of cached plans."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pytest

from ratelimit_rls.api.ext_authz import codec as ext_authz
from ratelimit_rls.api.ext_authz.codec import ExtAuthzCodec
from ratelimit_rls.api.ext_authz.encode import CALLER_HEADERS
from ratelimit_rls.api.rls import codec as rls
from ratelimit_rls.api.rls.codec import RlsCodec
from ratelimit_rls.core.entitlements import Block, Entitlement
from ratelimit_rls.core.identity import CredentialKind, Identity
from ratelimit_rls.core.model import Limit, Subject, Unit
from ratelimit_rls.core.plan import Policy
from ratelimit_rls.identity.directory import SubjectEntitlement
from ratelimit_rls.pipeline import codec as codec_module
from ratelimit_rls.pipeline.limiter import RateLimiter
from ratelimit_rls.pipeline.request_cache import RequestCache
from ratelimit_rls.protos.messages import CheckRequest, CheckResponse, RateLimitRequest, RateLimitResponse
from ratelimit_rls.rules.active_rules import ActiveRules
from ratelimit_rls.rules.compile import compile_documents
from ratelimit_rls.store.embedded import EmbeddedStore
from ratelimit_rls.telemetry.metrics import Metrics
from tests.support.pipelines import new_pipeline

RULES = """\
domain: api
identity:
  credentials:
    - {kind: api_key, header: x-api-key}
    - {kind: api_key, query: key}
    - {kind: jwt, header: authorization}
  entries:
    - {key: x-api-key, kind: api_key, becomes: [tier, user]}
    - {key: token, kind: jwt}
%s
ext_authz:
  descriptors:
    - entries: [{key: user, from: user}]
    - entries: [{key: ip, from: anonymous_ip}]
    - entries: [{key: caller, from: caller}]
descriptors:
  - {key: user, limits_of: user, rate_limit: {unit: hour, requests_per_unit: 2}}
  - {key: tier, descriptors: [{key: user, limits_of: user}]}
  - {key: ip, rate_limit: {unit: hour, requests_per_unit: 1}}
  - {key: caller, rate_limit: {unit: hour, requests_per_unit: 50}}
"""
GOLD = (Limit(5, Unit.HOUR),)


class FixedEntitlements:
    """Fake of the directory's entitlements."""

    def __init__(self) -> None:
        self.known: dict[tuple[Subject, str], SubjectEntitlement] = {}
        self.lookups: list[tuple[Subject, str, str]] = []

    def of(self, kind: Subject, subject: str, tier: str) -> Entitlement:
        self.lookups.append((kind, subject, tier))
        default = SubjectEntitlement(GOLD, "tier gold") if tier == "gold" else SubjectEntitlement()
        return self.known.setdefault((kind, subject), default) if not tier else self.known.get((kind, subject), default)

    def put(self, user: str, entitlement: SubjectEntitlement) -> None:
        before = self.known.get((Subject.USER, user))
        if before is not None:
            before.stale = True
        self.known[Subject.USER, user] = entitlement


class Verifier:
    def __init__(self) -> None:
        self.blocks: dict[str, Block] = {}

    def block_of(self, identity: Identity, now_s: float) -> Block | None:
        return self.blocks.get(identity.user)

    def identify(self, kind: CredentialKind, credential: str, now_s: float) -> Identity | None:
        known = {
            (CredentialKind.API_KEY, "rlk_alice"): Identity("alice", "gold", "acme", "kid"),
            (CredentialKind.JWT, "jwt-bob"): Identity("bob"),
        }
        return known.get((kind, credential))


class Harness:
    """Pipelines of RLS and ext_authz on one limiter."""

    def __init__(self, terms: str = "", rules_text: str = "", policy: Policy = Policy()) -> None:  # noqa: B008
        self.entitlements, self.metrics, rules = FixedEntitlements(), Metrics(), ActiveRules()
        self.limiter = RateLimiter(rules, EmbeddedStore(), self.metrics, policy, entitlements=self.entitlements)
        tree = compile_documents({"api.yaml": (rules_text or RULES % terms).encode()}).tree
        rules.swap(tree, digest="", files=1, loaded_at=datetime.now(UTC))
        self.verifier = Verifier()
        self.rls_codec = RlsCodec(self.limiter, verifier=self.verifier)
        self.authz_codec = ExtAuthzCodec(self.limiter, verifier=self.verifier)
        self.rls = new_pipeline(self.rls_codec, self.metrics)
        self.authz = new_pipeline(self.authz_codec, self.metrics)

    async def should(self, *descriptors: Mapping[str, str], hits: int = 0) -> Any:
        request = RateLimitRequest(domain="api", hits_addend=hits)
        for entries in descriptors:
            descriptor = request.descriptors.add()
            for key, value in entries.items():
                descriptor.entries.add(key=key, value=value)
        answer = await self.rls.check(request.SerializeToString())
        assert isinstance(answer, bytes), answer
        return RateLimitResponse.FromString(answer)

    async def check(self, headers: Mapping[str, str] | None = None, path: str = "/") -> Any:
        request = CheckRequest()
        http = request.attributes.request.http
        http.method, http.path = "GET", path
        http.headers.update(headers or {})
        request.attributes.source.address.socket_address.address = "192.0.2.9"
        answer = await self.authz.check(request.SerializeToString())
        assert isinstance(answer, bytes), answer
        return CheckResponse.FromString(answer)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1_000.0]
    for module in (ext_authz, codec_module, rls):
        monkeypatch.setattr(module, "time", lambda: now[0])
    return now


def limit(response: Any, number: int = 0) -> int:
    return int(response.statuses[number].current_limit.requests_per_unit)


async def test_caller_without_own_limits_gets_those_of_the_rule(clock: list[float]) -> None:
    harness = Harness()
    codes = [(await harness.should({"user": "alice"})).overall_code for _ in range(3)]
    assert codes == [1, 1, 2]


async def test_changed_limits_keep_the_count(clock: list[float]) -> None:
    harness = Harness()
    for _ in range(3):
        answer = await harness.should({"user": "alice"})
    assert (answer.overall_code, limit(answer)) == (2, 2)
    harness.entitlements.put("alice", SubjectEntitlement(GOLD, "tier gold"))
    answer = await harness.should({"user": "alice"})
    assert (answer.overall_code, limit(answer), answer.statuses[0].limit_remaining) == (1, 5, 2)


async def test_cached_plan_expires_with_its_override(clock: list[float]) -> None:
    harness = Harness()
    harness.entitlements.put("alice", SubjectEntitlement((Limit(100, Unit.HOUR),), "override", until_s=1_060.0))
    assert limit(await harness.should({"user": "alice"})) == 100
    harness.entitlements.known[Subject.USER, "alice"] = SubjectEntitlement(
        GOLD, "tier gold"
    )  # no notification that the other one is stale
    clock[0] = 1_059.9
    assert limit(await harness.should({"user": "alice"})) == 100
    clock[0] = 1_060.0
    assert limit(await harness.should({"user": "alice"})) == 5


async def test_valid_plan_is_reused(clock: list[float]) -> None:
    harness = Harness()
    for _ in range(3):
        await harness.should({"user": "alice"})
        await harness.check({"x-api-key": "rlk_alice"})
    assert len(harness.entitlements.lookups) == 2  # one for each codec


async def test_tier_entry_selects_limits_but_not_the_counter(clock: list[float]) -> None:
    harness = Harness()
    await harness.should({"user": "carol"})
    harness.entitlements.known.clear()
    answer = await harness.should({"tier": "gold", "user": "carol"})
    assert (limit(answer), answer.statuses[0].limit_remaining) == (5, 3)
    assert harness.entitlements.lookups[-1] == (Subject.USER, "carol", "gold")


async def test_blocked_caller_is_denied_by_every_api_and_not_charged(clock: list[float]) -> None:
    harness = Harness()
    before = (await harness.should({"ip": "192.0.2.1"}, hits=1)).statuses[0].limit_remaining
    harness.entitlements.put("alice", SubjectEntitlement(block=Block("spam", 1_090.0), until_s=1_090.0))
    answer = await harness.should({"ip": "192.0.2.2"}, {"user": "alice"})
    assert (answer.overall_code, [status.code for status in answer.statuses]) == (2, [1, 2])
    assert (await harness.should({"ip": "192.0.2.2"})).statuses[0].limit_remaining == before
    assert answer.dynamic_metadata["rule"]["rejection"] == "blocked"
    rejected = await harness.check({"x-api-key": "rlk_alice"})
    assert rejected.denied_response.status.code == 403
    assert "spam" not in rejected.denied_response.body
    clock[0] = 1_090.0
    harness.entitlements.known[Subject.USER, "alice"] = SubjectEntitlement()
    assert (await harness.should({"user": "alice"})).overall_code == 1


SHARED_LIMITS = """\
domain: api
identity:
  credentials: [{kind: api_key, header: x-api-key}]
  entries: [{key: x-api-key, kind: api_key, becomes: [user]}]
ext_authz: {descriptors: [{entries: [{key: plan, value: all}]}]}
descriptors:
  - {key: plan, rate_limit: {unit: hour, requests_per_unit: 2}}
  - {key: user, rate_limit: {unit: hour, requests_per_unit: 2}}
"""


async def test_blocked_caller_is_denied_even_if_no_rule_uses_subject_limits() -> None:
    harness = Harness(rules_text=SHARED_LIMITS)
    harness.verifier.blocks["alice"] = Block("spam")
    assert (await harness.check({"x-api-key": "rlk_alice"})).denied_response.status.code == 403
    rejected = await harness.should({"plan": "all"}, {"x-api-key": "rlk_alice"})
    assert (rejected.overall_code, [status.code for status in rejected.statuses]) == (2, [1, 2])
    harness.verifier.blocks.clear()
    assert (await harness.check({"x-api-key": "rlk_alice"})).HasField("ok_response")
    passed = await harness.should({"plan": "all"}, {"x-api-key": "rlk_alice"})
    assert (passed.overall_code, passed.statuses[1].limit_remaining) == (1, 1), "what was rejected was not counted"


async def test_refund_for_a_blocked_caller_is_accepted() -> None:
    harness = Harness(rules_text=SHARED_LIMITS)
    harness.verifier.blocks["alice"] = Block()
    request = RateLimitRequest(domain="api")
    descriptor = request.descriptors.add(is_negative_hits=True)
    descriptor.entries.add(key="x-api-key", value="rlk_alice")
    answer = await harness.rls.check(request.SerializeToString())
    assert isinstance(answer, bytes)
    assert RateLimitResponse.FromString(answer).overall_code == 1


@pytest.mark.parametrize("sent", [{"x-api-key": "rlk_mallory"}, {"x-api-key": "rlk_alice"}, {}])
async def test_shadow_mode_allows_denials_without_forged_headers(sent: dict[str, str]) -> None:
    terms = "  on_invalid: refuse\n  on_missing: refuse\n  hide_credentials: true"
    harness = Harness(terms, policy=Policy(shadow_mode=True))
    harness.verifier.blocks["alice"] = Block()
    answer = (await harness.check(sent | dict.fromkeys(CALLER_HEADERS, "forged"))).ok_response
    sent, removed = headers(answer.headers), {*answer.headers_to_remove}
    assert {"x-api-key", "authorization"} <= removed
    assert {*CALLER_HEADERS} <= {*sent} | removed
    assert "forged" not in sent.values()


UNREADABLE = (
    "Bearer\tjwt-bob",
    "Bearer jwt-bob, Bearer jwt-bob",
    "Bearer jwt-bob,Bearer jwt-alice",
    "Basic YWxpY2U6c2VjcmV0",
    "Basic YWxpY2U6c2VjcmV0, Bearer jwt-bob",
    "jwt-bob",
    "Bearer",
    "Bearer ",
    "bearer   ",
    " ",
    "",
)


@pytest.mark.parametrize("sent", UNREADABLE)
async def test_unreadable_credential_is_invalid_and_not_missing(clock: list[float], sent: str) -> None:
    strict = Harness("  on_invalid: refuse")
    assert (await strict.check()).HasField("ok_response")
    rejected = await strict.check({"authorization": sent})
    assert (rejected.status.code, rejected.denied_response.status.code) == (16, 401)
    assert "not valid" in json.loads(rejected.denied_response.body)["error"]["message"]
    # Another location has a readable credential.
    assert (await strict.check({"authorization": sent, "x-api-key": "rlk_alice"})).HasField("ok_response")
    # If invalid credentials are counted by address, unreadable ones are, too, unless a credential is required.
    assert (await Harness().check({"authorization": sent})).HasField("ok_response")


async def test_unconfigured_credential_header_is_ignored(clock: list[float]) -> None:
    rules = "domain: api\nidentity: {credentials: [{kind: api_key, header: x-api-key}], on_invalid: refuse}\n"
    harness = Harness(rules_text=rules)
    assert (await harness.check({"authorization": "Basic YWxpY2U6c2VjcmV0"})).HasField("ok_response")


async def test_one_header_may_carry_two_schemes(clock: list[float]) -> None:
    rules = """domain: api
identity:
  credentials:
    - {kind: jwt, header: authorization}
    - {kind: api_key, header: authorization, scheme: ApiKey}
  on_invalid: refuse
"""
    harness = Harness(rules_text=rules)
    for sent, status in (("Bearer jwt-bob", 0), ("apikey rlk_alice", 0), ("Basic YQ==", 16), ("ApiKey rlk_no", 16)):
        assert (await harness.check({"authorization": sent})).status.code == status


@pytest.mark.parametrize("path", ["/a\r\nx-evil: 1", "/a?b=\n", "/\0"])
async def test_path_with_line_break_is_rejected_for_every_caller(clock: list[float], path: str) -> None:
    harness = Harness()
    for sent in ({}, {"x-api-key": "rlk_alice"}):
        rejected = await harness.check({**sent, "content-type": "application/grpc"}, path)
        assert (rejected.status.code, rejected.denied_response.status.code) == (3, 400)
        assert headers(rejected.denied_response.headers)["grpc-status"] == "3"
        assert "evil" not in str(rejected)
    assert harness.entitlements.lookups == []


async def test_authentication_is_required_even_without_a_descriptor() -> None:
    rules = "domain: api\nidentity: {credentials: [{kind: api_key, header: x-api-key}], on_missing: refuse}\n"
    harness = Harness(rules_text=rules)
    assert (await harness.check()).denied_response.status.code == 401
    answer = (await harness.check({"x-api-key": "rlk_alice", "x-ratelimit-user": "forged"})).ok_response
    assert headers(answer.headers)["x-ratelimit-user"] == "alice"


async def test_domain_may_use_429_for_blocked_callers(clock: list[float]) -> None:
    harness = Harness("  blocked_status: 429")
    harness.entitlements.put("alice", SubjectEntitlement(block=Block()))
    rejected = await harness.check({"x-api-key": "rlk_alice", "content-type": "application/grpc"})
    assert (rejected.status.code, rejected.denied_response.status.code) == (8, 429)
    assert {"grpc-status": "8"}.items() <= headers(rejected.denied_response.headers).items()


async def test_reports_and_refunds_are_counted_for_every_caller(clock: list[float]) -> None:
    harness = Harness()
    harness.entitlements.put("alice", SubjectEntitlement(block=Block()))
    request = RateLimitRequest(domain="api")
    descriptor = request.descriptors.add(is_negative_hits=True)
    descriptor.entries.add(key="user", value="alice")
    answer = await harness.rls.check(request.SerializeToString())
    assert isinstance(answer, bytes)
    assert RateLimitResponse.FromString(answer).overall_code == 1


@pytest.mark.parametrize(
    ("sent", "path"),
    [({"x-api-key": "rlk_alice"}, "/"), ({}, "/?a=1&key=rlk_alice"), ({"authorization": "Bearer jwt-bob"}, "/")],
)
async def test_credential_is_resolved_to_a_caller(clock: list[float], sent: dict[str, str], path: str) -> None:
    harness = Harness()
    user = "bob" if "authorization" in sent else "alice"
    answer = await harness.check(sent, path)
    assert headers(answer.ok_response.headers)["x-ratelimit-user"] == user
    assert harness.entitlements.lookups == [(Subject.USER, user, "")]


async def test_identity_headers_cannot_be_forged(clock: list[float]) -> None:
    harness = Harness()
    answer = await harness.check(dict.fromkeys(CALLER_HEADERS, "forged"))
    sent = headers(answer.ok_response.headers)
    assert {name: sent.get(name) for name in CALLER_HEADERS if name in sent} == {"x-ratelimit-ip": "192.0.2.9"}
    assert {*CALLER_HEADERS} - {"x-ratelimit-ip"} <= {*answer.ok_response.headers_to_remove}
    assert harness.entitlements.lookups == []


async def test_identity_headers_with_underscores_are_removed(clock: list[float]) -> None:
    rules = """domain: api
identity: {credentials: [{kind: api_key, header: x-api-key}]}
ext_authz:
  descriptors: [{entries: [{key: user, from: user}]}]
  upstream_headers: {x-limited-by: "${rule}", x-a-b-c-d-e-f: "1"}
descriptors: [{key: user, rate_limit: {unit: hour, requests_per_unit: 20}}]
"""
    harness = Harness(rules_text=rules)
    for sent in ({}, {"x-api-key": "rlk_alice"}):
        answer = (await harness.check(sent)).ok_response
        names, removed = set(headers(answer.headers)), set(answer.headers_to_remove)
        assert {"x_ratelimit_user", "x-ratelimit_user", "x_ratelimit-user"} <= removed
        assert {"x_ratelimit_api_key", "x-ratelimit-api_key", "x_ratelimit_ip", "x_ratelimit_rule"} <= removed
        assert {"x_limited_by", "x_limited-by", "x_a_b_c_d-e-f"} <= removed
        assert not names & removed
        assert len(removed) == len(answer.headers_to_remove) < 60


async def test_invalid_credential_is_counted_by_address_or_gets_401(clock: list[float]) -> None:
    harness = Harness()
    assert (await harness.check({"x-api-key": "rlk_mallory"})).HasField("ok_response")
    assert (
        await harness.check({"x-api-key": "rlk_other"})
    ).denied_response.status.code == 429  # one address, one counter
    strict = Harness("  on_invalid: refuse")
    rejected = await strict.check({"x-api-key": "rlk_mallory", "x-request-id": "r-1"})
    assert (rejected.status.code, rejected.denied_response.status.code) == (16, 401)
    assert headers(rejected.denied_response.headers)["www-authenticate"] == "Bearer"
    assert json.loads(rejected.denied_response.body)["error"]["code"] == 401
    assert "mallory" not in str(rejected)
    assert (await strict.check()).HasField("ok_response"), "none at all is another matter"
    assert (await Harness("  on_missing: refuse").check()).denied_response.status.code == 401


async def test_credentials_can_be_hidden_from_the_upstream(clock: list[float]) -> None:
    answer = await Harness("  hide_credentials: true").check({"x-api-key": "rlk_alice"})
    assert {"x-api-key", "authorization"} <= {*answer.ok_response.headers_to_remove}


async def test_rls_credential_entry_is_resolved_to_a_caller(clock: list[float]) -> None:
    harness = Harness()
    answer = await harness.should({"x-api-key": "rlk_alice"})
    assert (answer.overall_code, limit(answer)) == (1, 5)
    assert harness.entitlements.lookups == [(Subject.USER, "alice", "gold")]
    await harness.should({"x-api-key": "rlk_alice"})
    assert (await harness.should({"tier": "gold", "user": "alice"})).statuses[0].limit_remaining == 2
    assert len(harness.entitlements.lookups) == 2, "the plan was kept, by what the request says without its credential"


async def test_rls_invalid_credential_is_counted_by_address(clock: list[float]) -> None:
    harness = Harness()
    for address, code in [("192.0.2.1", 1), ("192.0.2.1", 2), ("192.0.2.2", 1)]:
        answer = await harness.should({"token": "jwt-mallory"}, {"remote_address": address})
        assert answer.overall_code == code
    assert (await harness.should({"token": "x"})).overall_code == 1
    assert (await harness.should({"token": "y"})).overall_code == 2, "those without an address are one caller"
    rejected = await Harness("  on_invalid: refuse").should({"other": "x"}, {"token": "jwt-mallory"})
    assert (rejected.overall_code, [status.code for status in rejected.statuses]) == (2, [1, 2])


async def test_credentials_are_not_cached(clock: list[float]) -> None:
    harness = Harness()
    await harness.should({"x-api-key": "rlk_alice"})
    await harness.check({"x-api-key": "rlk_alice"})
    caches: list[RequestCache[Any]] = [
        harness.rls_codec.cache,
        harness.rls_codec._authenticated,
        harness.authz_codec.cache,
    ]
    assert [len(cache) for cache in caches] == [0, 1, 1]
    assert not any(b"rlk_" in key for cache in caches for key in cache._known)


async def test_rejected_callers_are_counted_separately(clock: list[float]) -> None:
    harness = Harness("  on_invalid: refuse")
    harness.entitlements.put("alice", SubjectEntitlement(block=Block()))
    await harness.check({"x-api-key": "rlk_alice"})
    await harness.check({"x-api-key": "rlk_mallory"})
    outcomes = {outcome: passed.count for (_, _, outcome), passed in harness.metrics.passes.items()}
    assert outcomes["unauthorized"] == 1
    assert outcomes["blocked"] >= 1


def headers(options: Any) -> dict[str, str]:
    return {option.header.key: option.header.value for option in options}
