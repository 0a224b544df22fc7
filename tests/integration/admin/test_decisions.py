"""Counters and decisions on demand, and the record of those that were made."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import insert

from ratelimit_rls.core.accounts import Block
from ratelimit_rls.records.desk import Actor
from ratelimit_rls.records.series import audit_logs
from tests.integration.admin.office import NOW_S, Client, Office

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
    assert walk["standing"] == {"limits_of": "user", "source": "custom", "blocked": False}
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
    (walk,) = (await any_admin.post("/decisions/explain", json=asked("user", "bob"))).json()["descriptors"]
    assert walk["standing"]["blocked"]
    assert len((await any_admin.post("/counters/reset", json=asked("user", "bob"))).json()["counters"]) == 1


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
    untouched = (await any_admin.post("/counters/peek", json=asked("user", "alice"))).json()
    assert untouched["descriptors"][0]["limits"][0]["remaining"] == 5


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
