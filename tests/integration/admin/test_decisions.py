"""Counters and decisions on demand, and the record of those that were made."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from sqlalchemy import insert

from ratelimit_rls.core.accounts import Block
from ratelimit_rls.records.desk import Actor
from ratelimit_rls.records.series import audit_logs
from ratelimit_rls.transport.http.admin.routes import decisions
from ratelimit_rls.transport.http.admin.simulation import simulate
from ratelimit_rls.transport.http.admin.told import Simulated
from ratelimit_rls.transport.http.admin.turns import MOST_WAITING
from tests.integration.admin.office import NOW_S, Client, Office
from tests.integration.admin.waited import longest_wait

pytestmark = pytest.mark.slow


def asked(key: str, value: str, **more: Any) -> dict[str, Any]:
    return {"domain": "edge", "descriptors": [{"entries": [{"key": key, "value": value}]}], **more}


async def test_check_counts_and_peek_does_not(any_admin: Client) -> None:
    for remaining in (4, 3):
        told = (await any_admin.post("/decisions/check", json=asked("user", "alice"))).json()
        (descriptor,) = told["descriptors"]
        assert (told["code"], descriptor["rule"], descriptor["limits"][0]["remaining"]) == (
            "ok",
            "edge.user",
            remaining,
        )
    for path in ("/counters/peek", "/decisions/check?dry_run=true"):
        looked = (await any_admin.post(path, json=asked("user", "alice"))).json()
        assert looked["descriptors"][0]["limits"] == [
            {
                "limit": {"requests_per_unit": 5, "unit": "minute"},
                "remaining": 3,
                "retry_after_s": 0,
                "reset_after_s": looked["descriptors"][0]["limits"][0]["reset_after_s"],
            }
        ]
    spent = (await any_admin.post("/decisions/check", json=asked("user", "alice", hits_addend=4))).json()
    assert spent["code"] == "over_limit"
    assert spent["descriptors"][0]["limits"][0]["retry_after_s"] > 0
    nothing = (await any_admin.post("/counters/peek", json=asked("nobody", "knows"))).json()
    assert (nothing["code"], nothing["descriptors"][0]["rule"]) == ("ok", None)


async def test_a_check_counts_once_under_one_key(any_admin: Client) -> None:
    for _ in range(3):
        once = await any_admin.post("/decisions/check", json=asked("user", "a"), headers={"Idempotency-Key": "k"})
        assert once.json()["descriptors"][0]["limits"][0]["remaining"] == 4
    other = await any_admin.post("/decisions/check", json=asked("user", "a"), headers={"Idempotency-Key": "l"})
    assert other.json()["descriptors"][0]["limits"][0]["remaining"] == 3


async def test_reset_forgets_and_is_on_the_record(any_office: Office, any_admin: Client) -> None:
    for _ in range(5):
        last = await any_admin.post("/decisions/check", json=asked("path", "/a"))
    assert last.json()["code"] == "over_limit"
    tried = (await any_admin.post("/counters/reset?dry_run=true", json=asked("path", "/a"))).json()
    assert (len(tried["counters"]), tried["looked_for"]) == (2, 2)
    lifted = (await any_admin.post("/counters/reset", json=asked("path", "/a", penalty_only=True))).json()
    assert [key.rpartition(":")[2] for key in lifted["counters"]] == ["penalty"]
    rest = (await any_admin.post("/counters/reset", json=asked("path", "/a"))).json()
    assert (len(rest["counters"]), rest["looked_for"]) == (1, 2)
    assert (await any_admin.post("/decisions/check", json=asked("path", "/a"))).json()["code"] == "ok"
    rows = (await any_admin.get("/audit", params={"kind": "counters"})).json()["items"]
    assert [(row["action"], row["subject"], row["after"]) for row in rows] == [
        ("reset", "edge", {"descriptors": ["path=/a"], "forgotten": forgotten}) for forgotten in (1, 1)
    ]
    reader = any_office.client(await any_office.token("read"))
    assert (await reader.post("/counters/reset", json=asked("path", "/a"))).status_code == 403


async def test_explain_tells_the_walk_and_whose_limits_hold(any_office: Office, any_admin: Client) -> None:
    await any_admin.put("/users/alice", json={"limits": [{"unit": "hour", "requests_per_unit": 9}]})
    await any_office.follow()
    (walk,) = (await any_admin.post("/decisions/explain", json=asked("user", "alice"))).json()["descriptors"]
    assert walk["rule"] == "edge.user"
    assert walk["conclusion"].startswith("rule edge.user")
    assert walk["standing"] == {"limits_of": "user", "source": "custom", "blocked": False, "block": None}
    assert walk["limits"] == [{"requests_per_unit": 9, "unit": "hour"}]
    assert walk["position"] == "rules.yaml:3:5"
    (counter,) = walk["counters"]
    assert "user=alice" in counter
    (level,) = walk["levels"]
    assert [attempt["outcome"] for attempt in level["attempts"]][-1] == "met"


async def test_a_blocked_user_is_told_as_such_and_can_be_reset(any_office: Office, any_admin: Client) -> None:
    await any_admin.post("/decisions/check", json=asked("user", "bob"))
    async with any_office.backend.desk.change(Actor("tests")) as change:
        await change.set_block("bob", Block("abuse"))
    await any_office.follow()
    told = (await any_admin.post("/decisions/check", json=asked("user", "bob"))).json()
    assert (told["code"], told["refused"]) == ("over_limit", {"reason": "blocked", "until": None})
    explained = (await any_admin.post("/decisions/explain", json=asked("user", "bob"))).json()
    (walk,) = explained["descriptors"]
    assert explained["refused"] == {"reason": "blocked", "until": None}
    assert walk["limits"] == [{"requests_per_unit": 5, "unit": "minute"}]
    assert walk["conclusion"].endswith("blocked: nothing passes")
    assert walk["standing"] == {
        "limits_of": "user",
        "source": "rule",
        "blocked": True,
        "block": {"reason": "abuse", "until": None},
    }
    assert len((await any_admin.post("/counters/reset", json=asked("user", "bob"))).json()["counters"]) == 1


async def test_of_a_blocked_caller_with_own_limits_these_are_told_and_reset(office: Office, admin: Client) -> None:
    own = [{"unit": "hour", "requests_per_unit": 9}]
    await admin.put("/users/bob", json={"limits": own})
    await office.follow()
    counted = (await admin.post("/decisions/check", json=asked("user", "bob"))).json()
    assert counted["descriptors"][0]["limits"][0]["remaining"] == 8
    await admin.put("/users/bob/block", json={"reason": "abuse", "duration": "1h"})
    await office.follow()
    (walk,) = (await admin.post("/decisions/explain", json=asked("user", "bob"))).json()["descriptors"]
    assert (walk["limits"], walk["standing"]["source"]) == (own, "custom")
    assert walk["standing"]["block"] == {"reason": "abuse", "until": "2027-01-15T09:00:00Z"}
    assert [key.rpartition(":")[2] for key in walk["counters"]] == ["3600"]
    forgotten = (await admin.post("/counters/reset", json=asked("user", "bob"))).json()
    assert forgotten == {"counters": walk["counters"], "looked_for": 1}


PROVED = """\
domain: edge
identity:
  entries: [{key: x-api-key, kind: api_key, becomes: [user]}]
  on_invalid: refuse
