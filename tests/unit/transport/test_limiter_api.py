"""Handlers of RateLimiter: targets of messages, counted descriptors and responses."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from ratelimit_rls.api.limiter.codec import CheckRateLimitCodec, RemainingQuotaCodec, _cache_key
from ratelimit_rls.api.limiter.decode import LimiterDecoder, LimiterTarget
from ratelimit_rls.core.entitlements import Block, Entitlement
from ratelimit_rls.core.identity import CredentialKind, Identity
from ratelimit_rls.core.model import Entry, Limit, Request, StoreResult, Subject, Unit
from ratelimit_rls.core.plan import Policy
from ratelimit_rls.database.repository import Actor
from ratelimit_rls.errors import StoreError, StoreUnavailable, Unauthenticated
from ratelimit_rls.h2.status import RpcError, StatusCode
from ratelimit_rls.identity.directory import SubjectEntitlement
from ratelimit_rls.pipeline.limiter import PlannedCall, RateLimiter
from ratelimit_rls.pipeline.message_bounds import MessageBounds
from ratelimit_rls.protos.messages import (
    LimiterCheckRequest,
    LimiterCheckResponse,
    QuotaRequest,
    QuotaResponse,
    ResetRequest,
    ResetResponse,
)
from ratelimit_rls.rules.active_rules import ActiveRules
from ratelimit_rls.rules.compile import compile_documents
from ratelimit_rls.store.base import PreparedPlan
from ratelimit_rls.store.embedded import EmbeddedStore
from ratelimit_rls.telemetry.abuse import Abuse
from ratelimit_rls.telemetry.metrics import Metrics
from ratelimit_rls.transport.grpc.call_proxy import PEER_METADATA
from ratelimit_rls.transport.grpc.reset_limit import (
    MAX_CONCURRENT_CALLS,
    AdminCall,
    ResetLimit,
    _admin_call,
    _token,
)
from tests.support.pipelines import new_pipeline, responses

NOW_S = 1_800_000_000
KEY = "rlk_abcdefghijkl_" + "s" * 43
ID = "abcdefghijkl"

RULES = """\
domain: edge
descriptors:
  - {key: user, rate_limit: {unit: hour, requests_per_unit: 3}}
  - {key: user, value: staff, rate_limit: {unlimited: true}}
  - {key: ip, rate_limit: {unit: hour, requests_per_unit: 2}}
  - {key: api_key, rate_limit: {unit: hour, requests_per_unit: 5}}
  - key: path
    value: /search
    deny: {format: json, status: 503}
    rate_limit: {unit: hour, requests_per_unit: 4}
  - key: tier
    descriptors: [{key: user, rate_limit: {unit: day, requests_per_unit: 9}}]
