"""The doors of RateLimiter on their own: whom a message names, what is counted for it, and what the answer says."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import Any

import pytest

from ratelimit_rls.core.accounts import Block
from ratelimit_rls.core.identity import CredentialKind, Identity
from ratelimit_rls.core.model import Answer, Entry, Limit, Request, Subject, Unit
from ratelimit_rls.core.plan import Policy
from ratelimit_rls.core.standing import Standing
from ratelimit_rls.errors import StoreError, StoreUnavailable
from ratelimit_rls.rules.compile import compile_documents
from ratelimit_rls.rules.snapshot import Rules
from ratelimit_rls.service import Call, RateLimiter
from ratelimit_rls.store.base import Prepared
from ratelimit_rls.store.embedded import EmbeddedStore
from ratelimit_rls.telemetry.metrics import Metrics
from ratelimit_rls.transport.grpc.door import Failure, FailureCode
from ratelimit_rls.transport.grpc.limiter_api import CheckRateLimitDoor, RemainingQuotaDoor, _key
from ratelimit_rls.transport.grpc.limiter_read import Asked, Reader
from ratelimit_rls.transport.grpc.limiter_reset import Administrator, Asking, Forget, ResetLimit, _address, _token
from ratelimit_rls.transport.grpc.messages import (
    LimiterCheckRequest,
    LimiterCheckResponse,
    QuotaRequest,
    QuotaResponse,
    ResetRequest,
    ResetResponse,
)
from ratelimit_rls.transport.grpc.waiting import WaitingRoom

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

    async def spend(self, batch: Sequence[Prepared]) -> list[Answer | StoreError]:
        return [StoreUnavailable("away")] * len(batch) if self.is_away else await super().spend(batch)


class Limiter(RateLimiter):
    """Notes what it is asked."""

    def __init__(self, rules: str = RULES, policy: Policy | None = None, **more: Any) -> None:
        self.snapshot, self.metrics, self.store = Rules(), Metrics(), Store()
        super().__init__(self.snapshot, self.store, self.metrics, policy or Policy(), **more)
        self.prepared: list[Request] = []
        if rules:
            self.load(rules)

    def load(self, rules: str) -> None:
        tree = compile_documents({"rules.yaml": rules.encode()}).tree
        self.snapshot.swap(tree, digest="", files=1, loaded_at=datetime.now(UTC))

    def prepare(self, request: Request) -> Call:
        self.prepared.append(request)
        return super().prepare(request)

    @property
    def descriptors(self) -> list[str]:
        """Of the last request."""
        return [",".join(f"{key}={value}" for key, value in one.entries) for one in self.prepared[-1].descriptors]


class Keys:
    """One key, of bob's."""

    def __init__(self) -> None:
        self.identity: Identity | None = Identity("bob", "gold", "", ID)
        self.block: Block | None = None

    def block_of(self, identity: Identity, now_s: float) -> Block | None:
        return self.block

    def identify(self, kind: CredentialKind, credential: str, now_s: float) -> Identity | None:
        assert kind is CredentialKind.API_KEY
        return self.identity if credential == KEY else None


def door(limiter: Limiter, **more: Any) -> CheckRateLimitDoor:
    return CheckRateLimitDoor(limiter, limiter.metrics, room=WaitingRoom(10, 0.003), clock=lambda: NOW_S, **more)


def message(identifier: str = "alice", dimension: str = "USER", domain: str = "edge", **more: Any) -> bytes:
    request = LimiterCheckRequest(identifier=identifier, dimension=dimension, domain=domain, **more)
    return bytes(request.SerializeToString())


async def ask(door: CheckRateLimitDoor | RemainingQuotaDoor, *messages: bytes) -> list[Any]:
    """Responses where there are some."""
    kind = QuotaResponse if isinstance(door, RemainingQuotaDoor) else LimiterCheckResponse
    answers = await door.ask(messages, [inf] * len(messages)).answers()
    return [kind.FromString(answer) if isinstance(answer, bytes) else answer for answer in answers]


def told(response: Any) -> dict[str, Any]:
    """What is not a default."""
    return {field.name: value for field, value in response.ListFields()}


