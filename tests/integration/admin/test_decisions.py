"""Counters, decisions on demand, and recorded decisions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from sqlalchemy import insert

from ratelimit_rls.admin.http.routes import decisions
from ratelimit_rls.admin.simulation import MAX_WAITING, SimulatedDecisions, simulate
from ratelimit_rls.core.entitlements import Block
from ratelimit_rls.database.repository import Actor
from ratelimit_rls.database.usage.tables import audit_logs
from ratelimit_rls.errors import StoreUnavailable
from tests.integration.admin.admin_client import NOW_S, AdminApi, Client, LosesCommits
from tests.integration.admin.eventually import longest_wait

pytestmark = pytest.mark.slow


def descriptors_body(key: str, value: str, **more: Any) -> dict[str, Any]:
    return {"domain": "edge", "descriptors": [{"entries": [{"key": key, "value": value}]}], **more}


async def test_check_counts_and_peek_does_not(sqlite_admin: Client) -> None:
    for remaining in (4, 3):
        result = (await sqlite_admin.post("/decisions/check", json=descriptors_body("user", "alice"))).json()
        (descriptor,) = result["descriptors"]
        assert (result["code"], descriptor["rule"], descriptor["limits"][0]["remaining"]) == (
            "ok",
            "edge.user",
            remaining,
        )
    for path in ("/counters/peek", "/decisions/check?dry_run=true"):
        looked = (await sqlite_admin.post(path, json=descriptors_body("user", "alice"))).json()
        assert looked["descriptors"][0]["limits"] == [
            {
                "limit": {"requests_per_unit": 5, "unit": "minute"},
                "remaining": 3,
                "retry_after_s": 0,
                "reset_after_s": looked["descriptors"][0]["limits"][0]["reset_after_s"],
            }
        ]
    spent = (await sqlite_admin.post("/decisions/check", json=descriptors_body("user", "alice", hits_addend=4))).json()
    assert spent["code"] == "over_limit"
    assert spent["descriptors"][0]["limits"][0]["retry_after_s"] > 0
    nothing = (await sqlite_admin.post("/counters/peek", json=descriptors_body("nobody", "knows"))).json()
    assert (nothing["code"], nothing["descriptors"][0]["rule"]) == ("ok", None)


async def test_check_with_an_idempotency_key_counts_once(sqlite_admin: Client) -> None:
    for _ in range(3):
        once = await sqlite_admin.post(
            "/decisions/check", json=descriptors_body("user", "a"), headers={"Idempotency-Key": "k"}
        )
        assert once.json()["descriptors"][0]["limits"][0]["remaining"] == 4
    other = await sqlite_admin.post(
        "/decisions/check", json=descriptors_body("user", "a"), headers={"Idempotency-Key": "l"}
    )
    assert other.json()["descriptors"][0]["limits"][0]["remaining"] == 3


async def test_reset_clears_counters_and_is_audited(sqlite_api: AdminApi, sqlite_admin: Client) -> None:
    for _ in range(5):
        last = await sqlite_admin.post("/decisions/check", json=descriptors_body("path", "/a"))
    assert last.json()["code"] == "over_limit"
    tried = (await sqlite_admin.post("/counters/reset?dry_run=true", json=descriptors_body("path", "/a"))).json()
    assert (len(tried["counters"]), tried["total"]) == (2, 2)
    lifted = (await sqlite_admin.post("/counters/reset", json=descriptors_body("path", "/a", penalty_only=True))).json()
    assert [key.rpartition(":")[2] for key in lifted["counters"]] == ["penalty"]
    rest = (await sqlite_admin.post("/counters/reset", json=descriptors_body("path", "/a"))).json()
    assert (len(rest["counters"]), rest["total"]) == (1, 2)
    assert (await sqlite_admin.post("/decisions/check", json=descriptors_body("path", "/a"))).json()["code"] == "ok"
    rows = (await sqlite_admin.get("/audit", params={"kind": "counters"})).json()["items"]
    assert [(row["action"], row["subject"], row["after"]) for row in rows] == [
        ("reset", "edge", {"descriptors": ["path=/a"], "counters_reset": deleted}) for deleted in (1, 1)
    ]
    reader = sqlite_api.client(await sqlite_api.token("read"))
    assert (await reader.post("/counters/reset", json=descriptors_body("path", "/a"))).status_code == 403


async def test_counters_are_reset_only_after_the_audit_entry_is_committed(
    sqlite_api: AdminApi, sqlite_admin: Client
) -> None:
    await sqlite_admin.post("/decisions/check", json=descriptors_body("user", "alice"))
    losing = sqlite_api.with_backend(repository=LosesCommits(sqlite_api.backend.database, clock=sqlite_api.clock))
    for headers in ({}, {"Idempotency-Key": "k"}):
        failed = await losing.client().post("/counters/reset", json=descriptors_body("user", "alice"), headers=headers)
        assert failed.status_code == 503
        peeked = (await sqlite_admin.post("/counters/peek", json=descriptors_body("user", "alice"))).json()
        assert peeked["descriptors"][0]["limits"][0]["remaining"] == 4
    assert (await sqlite_admin.get("/audit")).json()["items"] == []


async def test_failed_reset_is_an_error_and_leaves_its_audit_entry(sqlite_api: AdminApi, sqlite_admin: Client) -> None:
    """The entry is committed first. A repetition with the same Idempotency-Key is not answered with a success."""
    await sqlite_admin.post("/decisions/check", json=descriptors_body("user", "alice"))

    class LostCounters:
        present = sqlite_api.backend.counters.present

        async def forget(self, keys: Sequence[bytes]) -> list[bytes]:
            raise StoreUnavailable("not connected")

    losing = sqlite_api.with_backend(counters=LostCounters()).client()
    headers = {"Idempotency-Key": "k"}
    for expected, client in ((503, losing), (503, losing), (200, sqlite_admin), (200, losing)):
        sent = await client.post("/counters/reset", json=descriptors_body("user", "alice"), headers=headers)
        assert sent.status_code == expected
    assert (len(sent.json()["counters"]), sent.headers["idempotency-replayed"]) == (1, "true")
    rows = (await sqlite_admin.get("/audit")).json()["items"]
    assert [(row["action"], row["after"]["counters_reset"]) for row in rows] == [("reset", 1)] * 3


async def test_explain_shows_match_steps_and_source_of_limits(sqlite_api: AdminApi, sqlite_admin: Client) -> None:
    await sqlite_admin.put("/users/alice", json={"limits": [{"unit": "hour", "requests_per_unit": 9}]})
    await sqlite_api.follow()
    (walk,) = (await sqlite_admin.post("/decisions/explain", json=descriptors_body("user", "alice"))).json()[
        "descriptors"
    ]
    assert walk["rule"] == "edge.user"
    assert walk["conclusion"].startswith("rule edge.user")
    assert walk["entitlement"] == {"limits_of": "user", "source": "custom", "blocked": False, "block": None}
    assert walk["limits"] == [{"requests_per_unit": 9, "unit": "hour"}]
    assert walk["position"] == "rules.yaml:3:5"
    (counter,) = walk["counters"]
    assert "user=alice" in counter
    (level,) = walk["levels"]
    assert [attempt["outcome"] for attempt in level["attempts"]][-1] == "matched"


async def test_blocked_user_is_reported_and_can_be_reset(sqlite_api: AdminApi, sqlite_admin: Client) -> None:
    await sqlite_admin.post("/decisions/check", json=descriptors_body("user", "bob"))
    async with sqlite_api.backend.repository.change(Actor("tests")) as change:
        await change.set_block("bob", Block("abuse"))
    await sqlite_api.follow()
    result = (await sqlite_admin.post("/decisions/check", json=descriptors_body("user", "bob"))).json()
    assert (result["code"], result["rejection"]) == ("over_limit", {"reason": "blocked", "until": None})
    explained = (await sqlite_admin.post("/decisions/explain", json=descriptors_body("user", "bob"))).json()
    (walk,) = explained["descriptors"]
    assert explained["rejection"] == {"reason": "blocked", "until": None}
    assert walk["limits"] == [{"requests_per_unit": 5, "unit": "minute"}]
    assert walk["conclusion"].endswith("blocked: nothing passes")
    assert walk["entitlement"] == {
        "limits_of": "user",
        "source": "rule",
        "blocked": True,
        "block": {"reason": "abuse", "until": None},
    }
    assert (
        len((await sqlite_admin.post("/counters/reset", json=descriptors_body("user", "bob"))).json()["counters"]) == 1
    )


async def test_own_limits_of_a_blocked_caller_are_explained_and_reset(api: AdminApi, admin: Client) -> None:
    own = [{"unit": "hour", "requests_per_unit": 9}]
    await admin.put("/users/bob", json={"limits": own})
    await api.follow()
    counted = (await admin.post("/decisions/check", json=descriptors_body("user", "bob"))).json()
    assert counted["descriptors"][0]["limits"][0]["remaining"] == 8
    await admin.put("/users/bob/block", json={"reason": "abuse", "duration": "1h"})
    await api.follow()
    (walk,) = (await admin.post("/decisions/explain", json=descriptors_body("user", "bob"))).json()["descriptors"]
    assert (walk["limits"], walk["entitlement"]["source"]) == (own, "custom")
    assert walk["entitlement"]["block"] == {"reason": "abuse", "until": "2027-01-15T09:00:00Z"}
    assert [key.rpartition(":")[2] for key in walk["counters"]] == ["3600"]
    deleted = (await admin.post("/counters/reset", json=descriptors_body("user", "bob"))).json()
    assert deleted == {"counters": walk["counters"], "total": 1}


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


async def test_credential_counts_for_its_user_and_is_in_no_response(api: AdminApi, admin: Client) -> None:
    api.load(PROVED)
    await admin.put("/users/alice", json={})
    key = await api.key("alice")
    answers = [await admin.post("/decisions/check", json=descriptors_body("x-api-key", key))]
    answers += [await admin.post("/decisions/check", json=descriptors_body("user", "alice"))]
    answers += [await admin.post("/counters/peek", json=descriptors_body("x-api-key", key))]
    for answer, remaining in zip(answers, (4, 3, 3), strict=True):
        (result,) = answer.json()["descriptors"]
        assert (result["rule"], result["limits"][0]["remaining"]) == ("edge.user", remaining)
        assert result["entries"] == [{"key": "user", "value": "alice"}]
    answers += [await admin.post("/decisions/explain", json=descriptors_body("x-api-key", key))]
    (walk,) = answers[-1].json()["descriptors"]
    assert (walk["rule"], walk["entries"]) == ("edge.user", [{"key": "user", "value": "alice"}])
    answers += [await admin.post("/counters/reset", json=descriptors_body("x-api-key", key))]
    assert answers[-1].json()["counters"] == walk["counters"] != []
    answers += [await admin.get("/audit", params={"kind": "counters"})]
    assert answers[-1].json()["items"][0]["after"] == {"descriptors": ["user=alice"], "counters_reset": 1}
    assert not any(key in answer.text or key.split("_", 2)[2] in answer.text for answer in answers)


async def test_invalid_credential_is_denied_as_by_the_service(sqlite_api: AdminApi, sqlite_admin: Client) -> None:
    sqlite_api.load(PROVED)
    result = (await sqlite_admin.post("/decisions/check", json=descriptors_body("x-api-key", FORGED))).json()
    assert (result["code"], result["rejection"]) == ("over_limit", {"reason": "unauthorized", "until": None})
    for path in ("/counters/peek", "/decisions/explain", "/counters/reset", "/counters/reset?dry_run=true"):
        rejected = await sqlite_admin.post(path, json=descriptors_body("x-api-key", FORGED))
        assert (rejected.status_code, rejected.json()["errors"][0]["field"]) == (422, "descriptors[0]"), path
        assert "the credential is not valid" in rejected.json()["detail"]
        assert FORGED not in rejected.text
    assert (await sqlite_admin.get("/audit")).json()["items"] == []
    sqlite_api.load(PROVED.replace("on_invalid: refuse", "on_invalid: ip"))
    looked = (await sqlite_admin.post("/counters/peek", json=descriptors_body("x-api-key", FORGED))).json()
    assert looked["descriptors"][0]["entries"] == [{"key": "ip", "value": "unknown"}]


async def test_blocked_credential_is_reported_as_blocked(sqlite_api: AdminApi, sqlite_admin: Client) -> None:
    """Also if no rule has `limits_of`."""
    sqlite_api.load(PROVED.replace("    limits_of: user\n", ""))
    await sqlite_admin.put("/users/bob", json={})
    key = await sqlite_api.key("bob")
    await sqlite_admin.post("/decisions/check", json=descriptors_body("x-api-key", key))
    await sqlite_admin.put("/users/bob/block", json={})
    await sqlite_api.follow()
    for path in ("/decisions/check", "/counters/peek", "/decisions/explain"):
        result = (await sqlite_admin.post(path, json=descriptors_body("x-api-key", key))).json()
        assert result["rejection"] == {"reason": "blocked", "until": None}, path
    assert (
        len((await sqlite_admin.post("/counters/reset", json=descriptors_body("x-api-key", key))).json()["counters"])
        == 1
    )


async def test_simulate_resolves_credentials_by_the_simulated_rules(sqlite_api: AdminApi, sqlite_admin: Client) -> None:
    await sqlite_admin.put("/users/alice", json={})
    key = await sqlite_api.key("alice")
    at = {"at": "2030-01-01T00:00:00Z"}
    requests = [descriptors_body("x-api-key", key, **at)] * 5 + [
        descriptors_body("user", "alice", **at),
        descriptors_body("x-api-key", FORGED, **at),
    ]
    for body in ({"requests": requests, "documents": [PROVED]}, {"requests": requests}):
        result = await sqlite_admin.post("/decisions/simulate", json=body)
        if "documents" in body:
            assert result.json()["results"] == [*["ok"] * 5, "over_limit", "over_limit"]
            assert result.json()["per_rule"] == [{"rule": "edge.user", "calls": 6, "denied": 1}]
        else:  # the active rules have no credentials
            assert result.json()["per_rule"] == [{"rule": "edge.user", "calls": 1, "denied": 0}]
        assert key not in result.text


async def test_simulate_uses_a_virtual_clock(sqlite_admin: Client) -> None:
    def at(moment: str, value: str = "alice") -> dict[str, Any]:
        return {**descriptors_body("user", value), "at": f"2030-01-01T{moment}Z"}

    requests = [at("00:01:00"), *[at("00:00:01")] * 6, at("00:00:02", "bob")]
    result = (await sqlite_admin.post("/decisions/simulate", json={"requests": requests})).json()
    assert result["results"] == ["ok", *["ok"] * 5, "over_limit", "ok"]
    assert (result["calls"], result["admitted"], result["denied"]) == (8, 7, 1)
    assert result["per_rule"] == [{"rule": "edge.user", "calls": 8, "denied": 1}]
    stricter = "domain: edge\ndescriptors: [{key: user, rate_limit: {unit: minute, requests_per_unit: 1}}]"
    tried = (
        await sqlite_admin.post("/decisions/simulate", json={"requests": requests, "documents": [stricter]})
    ).json()
    assert tried["denied"] == 5
    broken = await sqlite_admin.post(
        "/decisions/simulate", json={"requests": requests, "documents": ["domain: [", stricter]}
    )
    assert (broken.status_code, broken.json()["errors"][0]["file"]) == (422, "documents[0]")
    too_many = await sqlite_admin.post("/decisions/simulate", json={"requests": [at("00:00:00")] * 10_001})
    assert too_many.status_code in (413, 422)
    odd = await sqlite_admin.post(
        "/decisions/simulate", json={"requests": [at("00:00:00"), {**requests[0], "at": 1}, {}]}
    )
    assert (odd.status_code, odd.json()["errors"][0]["field"]) == (422, "requests[1].at")
    untouched = (await sqlite_admin.post("/counters/peek", json=descriptors_body("user", "alice"))).json()
    assert untouched["descriptors"][0]["limits"][0]["remaining"] == 5


def simulated(count: int) -> dict[str, Any]:
    """Return the body as text, so that encoding it is not measured."""
    requests = [
        {**descriptors_body("user", str(number % 100)), "at": "2030-01-01T00:00:00Z"} for number in range(count)
    ]
    return {"content": json.dumps({"requests": requests}), "headers": {"Content-Type": "application/json"}}


async def test_simulation_does_not_block_the_event_loop(sqlite_admin: Client) -> None:
    await sqlite_admin.post("/decisions/simulate", **simulated(1))  # what only the first request does is not measured
    sent = simulated(8000)
    async with longest_wait() as blocked_for:
        result = await sqlite_admin.post("/decisions/simulate", **sent)
    assert (result.json()["calls"], result.json()["denied"]) == (8000, 7500)
    assert blocked_for.longest_s < 0.15


async def test_simulations_run_one_at_a_time_with_bounded_waiters(
    sqlite_admin: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = max_running = 0

    async def counting(*descriptors_body: Any) -> SimulatedDecisions:
        nonlocal running, max_running
        running += 1
        max_running = max(max_running, running)
        result = await simulate(*descriptors_body)
        running -= 1
        return result

    monkeypatch.setattr(decisions, "simulate", counting)
    sent = simulated(500)
    result = await asyncio.gather(*[sqlite_admin.post("/decisions/simulate", **sent) for _ in range(MAX_WAITING + 3)])
    assert sorted(answer.status_code for answer in result) == [*[200] * (MAX_WAITING + 1), 429, 429]
    assert {answer.headers.get("retry-after") for answer in result} == {None, "2"}
    assert max_running == 1
    assert (await sqlite_admin.post("/decisions/simulate", **sent)).status_code == 200


async def test_recorded_decisions(api: AdminApi, admin: Client) -> None:
    common = {"domain": "edge", "rule_id": "edge.user", "server_id": "here"}
    rows = [
        {**common, "timestamp": NOW_S - 60 + number, "log_id": number, "user_id": user, "decision": decision}
        for number, (user, decision) in enumerate([("alice", "allowed"), ("alice", "throttled"), ("bob", "blocked")])
    ]
    async with api.backend.database.begin() as connection:
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


async def test_usage(api: AdminApi, admin: Client) -> None:
    nothing = (await admin.get("/usage", params={"by": "rule", "since": "2027-01-01T00:00:00Z"})).json()
    assert nothing == {"by": "rule", "since": "2027-01-01T00:00:00Z", "until": "2027-01-15T08:00:00Z", "items": []}
    series = (await admin.get("/usage/series", params={"granularity": "minute", "user": "alice"})).json()
    assert (series["granularity"], series["points"]) == ("minute", [])
    too_fine = await admin.get("/usage/series", params={"granularity": "minute", "since": "2001-01-01T00:00:00Z"})
    assert too_fine.status_code == 422


async def test_sources(sqlite_admin: Client) -> None:
    (files,) = (await sqlite_admin.get("/sources")).json()["sources"]
    assert (files["name"], files["version"], files["connected"]) == ("files", 1, None)
