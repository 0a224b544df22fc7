"""Callers at the doors: whose limits hold, who is turned away, and that no plan outlives what it was made from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from math import inf
from typing import Any

import pytest

from ratelimit_rls.core.accounts import Block
from ratelimit_rls.core.identity import CredentialKind, Identity
from ratelimit_rls.core.model import Limit, Subject, Unit
from ratelimit_rls.core.plan import Policy
from ratelimit_rls.core.standing import Standing
from ratelimit_rls.rules.compile import compile_documents
from ratelimit_rls.rules.snapshot import Rules
from ratelimit_rls.service import RateLimiter
from ratelimit_rls.store.embedded import EmbeddedStore
from ratelimit_rls.telemetry.metrics import Metrics
from ratelimit_rls.transport.grpc import ext_authz, limiter_door, rls
from ratelimit_rls.transport.grpc.authz_encode import CALLER_HEADERS
from ratelimit_rls.transport.grpc.ext_authz import ExtAuthzDoor
from ratelimit_rls.transport.grpc.messages import CheckRequest, CheckResponse, RateLimitRequest, RateLimitResponse
from ratelimit_rls.transport.grpc.rls import RlsDoor
from ratelimit_rls.transport.grpc.waiting import WaitingRoom

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


class Standings:
    """As the directory keeps them, by hand."""

    def __init__(self) -> None:
        self.known: dict[tuple[Subject, str], Standing] = {}
        self.asked: list[tuple[Subject, str, str]] = []

    def of(self, kind: Subject, subject: str, tier: str) -> Standing:
        self.asked.append((kind, subject, tier))
        nobody = Standing(GOLD, "tier gold") if tier == "gold" else Standing()
        return self.known.setdefault((kind, subject), nobody) if not tier else self.known.get((kind, subject), nobody)

    def put(self, user: str, standing: Standing) -> None:
        before = self.known.get((Subject.USER, user))
        if before is not None:
            before.stale = True
        self.known[Subject.USER, user] = standing


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


class House:
    """Both doors on one limiter."""

    def __init__(self, terms: str = "", rules_text: str = "", policy: Policy = Policy()) -> None:  # noqa: B008
        self.standings, self.metrics, rules = Standings(), Metrics(), Rules()
        self.limiter = RateLimiter(rules, EmbeddedStore(), self.metrics, policy, standings=self.standings)
        tree = compile_documents({"api.yaml": (rules_text or RULES % terms).encode()}).tree
        rules.swap(tree, digest="", files=1, loaded_at=datetime.now(UTC))
        room = WaitingRoom(10, 0.003)
        self.verifier = Verifier()
        self.rls = RlsDoor(self.limiter, self.metrics, room=room, verifier=self.verifier)
        self.authz = ExtAuthzDoor(self.limiter, self.metrics, room=room, verifier=self.verifier)

    async def should(self, *descriptors: Mapping[str, str], hits: int = 0) -> Any:
        request = RateLimitRequest(domain="api", hits_addend=hits)
        for entries in descriptors:
            descriptor = request.descriptors.add()
            for key, value in entries.items():
                descriptor.entries.add(key=key, value=value)
        (answer,) = await self.rls.ask([bytes(request.SerializeToString())], [inf]).answers()
        assert isinstance(answer, bytes), answer
        return RateLimitResponse.FromString(answer)

    async def check(self, headers: Mapping[str, str] | None = None, path: str = "/") -> Any:
        request = CheckRequest()
        http = request.attributes.request.http
        http.method, http.path = "GET", path
        http.headers.update(headers or {})
        request.attributes.source.address.socket_address.address = "192.0.2.9"
        (answer,) = await self.authz.ask([bytes(request.SerializeToString())], [inf]).answers()
        assert isinstance(answer, bytes), answer
        return CheckResponse.FromString(answer)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1_000.0]
    for module in (ext_authz, limiter_door, rls):
        monkeypatch.setattr(module, "time", lambda: now[0])
    return now


def limit(response: Any, number: int = 0) -> int:
    return int(response.statuses[number].current_limit.requests_per_unit)


async def test_who_has_no_limits_has_those_of_the_rule(clock: list[float]) -> None:
    house = House()
    codes = [(await house.should({"user": "alice"})).overall_code for _ in range(3)]
    assert codes == [1, 1, 2]


async def test_limits_change_without_a_rule_edit_and_without_forgetting_what_was_counted(clock: list[float]) -> None:
    house = House()
    for _ in range(3):
        answer = await house.should({"user": "alice"})
    assert (answer.overall_code, limit(answer)) == (2, 2)
    house.standings.put("alice", Standing(GOLD, "tier gold"))
    answer = await house.should({"user": "alice"})
    assert (answer.overall_code, limit(answer), answer.statuses[0].limit_remaining) == (1, 5, 2)


async def test_a_plan_ends_with_the_override_it_was_made_from(clock: list[float]) -> None:
    house = House()
    house.standings.put("alice", Standing((Limit(100, Unit.HOUR),), "override", until_s=1_060.0))
    assert limit(await house.should({"user": "alice"})) == 100
    house.standings.known[Subject.USER, "alice"] = Standing(GOLD, "tier gold")  # nobody says that the other is stale
    clock[0] = 1_059.9
    assert limit(await house.should({"user": "alice"})) == 100
    clock[0] = 1_060.0
    assert limit(await house.should({"user": "alice"})) == 5


async def test_a_plan_that_holds_is_not_made_again(clock: list[float]) -> None:
    house = House()
    for _ in range(3):
        await house.should({"user": "alice"})
        await house.check({"x-api-key": "rlk_alice"})
    assert len(house.standings.asked) == 2  # one for each door


async def test_a_tier_in_the_descriptor_chooses_limits_but_no_counter(clock: list[float]) -> None:
    house = House()
    await house.should({"user": "carol"})
    house.standings.known.clear()
    answer = await house.should({"tier": "gold", "user": "carol"})
    assert (limit(answer), answer.statuses[0].limit_remaining) == (5, 3)
    assert house.standings.asked[-1] == (Subject.USER, "carol", "gold")


async def test_a_blocked_caller_is_refused_by_every_door_and_charged_nowhere(clock: list[float]) -> None:
    house = House()
    before = (await house.should({"ip": "192.0.2.1"}, hits=1)).statuses[0].limit_remaining
    house.standings.put("alice", Standing(block=Block("spam", 1_090.0), until_s=1_090.0))
    answer = await house.should({"ip": "192.0.2.2"}, {"user": "alice"})
    assert (answer.overall_code, [status.code for status in answer.statuses]) == (2, [1, 2])
    assert (await house.should({"ip": "192.0.2.2"})).statuses[0].limit_remaining == before
    assert answer.dynamic_metadata["rule"]["refused"] == "blocked"
    refused = await house.check({"x-api-key": "rlk_alice"})
    assert refused.denied_response.status.code == 403
    assert "spam" not in refused.denied_response.body
    clock[0] = 1_090.0
    house.standings.known[Subject.USER, "alice"] = Standing()
    assert (await house.should({"user": "alice"})).overall_code == 1


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


async def test_who_proves_to_be_somebody_blocked_is_refused_though_no_rule_asks_whose_limits_hold() -> None:
    house = House(rules_text=SHARED_LIMITS)
    house.verifier.blocks["alice"] = Block("spam")
    assert (await house.check({"x-api-key": "rlk_alice"})).denied_response.status.code == 403
    refused = await house.should({"plan": "all"}, {"x-api-key": "rlk_alice"})
    assert (refused.overall_code, [status.code for status in refused.statuses]) == (2, [1, 2])
    house.verifier.blocks.clear()
    assert (await house.check({"x-api-key": "rlk_alice"})).HasField("ok_response")
    passed = await house.should({"plan": "all"}, {"x-api-key": "rlk_alice"})
    assert (passed.overall_code, passed.statuses[1].limit_remaining) == (1, 1), "what was refused was not counted"


async def test_what_somebody_blocked_is_given_back_is_taken() -> None:
    house = House(rules_text=SHARED_LIMITS)
    house.verifier.blocks["alice"] = Block()
    request = RateLimitRequest(domain="api")
    descriptor = request.descriptors.add(is_negative_hits=True)
    descriptor.entries.add(key="x-api-key", value="rlk_alice")
    (answer,) = await house.rls.ask([bytes(request.SerializeToString())], [inf]).answers()
    assert isinstance(answer, bytes)
    assert RateLimitResponse.FromString(answer).overall_code == 1


@pytest.mark.parametrize("sent", [{"x-api-key": "rlk_mallory"}, {"x-api-key": "rlk_alice"}, {}])
async def test_under_shadow_mode_a_refusal_passes_and_nothing_forged_with_it(sent: dict[str, str]) -> None:
    terms = "  on_invalid: refuse\n  on_missing: refuse\n  hide_credentials: true"
    house = House(terms, policy=Policy(shadow_mode=True))
    house.verifier.blocks["alice"] = Block()
    answer = (await house.check(sent | dict.fromkeys(CALLER_HEADERS, "forged"))).ok_response
    told, removed = headers(answer.headers), {*answer.headers_to_remove}
    assert {"x-api-key", "authorization"} <= removed
    assert {*CALLER_HEADERS} <= {*told} | removed
    assert "forged" not in told.values()


async def test_who_must_prove_who_they_are_must_do_so_where_no_descriptor_is_made_of_it() -> None:
    rules = "domain: api\nidentity: {credentials: [{kind: api_key, header: x-api-key}], on_missing: refuse}\n"
    house = House(rules_text=rules)
    assert (await house.check()).denied_response.status.code == 401
    answer = (await house.check({"x-api-key": "rlk_alice", "x-ratelimit-user": "forged"})).ok_response
    assert headers(answer.headers)["x-ratelimit-user"] == "alice"


async def test_a_domain_may_say_429_to_blocked_callers(clock: list[float]) -> None:
    house = House("  blocked_status: 429")
    house.standings.put("alice", Standing(block=Block()))
    refused = await house.check({"x-api-key": "rlk_alice", "content-type": "application/grpc"})
    assert (refused.status.code, refused.denied_response.status.code) == (8, 429)
    assert {"grpc-status": "8"}.items() <= headers(refused.denied_response.headers).items()


async def test_what_has_happened_and_what_is_given_back_is_counted_whoever_it_is(clock: list[float]) -> None:
    house = House()
    house.standings.put("alice", Standing(block=Block()))
    request = RateLimitRequest(domain="api")
    descriptor = request.descriptors.add(is_negative_hits=True)
    descriptor.entries.add(key="user", value="alice")
    (answer,) = await house.rls.ask([bytes(request.SerializeToString())], [inf]).answers()
    assert isinstance(answer, bytes)
    assert RateLimitResponse.FromString(answer).overall_code == 1


@pytest.mark.parametrize(
    ("sent", "path"),
    [({"x-api-key": "rlk_alice"}, "/"), ({}, "/?a=1&key=rlk_alice"), ({"authorization": "Bearer jwt-bob"}, "/")],
)
async def test_a_credential_becomes_a_caller(clock: list[float], sent: dict[str, str], path: str) -> None:
    house = House()
    user = "bob" if "authorization" in sent else "alice"
    answer = await house.check(sent, path)
    assert headers(answer.ok_response.headers)["x-ratelimit-user"] == user
    assert house.standings.asked == [(Subject.USER, user, "")]


async def test_nobody_can_forge_who_they_are_to_the_upstream(clock: list[float]) -> None:
    house = House()
    answer = await house.check(dict.fromkeys(CALLER_HEADERS, "forged"))
    told = headers(answer.ok_response.headers)
    assert {name: told.get(name) for name in CALLER_HEADERS if name in told} == {"x-ratelimit-ip": "192.0.2.9"}
    assert {*CALLER_HEADERS} - {"x-ratelimit-ip"} <= {*answer.ok_response.headers_to_remove}
    assert house.standings.asked == []


async def test_an_invalid_credential_is_an_address_or_a_401(clock: list[float]) -> None:
    house = House()
    assert (await house.check({"x-api-key": "rlk_mallory"})).HasField("ok_response")
    assert (await house.check({"x-api-key": "rlk_other"})).denied_response.status.code == 429  # one address, one count
    strict = House("  on_invalid: refuse")
    refused = await strict.check({"x-api-key": "rlk_mallory", "x-request-id": "r-1"})
    assert (refused.status.code, refused.denied_response.status.code) == (16, 401)
    assert headers(refused.denied_response.headers)["www-authenticate"] == "Bearer"
    assert json.loads(refused.denied_response.body)["error"]["code"] == 401
    assert "mallory" not in str(refused)
    assert (await strict.check()).HasField("ok_response"), "none at all is another matter"
    assert (await House("  on_missing: refuse").check()).denied_response.status.code == 401


async def test_credentials_can_be_kept_from_the_upstream(clock: list[float]) -> None:
    answer = await House("  hide_credentials: true").check({"x-api-key": "rlk_alice"})
    assert {"x-api-key", "authorization"} <= {*answer.ok_response.headers_to_remove}


async def test_over_rls_an_entry_that_carries_a_credential_becomes_who_it_is(clock: list[float]) -> None:
    house = House()
    answer = await house.should({"x-api-key": "rlk_alice"})
    assert (answer.overall_code, limit(answer)) == (1, 5)
    assert house.standings.asked == [(Subject.USER, "alice", "gold")]
    await house.should({"x-api-key": "rlk_alice"})
    assert (await house.should({"tier": "gold", "user": "alice"})).statuses[0].limit_remaining == 2
    assert len(house.standings.asked) == 2, "the plan was kept, by what the request says without its credential"


async def test_over_rls_an_invalid_credential_is_an_address_too(clock: list[float]) -> None:
    house = House()
    for address, code in [("192.0.2.1", 1), ("192.0.2.1", 2), ("192.0.2.2", 1)]:
        answer = await house.should({"token": "jwt-mallory"}, {"remote_address": address})
        assert answer.overall_code == code
    assert (await house.should({"token": "x"})).overall_code == 1
    assert (await house.should({"token": "y"})).overall_code == 2, "those without an address are one caller"
    refused = await House("  on_invalid: refuse").should({"other": "x"}, {"token": "jwt-mallory"})
    assert (refused.overall_code, [status.code for status in refused.statuses]) == (2, [1, 2])


async def test_no_credential_is_kept(clock: list[float]) -> None:
    house = House()
    await house.should({"x-api-key": "rlk_alice"})
    await house.check({"x-api-key": "rlk_alice"})
    caches = [house.rls.cache, house.rls._proved, house.authz.cache]
    assert [len(cache) for cache in caches] == [0, 1, 1]
    assert not any(b"rlk_" in key for cache in caches for key in cache._known)


async def test_those_who_are_turned_away_are_counted_apart(clock: list[float]) -> None:
    house = House("  on_invalid: refuse")
    house.standings.put("alice", Standing(block=Block()))
    await house.check({"x-api-key": "rlk_alice"})
    await house.check({"x-api-key": "rlk_mallory"})
    outcomes = {outcome: passed.count for (_, _, outcome), passed in house.metrics.passes.items()}
    assert outcomes["unauthorized"] == 1
    assert outcomes["blocked"] >= 1


def headers(options: Any) -> dict[str, str]:
    return {option.header.key: option.header.value for option in options}