async def test_an_answer_has_the_numbers_of_the_limit_it_speaks_of() -> None:
    first, *_, last = await ask(door(Limiter()), *[message()] * 4)
    end = NOW_S // 3600 * 3600 + 3600
    assert told(first) == {
        "allowed": True,
        "current_count": 1,
        "limit": 3,
        "remaining": 2,
        "reset_at": end,
        "rule": "edge.user",
    }
    assert told(last) == {
        "current_count": 4,  # `charge: always`, the reference's way: what is refused counts
        "limit": 3,
        "reset_at": end,
        "retry_after": end - NOW_S,
        "rule": "edge.user",
        "reason": "over_limit",
        "http_status": 429,
    }


@pytest.mark.parametrize(
    ("asked", "descriptors"),
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
async def test_a_caller_becomes_the_descriptors_that_the_rules_speak_of(asked: bytes, descriptors: list[str]) -> None:
    limiter = Limiter()
    (answer,) = await ask(door(limiter, verifier=Keys()), asked)
    assert answer.allowed
    assert limiter.descriptors == descriptors


async def test_addresses_of_one_network_are_one_caller_where_they_are_behind_envoy() -> None:
    mapping = "ext_authz: {ipv6_prefix: 64, descriptors: [{entries: [{key: ip, from: client_ip}]}]}"
    limiter = Limiter(f"{RULES}{mapping}")
    await ask(door(limiter), message("2001:db8:1:2:3:4:5:6", "IP"))
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
    ("asked", "descriptors"),
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
async def test_rules_may_speak_of_what_is_known_together(asked: bytes, descriptors: list[str]) -> None:
    limiter, keys = Limiter(NESTED), Keys()
    keys.identity = Identity("bob", "gold", "acme", ID)
    await ask(door(limiter, verifier=keys), asked)
    assert limiter.descriptors == descriptors


async def test_all_limits_of_a_call_are_one_step_and_the_one_that_refuses_is_told() -> None:
    limiter = Limiter()
    *_, last = await ask(door(limiter), *[message(str(n), endpoint="/search") for n in range(5)])
    assert (last.allowed, last.rule, last.http_status, last.limit) == (False, "edge.path_/search", 503, 4)


async def test_a_rule_that_exempts_is_named_and_where_there_is_none_nothing_is_said() -> None:
    exempt, free = await ask(door(Limiter()), message("staff"), message("x", "USER", "unheard-of"))
    assert told(exempt) == {"allowed": True, "rule": "edge.user_staff"}
    assert told(free) == {"allowed": True}


async def test_under_the_global_quota_mode_a_missing_rule_lets_nobody_past_the_others() -> None:
    *_, last = await ask(door(Limiter(policy=Policy(quota_mode=True))), *[message(endpoint="/no/rule")] * 4)
    assert not last.allowed


async def test_cost_is_one_unless_given_and_with_none_it_only_looks() -> None:
    limiter = Limiter()
    answers = await ask(door(limiter), *[message(cost=cost) for cost in (0, 2, 0)], message(), message(cost=0))
    assert [(answer.allowed, answer.remaining) for answer in answers] == [
        (True, 3),
        (True, 1),
        (True, 1),
        (True, 0),
        (False, 0),
    ]


async def test_what_was_worked_out_is_kept_until_the_rules_change_whatever_the_clock_says() -> None:
    limiter = Limiter()
    ours = door(limiter)
    await ask(ours, message(timestamp=NOW_S), message(timestamp=NOW_S + 1), message(timestamp=NOW_S + 2))
    assert len(limiter.prepared) == 1
    await ask(ours, message(timestamp=NOW_S, cost=2), message("al", endpoint="ice"), message("alice"))
    assert len(limiter.prepared) == 3
    limiter.load(RULES)
    await ask(ours, message())
    assert len(limiter.prepared) == 4


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Asked("edge", (Entry("user", "a"),), "b"), Asked("edge", (Entry("user", "ab"),))),
        (Asked("edge", (Entry("user", "a"),), path="b"), Asked("edge", (Entry("user", "a"),), tier="b")),
        (Asked("edge", (Entry("user", "a"),)), Asked("edge", (Entry("ip", "a"),))),
        (Asked("edg", (Entry("user", "a"),), "e"), Asked("edge", (Entry("user", "a"),))),
        (Asked("edge", (Entry("a", "1:b"),)), Asked("edge", (Entry("a", "b"), Entry("a", "b")))),
    ],
)
def test_what_is_kept_for_one_is_never_another_s(one: Asked, other: Asked) -> None:
    assert _key(one, 1) != _key(other, 1)
    assert _key(one, 1) != _key(one, 11)
    assert _key(one, 1) == _key(Asked(*one), 1)