"""


class Store(EmbeddedStore):
    def __init__(self) -> None:
        super().__init__(clock=lambda: NOW_S * 1_000_000)
        self.is_away = False

    async def spend(self, batch: Sequence[PreparedPlan]) -> list[StoreResult | StoreError]:
        return [StoreUnavailable("away")] * len(batch) if self.is_away else await super().spend(batch)


class Limiter(RateLimiter):
    """Records the prepared requests."""

    def __init__(self, rules: str = RULES, policy: Policy | None = None, **more: Any) -> None:
        self.snapshot, self.metrics, self.store = ActiveRules(), Metrics(), Store()
        super().__init__(self.snapshot, self.store, self.metrics, policy or Policy(), **more)
        self.prepared: list[Request] = []
        if rules:
            self.load(rules)

    def load(self, rules: str) -> None:
        tree = compile_documents({"rules.yaml": rules.encode()}).tree
        self.snapshot.swap(tree, digest="", files=1, loaded_at=datetime.now(UTC))

    def prepare(self, request: Request) -> PlannedCall:
        self.prepared.append(request)
        return super().prepare(request)

    @property
    def descriptors(self) -> list[str]:
        """Descriptors of the last request."""
        return [",".join(f"{key}={value}" for key, value in one.entries) for one in self.prepared[-1].descriptors]


class Keys:
    """Verifier that knows one key, which belongs to bob."""

    def __init__(self) -> None:
        self.identity: Identity | None = Identity("bob", "gold", "", ID)
        self.block: Block | None = None

    def block_of(self, identity: Identity, now_s: float) -> Block | None:
        return self.block

    def identify(self, kind: CredentialKind, credential: str, now_s: float) -> Identity | None:
        assert kind is CredentialKind.API_KEY
        return self.identity if credential == KEY else None


def check_codec(limiter: Limiter, **more: Any) -> CheckRateLimitCodec:
    return CheckRateLimitCodec(limiter, clock=lambda: NOW_S, **more)


def message(identifier: str = "alice", dimension: str = "USER", domain: str = "edge", **more: Any) -> bytes:
    request = LimiterCheckRequest(identifier=identifier, dimension=dimension, domain=domain, **more)
    return bytes(request.SerializeToString())


async def ask(codec: CheckRateLimitCodec | RemainingQuotaCodec, *messages: bytes) -> list[Any]:
    """Decode responses; errors are returned as they are."""
    kind = QuotaResponse if isinstance(codec, RemainingQuotaCodec) else LimiterCheckResponse
    assert isinstance(codec.limiter, Limiter)
    answers = await responses(new_pipeline(codec, codec.limiter.metrics), messages)
    return [kind.FromString(answer) if isinstance(answer, bytes) else answer for answer in answers]


def non_default(response: Any) -> dict[str, Any]:
    """Return the fields that do not have their default value."""
    return {field.name: value for field, value in response.ListFields()}


async def test_response_has_the_numbers_of_the_reported_limit() -> None:
    first, *_, last = await ask(check_codec(Limiter()), *[message()] * 4)
    end = NOW_S // 3600 * 3600 + 3600
    assert non_default(first) == {
        "allowed": True,
        "current_count": 1,
        "limit": 3,
        "remaining": 2,
        "reset_at": end,
        "rule": "edge.user",
    }
    assert non_default(last) == {
        "current_count": 4,  # `charge: always`, as in envoyproxy/ratelimit: denied hits count
        "limit": 3,
        "reset_at": end,
        "retry_after": end - NOW_S,
        "rule": "edge.user",
        "reason": "over_limit",
        "http_status": 429,
    }


@pytest.mark.parametrize(
    ("payload", "descriptors"),
    [
        (message(), ["user=alice"]),
        (message(endpoint="/other?q=rlk_"), ["user=alice"]),
        (message(endpoint="/search?q=1"), ["user=alice", "path=/search"]),
        (message("2001:DB8::0:1", "IP"), ["ip=2001:db8::1"]),
        (message("::ffff:192.0.2.1", "IP"), ["ip=192.0.2.1"]),
        (message("aaaabbbbcccc", "API_KEY"), ["api_key=aaaabbbbcccc"]),
        (message(KEY, "API_KEY"), [f"api_key={ID}", "user=bob", "tier=gold,user=bob"]),
        (message(domain="unheard-of", endpoint="/a"), ["user=alice"]),
    ],
)
async def test_descriptors_are_those_that_match_a_rule(payload: bytes, descriptors: list[str]) -> None:
    limiter = Limiter()
    (answer,) = await ask(check_codec(limiter, verifier=Keys()), payload)
    assert answer.allowed
    assert limiter.descriptors == descriptors


async def test_ipv6_addresses_are_cut_to_the_prefix_of_the_mapping() -> None:
    mapping = "ext_authz: {ipv6_prefix: 64, descriptors: [{entries: [{key: ip, from: client_ip}]}]}"
    limiter = Limiter(f"{RULES}{mapping}")
    await ask(check_codec(limiter), message("2001:db8:1:2:3:4:5:6", "IP"))
    assert limiter.descriptors == ["ip=2001:db8:1:2::"]


NESTED = """\
domain: edge
descriptors:
  - key: user
    descriptors: [{key: path, rate_limit: &limit {unit: hour, requests_per_unit: 1}}]
  - key: path
    descriptors: [{key: org, rate_limit: *limit}]
  - key: tier
    rate_limit: *limit
    descriptors: [{key: path, rate_limit: *limit, descriptors: [{key: api_key, rate_limit: *limit}]}]
  - {key: scope, value: global, rate_limit: *limit}