descriptors:
  - key: user
    limits_of: user
    rate_limit: {unit: minute, requests_per_unit: 5}
"""
FORGED = f"rlk_{'a' * 12}_{'s' * 43}"


async def test_a_credential_counts_for_whom_it_proves_and_goes_no_further(office: Office, admin: Client) -> None:
    office.load(PROVED)
    await admin.put("/users/alice", json={})
    key = await office.key("alice")
    answers = [await admin.post("/decisions/check", json=asked("x-api-key", key))]
    answers += [await admin.post("/decisions/check", json=asked("user", "alice"))]
    answers += [await admin.post("/counters/peek", json=asked("x-api-key", key))]
    for answer, remaining in zip(answers, (4, 3, 3), strict=True):
        (told,) = answer.json()["descriptors"]
        assert (told["rule"], told["limits"][0]["remaining"]) == ("edge.user", remaining)
        assert told["entries"] == [{"key": "user", "value": "alice"}]
    answers += [await admin.post("/decisions/explain", json=asked("x-api-key", key))]
    (walk,) = answers[-1].json()["descriptors"]
    assert (walk["rule"], walk["entries"]) == ("edge.user", [{"key": "user", "value": "alice"}])
    answers += [await admin.post("/counters/reset", json=asked("x-api-key", key))]
    assert answers[-1].json()["counters"] == walk["counters"] != []
    answers += [await admin.get("/audit", params={"kind": "counters"})]
    assert answers[-1].json()["items"][0]["after"] == {"descriptors": ["user=alice"], "forgotten": 1}
    assert not any(key in answer.text or key.split("_", 2)[2] in answer.text for answer in answers)


async def test_a_credential_that_is_nobody_s_is_refused_as_the_service_refuses_it(
    any_office: Office, any_admin: Client
) -> None:
    any_office.load(PROVED)
    told = (await any_admin.post("/decisions/check", json=asked("x-api-key", FORGED))).json()
    assert (told["code"], told["refused"]) == ("over_limit", {"reason": "unauthorized", "until": None})
    for path in ("/counters/peek", "/decisions/explain", "/counters/reset", "/counters/reset?dry_run=true"):
        refused = await any_admin.post(path, json=asked("x-api-key", FORGED))
        assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "descriptors[0]"), path
        assert "the credential is not valid" in refused.json()["detail"]
        assert FORGED not in refused.text
    assert (await any_admin.get("/audit")).json()["items"] == []
    any_office.load(PROVED.replace("on_invalid: refuse", "on_invalid: ip"))
    looked = (await any_admin.post("/counters/peek", json=asked("x-api-key", FORGED))).json()
    assert looked["descriptors"][0]["entries"] == [{"key": "ip", "value": "unknown"}]


async def test_whoever_proves_to_be_blocked_is_told_as_such(any_office: Office, any_admin: Client) -> None:
    """Also where no rule asks how they stand."""
    any_office.load(PROVED.replace("    limits_of: user\n", ""))
    await any_admin.put("/users/bob", json={})
    key = await any_office.key("bob")
    await any_admin.post("/decisions/check", json=asked("x-api-key", key))
    await any_admin.put("/users/bob/block", json={})
    await any_office.follow()
    for path in ("/decisions/check", "/counters/peek", "/decisions/explain"):
        told = (await any_admin.post(path, json=asked("x-api-key", key))).json()
        assert told["refused"] == {"reason": "blocked", "until": None}, path
    assert len((await any_admin.post("/counters/reset", json=asked("x-api-key", key))).json()["counters"]) == 1


async def test_simulate_reads_credentials_as_the_simulated_rules_do(any_office: Office, any_admin: Client) -> None:
    await any_admin.put("/users/alice", json={})
    key = await any_office.key("alice")
    at = {"at": "2030-01-01T00:00:00Z"}
    requests = [asked("x-api-key", key, **at)] * 5 + [asked("user", "alice", **at), asked("x-api-key", FORGED, **at)]
    for body in ({"requests": requests, "documents": [PROVED]}, {"requests": requests}):
        told = await any_admin.post("/decisions/simulate", json=body)
        if "documents" in body:
            assert told.json()["results"] == [*["ok"] * 5, "over_limit", "over_limit"]
            assert told.json()["per_rule"] == [{"rule": "edge.user", "calls": 6, "refused": 1}]
        else:  # the rules in force know of no credentials
            assert told.json()["per_rule"] == [{"rule": "edge.user", "calls": 1, "refused": 0}]
        assert key not in told.text


async def test_simulate_has_a_clock_of_its_own(any_admin: Client) -> None:
    def at(moment: str, value: str = "alice") -> dict[str, Any]:
        return {**asked("user", value), "at": f"2030-01-01T{moment}Z"}

    requests = [at("00:01:00"), *[at("00:00:01")] * 6, at("00:00:02", "bob")]
    told = (await any_admin.post("/decisions/simulate", json={"requests": requests})).json()
    assert told["results"] == ["ok", *["ok"] * 5, "over_limit", "ok"]
    assert (told["calls"], told["admitted"], told["refused"]) == (8, 7, 1)
    assert told["per_rule"] == [{"rule": "edge.user", "calls": 8, "refused": 1}]
    stricter = "domain: edge\ndescriptors: [{key: user, rate_limit: {unit: minute, requests_per_unit: 1}}]"
    tried = (await any_admin.post("/decisions/simulate", json={"requests": requests, "documents": [stricter]})).json()
    assert tried["refused"] == 5
    broken = await any_admin.post(
        "/decisions/simulate", json={"requests": requests, "documents": ["domain: [", stricter]}
    )
    assert (broken.status_code, broken.json()["errors"][0]["file"]) == (422, "documents[0]")
    too_many = await any_admin.post("/decisions/simulate", json={"requests": [at("00:00:00")] * 10_001})
    assert too_many.status_code in (413, 422)
    odd = await any_admin.post("/decisions/simulate", json={"requests": [at("00:00:00"), {**requests[0], "at": 1}, {}]})
    assert (odd.status_code, odd.json()["errors"][0]["field"]) == (422, "requests[1].at")
    untouched = (await any_admin.post("/counters/peek", json=asked("user", "alice"))).json()
    assert untouched["descriptors"][0]["limits"][0]["remaining"] == 5


def simulated(count: int) -> dict[str, Any]:
    """Sent as text, so that writing it is no part of what is measured."""
    requests = [{**asked("user", str(number % 100)), "at": "2030-01-01T00:00:00Z"} for number in range(count)]
    return {"content": json.dumps({"requests": requests}), "headers": {"Content-Type": "application/json"}}


async def test_a_simulation_holds_up_nobody(any_admin: Client) -> None:
    sent = simulated(8000)
    async with longest_wait() as held_up:
        told = await any_admin.post("/decisions/simulate", **sent)
    assert (told.json()["calls"], told.json()["refused"]) == (8000, 7500)
    assert held_up.longest_s < 0.15


async def test_simulations_take_turns_and_few_wait_for_theirs(
    any_admin: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_way = most_under_way = 0

    async def counting(*asked: Any) -> Simulated:
        nonlocal under_way, most_under_way
        under_way += 1
        most_under_way = max(most_under_way, under_way)
        told = await simulate(*asked)
        under_way -= 1
        return told

    monkeypatch.setattr(decisions, "simulate", counting)
    sent = simulated(500)
    told = await asyncio.gather(*[any_admin.post("/decisions/simulate", **sent) for _ in range(MOST_WAITING + 3)])
    assert sorted(answer.status_code for answer in told) == [*[200] * (MOST_WAITING + 1), 429, 429]
    assert {answer.headers.get("retry-after") for answer in told} == {None, "2"}
    assert most_under_way == 1
    assert (await any_admin.post("/decisions/simulate", **sent)).status_code == 200


async def test_recorded_decisions(office: Office, admin: Client) -> None:
    common = {"domain": "edge", "rule_id": "edge.user", "server_id": "here"}
    rows = [
        {**common, "timestamp": NOW_S - 60 + number, "log_id": number, "user_id": user, "decision": decision}
        for number, (user, decision) in enumerate([("alice", "allowed"), ("alice", "throttled"), ("bob", "blocked")])
    ]
    async with office.backend.database.begin() as connection:
        await connection.execute(insert(audit_logs), rows)
    newest = (await admin.get("/decisions")).json()["items"]
    assert [(one["user"], one["decision"]) for one in newest] == [
        ("bob", "blocked"),
        ("alice", "throttled"),
        ("alice", "allowed"),
    ]
    assert (newest[0]["at"], newest[0]["rule"], newest[0]["limit"]) == ("2027-01-15T07:59:02Z", "edge.user", None)
    page = await admin.get("/decisions", params={"user": "alice", "limit": 1})
    following = await admin.get(page.links["next"]["url"])
    assert [one["decision"] for one in following.json()["items"]] == ["allowed"]
    only = await admin.get("/decisions", params={"decision": "blocked", "since": "2027-01-15T07:59:00Z"})
    assert [one["user"] for one in only.json()["items"]] == ["bob"]
    wrong = await admin.get("/decisions", params={"since": "2028-01-01T00:00:00Z"})
    assert (wrong.status_code, wrong.json()["errors"][0]["field"]) == (422, "since")


async def test_usage(office: Office, admin: Client) -> None:
    nothing = (await admin.get("/usage", params={"by": "rule", "since": "2027-01-01T00:00:00Z"})).json()
    assert nothing == {"by": "rule", "since": "2027-01-01T00:00:00Z", "until": "2027-01-15T08:00:00Z", "items": []}
    series = (await admin.get("/usage/series", params={"granularity": "minute", "user": "alice"})).json()
    assert (series["granularity"], series["points"]) == ("minute", [])
    too_fine = await admin.get("/usage/series", params={"granularity": "minute", "since": "2001-01-01T00:00:00Z"})
    assert too_fine.status_code == 422


async def test_sources(any_admin: Client) -> None:
    (files,) = (await any_admin.get("/sources")).json()["sources"]
    assert (files["name"], files["version"], files["connected"]) == ("files", 1, None)