async def test_a_default_domain_is_for_those_who_name_none() -> None:
    ours = door(Limiter(), default_domain="edge")
    default, named = await ask(ours, message(domain=""), message(domain="unheard-of"))
    assert (default.rule, named.rule) == ("edge.user", "")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (message(domain=""), "RLS_LIMITER_DOMAIN"),
        (message(""), "no identifier"),
        (message(dimension="DIMENSION_UNSPECIFIED"), "USER, an IP or an API_KEY"),
        (bytes(LimiterCheckRequest(identifier="a", dimension=77, domain="edge").SerializeToString()), "no dimension"),
        (message("localhost", "IP"), "192.0.2.1"),
        (message("1" * 5000, "IP"), "not an address"),
        (message(KEY, "USER"), "API_KEY"),
        (message("rla_x", "IP"), "API_KEY"),
        (message(KEY, "API_KEY"), "RLS_DATABASE_URL"),
        (b"\xff\xff", "ratelimit_rls.v1.CheckRequest"),
        (b"\x0a\x01\xff", "UTF-8"),
    ],
)
async def test_what_has_no_meaning_is_a_sentence_that_repeats_nothing(asked: bytes, words: str) -> None:
    limiter = Limiter()
    (failure,) = await ask(door(limiter), asked)
    assert isinstance(failure, Failure)
    assert failure.code is FailureCode.INVALID_ARGUMENT
    assert words in failure.message
    assert KEY not in failure.message
    assert limiter.prepared == []


async def test_without_rules_nothing_is_decided() -> None:
    (failure,) = await ask(door(Limiter(rules="")), message())
    assert failure.code is FailureCode.UNAVAILABLE


@pytest.mark.parametrize(
    "asked",
    [
        message(KEY, "API_KEY"),
        message("rlk_short", "API_KEY"),
        message("rla_", "API_KEY"),
        message("some-id", "API_KEY"),
        message(f" {KEY}", "API_KEY"),
        message(f"Bearer {KEY}", "API_KEY"),
    ],
)
async def test_a_key_that_is_nobody_s_is_refused_and_counts_nothing(asked: bytes) -> None:
    limiter, keys = Limiter(), Keys()
    keys.identity = None
    (answer,) = await ask(door(limiter, verifier=keys), asked)
    assert told(answer) == {"reason": "unauthorized", "http_status": 401}
    assert limiter.prepared == []


async def test_where_the_rules_know_such_callers_by_their_address_all_of_them_are_one() -> None:
    limiter = Limiter(f"{RULES}identity: {{credentials: [{{kind: api_key, header: x-api-key}}], on_invalid: ip}}")
    answers = await ask(door(limiter, verifier=Keys()), *[message(f"rlk_{n}", "API_KEY") for n in range(3)])
    assert [answer.allowed for answer in answers] == [True, True, False]
    assert limiter.descriptors == ["ip=unknown"]


async def test_without_keys_an_application_s_own_ids_are_taken_as_they_are() -> None:
    limiter = Limiter()
    (answer,) = await ask(door(limiter), message("some-id", "API_KEY"))
    assert (answer.allowed, limiter.descriptors) == (True, ["api_key=some-id"])


@pytest.mark.parametrize("identifier", [f" {KEY}", f"Bearer {KEY}", KEY])
async def test_a_key_is_nobody_s_name(identifier: str) -> None:
    limiter = Limiter()
    (failure,) = await ask(door(limiter, verifier=Keys()), message(identifier))
    assert failure.code is FailureCode.INVALID_ARGUMENT
    assert limiter.prepared == []


async def test_a_key_of_somebody_blocked_is_refused_whatever_the_rules_say_of_them() -> None:
    limiter, keys = Limiter(), Keys()
    keys.block = Block("spam")
    ours = door(limiter, verifier=keys)
    (blocked,) = await ask(ours, message(KEY, "API_KEY"))
    keys.block = None
    (passed,) = await ask(ours, message(KEY, "API_KEY"))
    assert told(blocked) == {"reason": "blocked", "http_status": 403}
    assert passed.allowed