"""


@pytest.mark.parametrize(
    ("payload", "descriptors"),
    [
        (message(), ["scope=global"]),
        (message(endpoint="/a"), ["user=alice,path=/a", "scope=global"]),
        (
            message(KEY, "API_KEY", endpoint="/a"),
            [
                f"tier=gold,path=/a,api_key={ID}",
                "user=bob,path=/a",
                "path=/a,org=acme",
                "tier=gold",
                "tier=gold,path=/a",
                "scope=global",
            ],
        ),
    ],
)
async def test_rules_may_combine_identity_path_and_tier(payload: bytes, descriptors: list[str]) -> None:
    limiter, keys = Limiter(NESTED), Keys()
    keys.identity = Identity("bob", "gold", "acme", ID)
    await ask(check_codec(limiter, verifier=keys), payload)
    assert limiter.descriptors == descriptors


async def test_all_limits_are_one_operation_and_the_denying_one_is_reported() -> None:
    limiter = Limiter()
    *_, last = await ask(check_codec(limiter), *[message(str(n), endpoint="/search") for n in range(5)])
    assert (last.allowed, last.rule, last.http_status, last.limit) == (False, "edge.path_/search", 503, 4)


async def test_exempting_rule_is_reported() -> None:
    exempt, free = await ask(check_codec(Limiter()), message("staff"), message("x", "USER", "unheard-of"))
    assert non_default(exempt) == {"allowed": True, "rule": "edge.user_staff"}
    assert non_default(free) == {"allowed": True}


async def test_global_quota_mode_is_not_bypassed_by_a_missing_rule() -> None:
    *_, last = await ask(check_codec(Limiter(policy=Policy(quota_mode=True))), *[message(endpoint="/no/rule")] * 4)
    assert not last.allowed


async def test_default_cost_is_one_and_zero_only_looks() -> None:
    limiter = Limiter()
    answers = await ask(check_codec(limiter), *[message(cost=cost) for cost in (0, 2, 0)], message(), message(cost=0))
    assert [(answer.allowed, answer.remaining) for answer in answers] == [
        (True, 3),
        (True, 1),
        (True, 1),
        (True, 0),
        (False, 0),
    ]


async def test_requests_are_cached_until_the_rules_change() -> None:
    limiter = Limiter()
    checks = check_codec(limiter)
    await ask(checks, message(timestamp=NOW_S), message(timestamp=NOW_S + 1), message(timestamp=NOW_S + 2))
    assert len(limiter.prepared) == 1
    await ask(checks, message(timestamp=NOW_S, cost=2), message("al", endpoint="ice"), message("alice"))
    assert len(limiter.prepared) == 3
    limiter.load(RULES)
    await ask(checks, message())
    assert len(limiter.prepared) == 4


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (LimiterTarget("edge", (Entry("user", "a"),), "b"), LimiterTarget("edge", (Entry("user", "ab"),))),
        (
            LimiterTarget("edge", (Entry("user", "a"),), path="b"),
            LimiterTarget("edge", (Entry("user", "a"),), tier="b"),
        ),
        (LimiterTarget("edge", (Entry("user", "a"),)), LimiterTarget("edge", (Entry("ip", "a"),))),
        (LimiterTarget("edg", (Entry("user", "a"),), "e"), LimiterTarget("edge", (Entry("user", "a"),))),
        (LimiterTarget("edge", (Entry("a", "1:b"),)), LimiterTarget("edge", (Entry("a", "b"), Entry("a", "b")))),
    ],
)
def test_cache_key_is_unambiguous(one: LimiterTarget, other: LimiterTarget) -> None:
    assert _cache_key(one, 1) != _cache_key(other, 1)
    assert _cache_key(one, 1) != _cache_key(one, 11)
    assert _cache_key(one, 1) == _cache_key(LimiterTarget(*one), 1)


async def test_default_domain_is_used_if_none_is_given() -> None:
    checks = check_codec(Limiter(), default_domain="edge")
    default, named = await ask(checks, message(domain=""), message(domain="unheard-of"))
    assert (default.rule, named.rule) == ("edge.user", "")


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (message(domain=""), "RLS_LIMITER_DOMAIN"),
        (message(""), "no identifier"),
        (message(dimension="DIMENSION_UNSPECIFIED"), "USER, IP or API_KEY"),
        (bytes(LimiterCheckRequest(identifier="a", dimension=77, domain="edge").SerializeToString()), "no dimension"),
        (message("localhost", "IP"), "192.0.2.1"),
        (message("1" * 5000, "IP"), "must be an IP address"),
        (message(KEY, "USER"), "API_KEY"),
        (message("rla_x", "IP"), "API_KEY"),
        (message(KEY, "API_KEY"), "RLS_DATABASE_URL"),
        (b"\xff\xff", "ratelimit_rls.v1.CheckRequest"),
        (b"\x0a\x01\xff", "UTF-8"),
    ],
)
async def test_invalid_field_error_does_not_repeat_the_input(payload: bytes, words: str) -> None:
    limiter = Limiter()
    (failure,) = await ask(check_codec(limiter), payload)
    assert isinstance(failure, RpcError)
    assert failure.code is StatusCode.INVALID_ARGUMENT
    assert words in failure.message
    assert KEY not in failure.message
    assert limiter.prepared == []


async def test_calls_fail_without_rules() -> None:
    (failure,) = await ask(check_codec(Limiter(rules="")), message())
    assert failure.code is StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    "payload",
    [
        message(KEY, "API_KEY"),
        message("rlk_short", "API_KEY"),
        message("rla_", "API_KEY"),
        message("some-id", "API_KEY"),
        message(f" {KEY}", "API_KEY"),
        message(f"Bearer {KEY}", "API_KEY"),
    ],
)
async def test_invalid_key_is_denied_and_not_counted(payload: bytes) -> None:
    limiter, keys = Limiter(), Keys()
    keys.identity = None
    (answer,) = await ask(check_codec(limiter, verifier=keys), payload)
    assert non_default(answer) == {"reason": "unauthorized", "http_status": 401}
    assert limiter.prepared == []


async def test_invalid_keys_share_one_address_counter() -> None:
    limiter = Limiter(f"{RULES}identity: {{credentials: [{{kind: api_key, header: x-api-key}}], on_invalid: ip}}")
    answers = await ask(check_codec(limiter, verifier=Keys()), *[message(f"rlk_{n}", "API_KEY") for n in range(3)])
    assert [answer.allowed for answer in answers] == [True, True, False]
    assert limiter.descriptors == ["ip=unknown"]


async def test_without_a_verifier_key_identifiers_are_opaque() -> None:
    limiter = Limiter()
    (answer,) = await ask(check_codec(limiter), message("some-id", "API_KEY"))
    assert (answer.allowed, limiter.descriptors) == (True, ["api_key=some-id"])


@pytest.mark.parametrize("identifier", [f" {KEY}", f"Bearer {KEY}", KEY])
async def test_key_is_rejected_as_a_user_name(identifier: str) -> None:
    limiter = Limiter()
    (failure,) = await ask(check_codec(limiter, verifier=Keys()), message(identifier))
    assert failure.code is StatusCode.INVALID_ARGUMENT
    assert limiter.prepared == []


async def test_key_of_a_blocked_user_is_denied() -> None:
    limiter, keys = Limiter(), Keys()
    keys.block = Block("spam")
    checks = check_codec(limiter, verifier=keys)
    (blocked,) = await ask(checks, message(KEY, "API_KEY"))
    keys.block = None
    (passed,) = await ask(checks, message(KEY, "API_KEY"))
    assert non_default(blocked) == {"reason": "blocked", "http_status": 403}
    assert passed.allowed


async def test_revoked_key_is_denied_at_once() -> None:
    keys = Keys()
    checks = check_codec(Limiter(), verifier=keys)
    (before,) = await ask(checks, message(KEY, "API_KEY"))
    keys.identity = None
    (after,) = await ask(checks, message(KEY, "API_KEY"))
    assert (before.allowed, after.allowed) == (True, False)


async def test_raw_key_is_neither_in_entries_nor_in_caches() -> None:
    limiter = Limiter()
    checks = check_codec(limiter, verifier=Keys())
    await ask(checks, message(KEY, "API_KEY", endpoint=f"/search?key={KEY}"))
    assert KEY not in repr(limiter.prepared)
    assert KEY not in repr(vars(checks._cache))


class FixedEntitlements:
    """The same entitlement for every caller, which a test can change."""

    def __init__(self) -> None:
        self.entitlement = SubjectEntitlement()

    def of(self, kind: Subject, subject: str, tier: str) -> Entitlement:
        return self.entitlement

    def change(self, entitlement: SubjectEntitlement) -> None:
        self.entitlement.stale = True
        self.entitlement = entitlement


OWN_LIMITS = "domain: edge\ndescriptors: [{key: user, limits_of: user, rate_limit: {unit: hour, requests_per_unit: 3}}]"


async def test_own_limits_and_blocks_apply_at_once() -> None:
    fixed = FixedEntitlements()
    checks = check_codec(Limiter(OWN_LIMITS, entitlements=fixed))
    (rule_s,) = await ask(checks, message())
    fixed.change(SubjectEntitlement((Limit(7, Unit.HOUR),), "override", until_s=NOW_S + 60))
    (own,) = await ask(checks, message())
    fixed.change(SubjectEntitlement(block=Block("fraud", NOW_S + 90.5), until_s=NOW_S + 90.5))
    (blocked,) = await ask(checks, message())
    fixed.change(SubjectEntitlement(block=Block("fraud")))
    (for_good,) = await ask(checks, message())
    assert [(answer.limit, answer.remaining) for answer in (rule_s, own)] == [(3, 2), (7, 5)]
    assert non_default(blocked) == {
        "reset_at": NOW_S + 91,
        "retry_after": 91,
        "rule": "edge.user",
        "reason": "blocked",
        "http_status": 403,
    }
    assert non_default(for_good) == {"rule": "edge.user", "reason": "blocked", "http_status": 403}


async def test_skewed_clock_is_counted_and_logged_once_and_changes_nothing() -> None:
    checks = check_codec(Limiter())
    moments = (0, NOW_S - 300, NOW_S + 300, NOW_S + 301, NOW_S - 301, -(2**63), 2**63 - 1)
    with capture_logs() as logs:
        answers = await ask(checks, *[message(str(at), timestamp=at) for at in moments])
    assert all(answer.remaining == 2 for answer in answers)
    assert dict(checks.gauges()) == {"ratelimit.limiter.clock_skew": 4}
    assert [(line["event"], line["skew_s"]) for line in logs] == [("client_clock_skewed", 301)]


async def test_jitter_is_added_to_retry_after() -> None:
    rules = (
        "domain: edge\nanswer: {retry_jitter: 1000s}\n"
        "descriptors: [{key: user, rate_limit: {unit: hour, requests_per_unit: 0}}]"
    )
    waits = {answer.retry_after for answer in await ask(check_codec(Limiter(rules)), *[message()] * 50)}
    shortest = 3600 - NOW_S % 3600
    assert len(waits) > 10
    assert min(waits) >= shortest
    assert max(waits) <= shortest + 1000


def quotas(answer: Any) -> list[Mapping[str, Any]]:
    return [non_default(quota) for quota in answer.limits]


def quota(identifier: str = "alice", dimension: str = "USER", **more: Any) -> bytes:
    request = QuotaRequest(identifier=identifier, dimension=dimension, domain="edge", **more)
    return bytes(request.SerializeToString())


def quota_codec(limiter: Limiter, **more: Any) -> RemainingQuotaCodec:
    return RemainingQuotaCodec(limiter, clock=lambda: NOW_S, **more)


async def test_quota_lists_all_limits_and_charges_none() -> None:
    limiter = Limiter()
    end = NOW_S // 3600 * 3600 + 3600
    await ask(check_codec(limiter), message(), message("bob"), message(endpoint="/search"))
    for _ in range(2):
        (answer,) = await ask(quota_codec(limiter), quota(endpoint="/search"))
        assert answer.allowed
        assert quotas(answer) == [
            {"rule": "edge.user", "limit": 3, "window": "hour", "remaining": 1, "reset_at": end},
            {"rule": "edge.path_/search", "limit": 4, "window": "hour", "remaining": 3, "reset_at": end},
        ]
    await ask(check_codec(limiter), message(cost=2))
    (answer,) = await ask(quota_codec(limiter), quota())
    assert (answer.allowed, answer.reason, "remaining" in quotas(answer)[0]) == (False, "over_limit", False)


async def test_quota_omits_shadow_limits_and_is_zero_in_cooldown() -> None:
    limiter = Limiter(
        "domain: edge\ndescriptors:\n"
        "  - key: user\n    penalty: {within: 24h, after: 1, multipliers: [50]}\n"
        "    limits: [{unit: hour, requests_per_unit: 1}, {unit: day, requests_per_unit: 99}]\n"
        "  - {key: path, shadow_mode: true, rate_limit: {unit: hour, requests_per_unit: 1}}\n"
    )
    await ask(check_codec(limiter), *[message()] * 2)
    (answer,) = await ask(quota_codec(limiter), quota(endpoint="/a"))
    assert [(one.window, one.remaining) for one in answer.limits] == [("hour", 0), ("day", 0)]
    assert {one.reset_at for one in answer.limits} == {NOW_S + 50 * (3600 - NOW_S % 3600)}


async def test_quota_fails_without_the_store() -> None:
    rules = RULES.replace("domain: edge", "domain: edge\non_store_failure: allow")
    limiter = Limiter(rules)
    limiter.store.is_away = True
    (check,) = await ask(check_codec(limiter), message())
    (failure,) = await ask(quota_codec(limiter), quota())
    assert non_default(check) == {"allowed": True}
    assert failure.code is StatusCode.UNAVAILABLE


async def test_quota_of_a_rejected_caller_has_a_reason() -> None:
    fixed = FixedEntitlements()
    fixed.change(SubjectEntitlement(block=Block("fraud")))
    (blocked,) = await ask(quota_codec(Limiter(OWN_LIMITS, entitlements=fixed)), quota())
    (invalid,) = await ask(quota_codec(Limiter(), verifier=Keys()), quota("rlk_forged", "API_KEY"))
    assert (non_default(blocked), non_default(invalid)) == ({"reason": "blocked"}, {"reason": "unauthorized"})


class Anybody:
    """Administration that admits everyone; also a fake servicer context."""

    def __init__(self, store: EmbeddedStore) -> None:
        self._store = store

    async def admit(self, asking: AdminCall) -> Actor:
        return Actor("ann", address=asking.address)

    async def reset(self, actor: Actor, request: Request, keys: Sequence[bytes]) -> int:
        return len(await self._store.forget(keys))

    def peer(self) -> str:
        return "unix:"

    def invocation_metadata(self) -> Any:
        return (("authorization", "bearer rla_x"),)


@pytest.mark.parametrize(
    ("metadata", "token"),
    [
        ((("authorization", "Bearer  rla_x "),), "rla_x"),
        ((("x", "y"), ("authorization", "bEARER rla_x")), "rla_x"),
        ((("authorization", "Bearer " + "x" * 513),), ""),
        ((("authorization", "Basic rla_x"),), ""),
        ((("authorization", b"Bearer rla_x"),), ""),
        ((), ""),
    ],
)
def test_admin_token_is_read_from_authorization(metadata: Any, token: str) -> None:
    assert _token(metadata) == token


@pytest.mark.parametrize(
    ("peer", "address"), [("192.0.2.7", "192.0.2.7"), ("::ffff:192.0.2.7", "192.0.2.7"), ("unix", "unix"), ("?", "")]
)
def test_admin_address_of_a_proxied_call_is_from_the_proxy(peer: str, address: str) -> None:
    assert _admin_call(Called((PEER_METADATA, peer))).address == address  # type: ignore[arg-type]
    assert _admin_call(Called(("x-rls-peer", peer))).address == "unix"  # type: ignore[arg-type]


class Called:
    """Fake servicer context of a call."""

    def __init__(self, *metadata: tuple[str, str]) -> None:
        self._metadata = (("authorization", "Bearer rla_x"), *metadata)

    def peer(self) -> str:
        return "unix:"

    def invocation_metadata(self) -> Any:
        return self._metadata

    async def abort(self, code: grpc.StatusCode, words: str) -> None:
        raise RuntimeError(f"{code.name}: {words}")


class Slow:
    """Administration that admits only when the test allows it."""

    def __init__(self, *, knows: bool) -> None:
        self.knows = knows
        self.may_go_on = asyncio.Event()
        self.failed: list[str] = []
        self.recorded: list[tuple[str, int]] = []

    async def admit(self, asking: AdminCall) -> Actor:
        await self.may_go_on.wait()
        if not self.knows:
            self.failed.append(asking.address)
            raise Unauthenticated("the token is not one of ours")
        return Actor("ann", address=asking.address)

    async def reset(self, actor: Actor, request: Request, keys: Sequence[bytes]) -> int:
        await asyncio.sleep(0)
        self.recorded.append((actor.address, len(keys)))
        return 0


@pytest.mark.parametrize("knows", [False, True])
async def test_cancelled_reset_is_completed_and_audited(knows: bool) -> None:
    limiter, slow = Limiter(), Slow(knows=knows)
    reset = ResetLimit(limiter, LimiterDecoder(clock=lambda: NOW_S), slow)
    request = ResetRequest(identifier="alice", dimension="USER", domain="edge").SerializeToString()
    called: Any = Called((PEER_METADATA, "192.0.2.7"))
    call = asyncio.create_task(reset._serve(request, called))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.wait([call])
    assert call.cancelled()
    slow.may_go_on.set()
    await asyncio.gather(*reset._calls, return_exceptions=True)
    assert (slow.failed, slow.recorded) == (([], [("192.0.2.7", 1)]) if knows else (["192.0.2.7"], []))
    assert not reset._calls


async def test_concurrent_resets_are_limited() -> None:
    limiter, slow = Limiter(), Slow(knows=True)
    reset = ResetLimit(limiter, LimiterDecoder(clock=lambda: NOW_S), slow)
    request = ResetRequest(identifier="alice", dimension="USER", domain="edge").SerializeToString()
    called: Any = Called()
    calls = [asyncio.create_task(reset._serve(request, called)) for _ in range(MAX_CONCURRENT_CALLS)]
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED: 64 administrator calls"):
        await reset._serve(request, called)
    slow.may_go_on.set()
    await asyncio.gather(*calls)
    await reset._serve(request, called)


async def test_counters_of_a_blocked_caller_can_be_reset() -> None:
    fixed = FixedEntitlements()
    limiter = Limiter(OWN_LIMITS, entitlements=fixed)
    await ask(check_codec(limiter), message())
    fixed.change(SubjectEntitlement(block=Block("fraud")))
    anybody = Anybody(limiter.store)
    reset = ResetLimit(limiter, LimiterDecoder(clock=lambda: NOW_S), anybody)
    request = ResetRequest(identifier="alice", dimension="USER", domain="edge").SerializeToString()
    answer = await reset._serve(request, anybody)  # type: ignore[arg-type]
    assert ResetResponse.FromString(answer).counters == 1
    assert limiter.store.size().keys == 0


def test_the_documented_rules_load_without_a_warning() -> None:
    page = (Path(__file__).parents[3] / "docs" / "client.md").read_text()
    (rules,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert compile_documents({"shop.yaml": rules.encode()}).warnings == ()


async def test_oversized_message_is_rejected_and_recorded_as_abuse() -> None:
    limiter = Limiter()
    fits, text, fields, large = await ask(
        check_codec(limiter, bounds=MessageBounds(entry_bytes=200)),
        message("a" * 200),
        message("a" * 201),
        message() + b"\x10\x01" * 200,
        bytes(65_537),
    )

    assert fits.allowed
    assert [one.reason for one in (text, fields)] == [Abuse.MESSAGE_TOO_COMPLEX] * 2
    assert (large.code, large.reason) == (StatusCode.RESOURCE_EXHAUSTED, Abuse.MESSAGE_TOO_LARGE)
    assert len(limiter.prepared) == 1