async def test_a_key_stops_counting_the_moment_it_is_revoked() -> None:
    keys = Keys()
    ours = door(Limiter(), verifier=keys)
    (before,) = await ask(ours, message(KEY, "API_KEY"))
    keys.identity = None
    (after,) = await ask(ours, message(KEY, "API_KEY"))
    assert (before.allowed, after.allowed) == (True, False)


async def test_a_raw_key_is_neither_in_an_entry_nor_in_what_is_remembered() -> None:
    limiter = Limiter()
    ours = door(limiter, verifier=Keys())
    await ask(ours, message(KEY, "API_KEY", endpoint=f"/search?key={KEY}"))
    assert KEY not in repr(limiter.prepared)
    assert KEY not in repr(vars(ours._cache))


class Standings:
    """Of everybody; changed at will."""

    def __init__(self) -> None:
        self.standing = Standing()

    def of(self, kind: Subject, subject: str, tier: str) -> Standing:
        return self.standing

    def change(self, standing: Standing) -> None:
        self.standing.stale = True
        self.standing = standing


OWN_LIMITS = "domain: edge\ndescriptors: [{key: user, limits_of: user, rate_limit: {unit: hour, requests_per_unit: 3}}]"


async def test_a_caller_s_own_limits_and_blocks_hold_at_once() -> None:
    standings = Standings()
    ours = door(Limiter(OWN_LIMITS, standings=standings))
    (rule_s,) = await ask(ours, message())
    standings.change(Standing((Limit(7, Unit.HOUR),), "override", until_s=NOW_S + 60))
    (own,) = await ask(ours, message())
    standings.change(Standing(block=Block("fraud", NOW_S + 90.5), until_s=NOW_S + 90.5))
    (blocked,) = await ask(ours, message())
    standings.change(Standing(block=Block("fraud")))
    (for_good,) = await ask(ours, message())
    assert [(answer.limit, answer.remaining) for answer in (rule_s, own)] == [(3, 2), (7, 5)]
    assert told(blocked) == {
        "reset_at": NOW_S + 91,
        "retry_after": 91,
        "rule": "edge.user",
        "reason": "blocked",
        "http_status": 403,
    }
    assert told(for_good) == {"rule": "edge.user", "reason": "blocked", "http_status": 403}


async def test_a_clock_that_is_far_off_is_counted_warned_of_once_and_changes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ours = door(Limiter())
    moments = (0, NOW_S - 300, NOW_S + 300, NOW_S + 301, NOW_S - 301, -(2**63), 2**63 - 1)
    with caplog.at_level(logging.WARNING):
        answers = await ask(ours, *[message(str(at), timestamp=at) for at in moments])
    assert all(answer.remaining == 2 for answer in answers)
    assert dict(ours.gauges()) == {"ratelimit.limiter.clock_skew_total": 4}
    assert len(caplog.records) == 1


async def test_a_refusal_s_jitter_is_added_to_its_wait() -> None:
    rules = (
        "domain: edge\nanswer: {retry_jitter: 1000s}\n"
        "descriptors: [{key: user, rate_limit: {unit: hour, requests_per_unit: 0}}]"
    )
    waits = {answer.retry_after for answer in await ask(door(Limiter(rules)), *[message()] * 50)}
    shortest = 3600 - NOW_S % 3600
    assert len(waits) > 10
    assert min(waits) >= shortest
    assert max(waits) <= shortest + 1000


def quotas(answer: Any) -> list[Mapping[str, Any]]:
    return [told(quota) for quota in answer.limits]


def quota(identifier: str = "alice", dimension: str = "USER", **more: Any) -> bytes:
    request = QuotaRequest(identifier=identifier, dimension=dimension, domain="edge", **more)
    return bytes(request.SerializeToString())


def quota_door(limiter: Limiter, **more: Any) -> RemainingQuotaDoor:
    return RemainingQuotaDoor(limiter, limiter.metrics, room=WaitingRoom(10, 0.003), clock=lambda: NOW_S, **more)


async def test_every_limit_that_applies_is_told_and_none_is_charged() -> None:
    limiter = Limiter()
    end = NOW_S // 3600 * 3600 + 3600
    await ask(door(limiter), message(), message("bob"), message(endpoint="/search"))
    for _ in range(2):
        (answer,) = await ask(quota_door(limiter), quota(endpoint="/search"))
        assert answer.allowed
        assert quotas(answer) == [
            {"rule": "edge.user", "limit": 3, "window": "hour", "remaining": 1, "reset_at": end},
            {"rule": "edge.path_/search", "limit": 4, "window": "hour", "remaining": 3, "reset_at": end},
        ]
    await ask(door(limiter), message(cost=2))
    (answer,) = await ask(quota_door(limiter), quota())
    assert (answer.allowed, answer.reason, "remaining" in quotas(answer)[0]) == (False, "over_limit", False)


async def test_limits_on_trial_are_no_quota_and_a_cooldown_leaves_nothing_of_any() -> None:
    limiter = Limiter(
        "domain: edge\ndescriptors:\n"
        "  - key: user\n    penalty: {within: 24h, after: 1, multipliers: [50]}\n"
        "    limits: [{unit: hour, requests_per_unit: 1}, {unit: day, requests_per_unit: 99}]\n"
        "  - {key: path, shadow_mode: true, rate_limit: {unit: hour, requests_per_unit: 1}}\n"
    )
    await ask(door(limiter), *[message()] * 2)
    (answer,) = await ask(quota_door(limiter), quota(endpoint="/a"))
    assert [(one.window, one.remaining) for one in answer.limits] == [("hour", 0), ("day", 0)]
    assert {one.reset_at for one in answer.limits} == {NOW_S + 50 * (3600 - NOW_S % 3600)}


async def test_a_quota_is_not_invented_when_the_store_is_away() -> None:
    rules = RULES.replace("domain: edge", "domain: edge\non_store_failure: allow")
    limiter = Limiter(rules)
    limiter.store.is_away = True
    (check,) = await ask(door(limiter), message())
    (failure,) = await ask(quota_door(limiter), quota())
    assert told(check) == {"allowed": True}
    assert failure.code is FailureCode.UNAVAILABLE


async def test_quotas_of_those_who_may_not_call_say_why() -> None:
    standings = Standings()
    standings.change(Standing(block=Block("fraud")))
    (blocked,) = await ask(quota_door(Limiter(OWN_LIMITS, standings=standings)), quota())
    (nobody,) = await ask(quota_door(Limiter(), verifier=Keys()), quota("rlk_forged", "API_KEY"))
    assert (told(blocked), told(nobody)) == ({"reason": "blocked"}, {"reason": "unauthorized"})


class Anybody:
    """May reset everything, and is asked by nobody in particular."""

    async def admit(self, asking: Asking) -> Administrator:
        return Administrator("ann")

    async def reset(self, who: Administrator, asking: Asking, request: Request, forget: Forget) -> int:
        return await forget()

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
def test_a_token_stands_where_it_does_over_http(metadata: Any, token: str) -> None:
    assert _token(metadata) == token


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:192.0.2.1:1234", "192.0.2.1"),
        ("ipv6:[2001:db8::1]:1234", "2001:db8::1"),
        ("ipv6:%5B2001:db8::1%5D:1234", "2001:db8::1"),
        ("ipv6:%5B::ffff:192.0.2.1%5D:1234", "192.0.2.1"),
        ("unix:/run/grpc.sock", ""),
        ("unix:192.0.2.1", ""),
        ("ipv4:nonsense", ""),
        ("", ""),
    ],
)
def test_an_administrator_s_address_is_that_of_its_connection(peer: str, address: str) -> None:
    assert _address(peer) == address


async def test_what_a_blocked_caller_has_used_can_be_forgotten() -> None:
    standings = Standings()
    limiter = Limiter(OWN_LIMITS, standings=standings)
    await ask(door(limiter), message())
    standings.change(Standing(block=Block("fraud")))
    reset = ResetLimit(limiter, limiter.store, Reader(clock=lambda: NOW_S), Anybody())
    asked = ResetRequest(identifier="alice", dimension="USER", domain="edge").SerializeToString()
    answer = await reset._reset(asked, Anybody())  # type: ignore[arg-type]
    assert ResetResponse.FromString(answer).counters == 1
    assert limiter.store.size().keys == 0


def test_the_documented_rules_load_without_a_warning() -> None:
    page = (Path(__file__).parents[3] / "docs" / "client.md").read_text()
    (rules,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert compile_documents({"shop.yaml": rules.encode()}).warnings == ()
