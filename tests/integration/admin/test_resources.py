"""Tiers, users, keys, tokens and rules: created, read, changed, deleted and audited."""

from __future__ import annotations

from typing import Any

import pytest

from ratelimit_rls.identity.key_format import matches
from tests.integration.admin.admin_client import KEY_SECRET, AdminApi, Client

LIMIT = {"requests_per_unit": 100, "unit": "minute", "algorithm": "token_bucket", "burst": 20}
GOLD = {"name": "gold", "limits": [LIMIT], "description": "for those who pay"}
FEW = {"requests_per_unit": 2, "unit": "hour"}
RULE: dict[str, Any] = {
    "name": "free_tier",
    "priority": 10,
    "targeting": {"tiers": ["free"], "endpoints": ["/api/*"], "methods": ["POST"], "scope": "user"},
    "document": "domain: edge\nrate_limit: {unit: minute, requests_per_unit: 5}\n",
}


async def test_tiers(admin: Client) -> None:
    made = await admin.post("/tiers", json=GOLD)
    assert made.status_code == 201, made.text
    assert made.headers["etag"] == '"1"'
    assert made.headers["location"] == "/api/v1/tiers/gold"
    assert made.json() == {**GOLD, "version": 1}
    assert (await admin.post("/tiers", json=GOLD)).status_code == 409

    assert (await admin.get(made.headers["location"])).json() == made.json()
    put = await admin.put("/tiers/gold", json={"limits": [FEW]})
    assert (put.status_code, put.headers["etag"]) == (200, '"2"')
    assert put.json() == {"name": "gold", "limits": [FEW], "description": "", "version": 2}
    new = await admin.put("/tiers/a%2Fb%20c", json={"limits": []})
    assert (new.status_code, new.headers["location"]) == (201, "/api/v1/tiers/a%2Fb%20c")
    assert [tier["name"] for tier in (await admin.get("/tiers")).json()["items"]] == ["a/b c", "gold"]

    await admin.put("/users/alice/tier", json={"tier": "gold"})
    in_use = await admin.delete("/tiers/gold")
    assert in_use.status_code == 409
    assert (await admin.delete("/tiers/a%2Fb%20c")).status_code == 204
    assert (await admin.get("/tiers/a%2Fb%20c")).status_code == 404


async def test_limits_are_compiled_by_the_rules_compiler(sqlite_admin: Client) -> None:
    bad = [FEW, {"unit": "minute", "requests_per_unit": 1, "burst": 5}]
    rejected = await sqlite_admin.post("/tiers", json={"name": "odd", "limits": bad})
    assert rejected.status_code == 422
    (error,) = rejected.json()["errors"]
    assert error["field"].startswith("limits[1]")
    assert "burst" in error["message"]


@pytest.mark.slow
async def test_effective_limits_of_a_user(api: AdminApi, admin: Client) -> None:
    """Precedence: block, override, custom limits, tier, rule. Each change is visible at once to its author."""

    async def holds() -> tuple[str, Any]:
        result = (await admin.get("/users/acme%2Falice/limits")).json()
        assert result["user_id"] == "acme/alice"
        assert [one["source"] for one in result["considered"] if not one["why_not"]] == [result["source"]]
        return result["source"], result["limits"]

    assert await holds() == ("rule", None)
    await admin.post("/tiers", json=GOLD)
    set_tier = await admin.put("/users/acme%2Falice/tier", json={"tier": "gold"})
    assert set_tier.json()["tier"] == "gold"
    assert await holds() == ("tier gold", [LIMIT])
    body = {"tier": "gold", "org": "acme", "limits": [FEW]}
    assert (await admin.put("/users/acme%2Falice", json=body)).status_code == 200
    assert await holds() == ("custom", [FEW])
    override = {"limits": [LIMIT], "duration": "1h", "reason": "a launch"}
    given = await admin.post("/users/acme%2Falice/override", json=override)
    assert given.status_code == 201, given.text
    assert given.json()["override"]["until"] == "2027-01-15T09:00:00Z"
    assert await holds() == ("override", [LIMIT])
    await admin.put("/users/acme%2Falice/block", json={"reason": "abuse", "until": "2027-01-15T08:30:00+00:00"})
    assert await holds() == ("block", None)
    assert [user["user_id"] for user in (await admin.get("/blocks")).json()["items"]] == ["acme/alice"]
    api.clock.now_s += 1800  # the block has ended
    assert await holds() == ("override", [LIMIT])
    assert (await admin.delete("/users/acme%2Falice/block")).json()["block"] is None
    assert (await admin.delete("/users/acme%2Falice/override")).json()["override"] is None
    assert await holds() == ("custom", [FEW])
    assert (await admin.delete("/users/acme%2Falice")).status_code == 204
    assert await holds() == ("rule", None)


USER_RULES = """\
domain: edge
descriptors:
  - key: user
    limits_of: user
    rate_limit: {unit: minute, requests_per_unit: 5}
  - key: user
    value: root
    limits_of: user
    rate_limit: {unlimited: true}
  - key: user
    value: a*
    limits_of: user
    rate_limit: {unit: day, requests_per_unit: 1}
  - key: path
    descriptors:
      - key: user
        limits_of: user
  - key: api_key
    limits_of: api_key
    rate_limit: {unit: minute, requests_per_unit: 7}
  - {key: ip, rate_limit: {unit: minute, requests_per_unit: 8}}
"""


@pytest.mark.slow
async def test_rules_that_apply_user_limits(api: AdminApi, admin: Client) -> None:
    api.load(USER_RULES)

    async def result(user_id: str) -> dict[str, tuple[str, Any]]:
        rules = (await admin.get(f"/users/{user_id}/limits")).json()["rules"]
        assert {rule["domain"] for rule in rules} == {"edge"}
        assert all(rule["unlimited"] == (rule["limits"] == []) for rule in rules)
        return {rule["rule"]: (rule["position"], rule["limits"]) for rule in rules}

    per_minute = [{"requests_per_unit": 5, "unit": "minute"}]
    below: dict[str, tuple[str, list[Any]]] = {"edge.path.user": ("rules.yaml:16:9", [])}
    assert await result("bob") == {"edge.user": ("rules.yaml:3:5", per_minute), **below}
    assert await result("root") == {"edge.user_root": ("rules.yaml:6:5", []), **below}
    assert await result("ann") == {
        "edge.user_a*": ("rules.yaml:10:5", [{"requests_per_unit": 1, "unit": "day"}]),
        **below,
    }
    await admin.put("/users/bob", json={"limits": [FEW]})
    own = {"edge.user": ("rules.yaml:3:5", [FEW]), "edge.path.user": ("rules.yaml:16:9", [FEW])}
    assert await result("bob") == own
    await admin.put("/users/bob/block", json={})
    assert await result("bob") == own
    api.backend.rules.current = None
    assert (await admin.get("/users/bob/limits")).json()["rules"] == []


@pytest.mark.slow
async def test_invalid_user_bodies_are_rejected(sqlite_admin: Client) -> None:
    rejections = {
        "tier": await sqlite_admin.put("/users/a/tier", json={"tier": "none such"}),
        "until": await sqlite_admin.post("/users/a/override", json={"limits": [FEW], "until": "2001-01-01T00:00:00Z"}),
        "body": await sqlite_admin.post("/users/a/override", json={"limits": [FEW]}),
        "duration": await sqlite_admin.put("/users/a/block", json={"duration": "for ever"}),
    }
    for field, rejected in rejections.items():
        assert rejected.status_code == 422, rejected.text
        assert rejected.json()["errors"][0]["field"] == field
    assert (await sqlite_admin.get("/users")).json()["items"] == []


@pytest.mark.slow
async def test_key_secret_is_returned_once(api: AdminApi, admin: Client) -> None:
    await admin.put("/users/alice", json={})
    made = await admin.post("/keys", json={"user_id": "alice", "name": "laptop", "limits": [FEW], "expires_in": "90d"})
    assert made.status_code == 201, made.text
    key = made.json()
    text = key.pop("key")
    assert text.startswith(f"rlk_{key['key_id']}_")
    assert key["expires"] == "2027-04-15T08:00:00Z"
    async with api.backend.repository.reading() as reader:
        assert matches(KEY_SECRET, text, (await reader.key(key["key_id"])).digest)
    path = made.headers["location"]
    assert (await admin.get(path)).json() == key
    assert (await admin.get("/keys", params={"user_id": "alice"})).json() == {"items": [key], "next": None}
    assert (await admin.get("/keys", params={"user_id": "bob"})).json()["items"] == []

    await api.backend.repository.touch_keys({key["key_id"]: (7, 1_800_000_060.0)})
    used = (await admin.get(path)).json()
    assert (used["total_requests"], used["last_used"]) == (7, "2027-01-15T08:01:00Z")

    changed = (await admin.patch(path, json={"name": "desktop", "expires": None})).json()
    assert (changed["name"], changed["expires"], changed["limits"], changed["version"]) == ("desktop", None, [FEW], 2)
    assert (await admin.patch(path, json={"tier": "none such"})).status_code == 422
    revoked = await admin.delete(path)
    assert revoked.json()["revoked"] == "2027-01-15T08:00:00Z"
    assert (await admin.patch(path, json={"name": "again"})).status_code == 409
    assert (await admin.post("/keys", json={"user_id": "nobody"})).json()["errors"][0]["field"] == "user_id"

    secret = text.split("_", 2)[2]
    everything = [await admin.get(path) for path in ("/keys", path, "/audit")]
    assert all(secret not in answer.text and "digest" not in answer.text for answer in everything)


@pytest.mark.slow
async def test_tokens(api: AdminApi, admin: Client) -> None:
    made = await admin.post("/tokens", json={"name": "ci", "role": "read", "expires_in": "1h"})
    assert made.status_code == 201, made.text
    token = made.json()
    reader = api.client(token.pop("token"))
    assert (await reader.get("/tiers")).status_code == 200
    (listed,) = (await admin.get("/tokens")).json()["items"]
    assert listed == {**token, "last_used": "2027-01-15T08:00:00Z"}
    assert (await admin.delete(f"/tokens/{token['token_id']}")).json()["revoked"] is not None
    assert (await reader.get("/tiers")).status_code == 401


async def test_token_is_revoked_only_in_the_version_of_if_match(sqlite_admin: Client) -> None:
    made = await sqlite_admin.post("/tokens", json={"name": "ci", "role": "read"})
    assert (made.json()["version"], made.headers["etag"]) == (1, '"1"')
    path = f"/tokens/{made.json()['token_id']}"
    stale = await sqlite_admin.delete(path, headers={"If-Match": '"2"'})
    assert (stale.status_code, stale.json()["type"][-5:], stale.headers["etag"]) == (412, "stale", '"1"')
    exists = await sqlite_admin.delete(path, headers={"If-None-Match": "*"})
    assert exists.status_code == 412
    assert (await sqlite_admin.get("/tokens")).json()["items"][0]["revoked"] is None
    revoked = await sqlite_admin.delete(path, headers={"If-Match": '"1"'})
    assert (revoked.status_code, revoked.json()["version"], revoked.headers["etag"]) == (200, 2, '"2"')
    assert (await sqlite_admin.delete(path, headers={"If-Match": '"1"'})).status_code == 412
    assert (await sqlite_admin.delete(path)).json() == revoked.json()


@pytest.mark.slow
async def test_rules(admin: Client) -> None:
    made = await admin.post("/rules", json=RULE)
    assert made.status_code == 201, made.text
    rule = made.json()
    assert {name: rule[name] for name in ("name", "priority", "enabled", "document", "version")} == {
        **{name: RULE[name] for name in ("name", "priority", "document")},
        "enabled": True,
        "version": 1,
    }
    assert rule["targeting"] == {"cidrs": [], **RULE["targeting"]}
    assert rule["created_by"] == "RLS_ADMIN_TOKEN"
    path = made.headers["location"]
    assert path == f"/api/v1/rules/{rule['rule_id']}"
    assert (await admin.get(path)).json() == rule
    assert (await admin.post("/rules", json=RULE)).status_code in (409, 422)

    as_object = {
        "domain": "other",
        "descriptors": [{"key": "a", "rate_limit": {"unit": "day", "requests_per_unit": 1}}],
    }
    put = await admin.put(path, json={"name": "second", "enabled": False, "document": as_object})
    assert put.status_code == 200, put.text
    assert put.json()["document"].startswith("domain: other\n")
    assert (put.json()["priority"], put.json()["version"]) == (100, 2)
    assert [one["name"] for one in (await admin.get("/rules", params={"enabled": "false"})).json()["items"]] == [
        "second"
    ]
    assert (await admin.get("/rules", params={"domain": "edge"})).json()["items"] == []
    assert (await admin.delete(path)).status_code == 204
    for response in (await admin.get(path), await admin.put(path, json=RULE), await admin.delete(path)):
        assert response.status_code == 404


@pytest.mark.slow
async def test_every_change_is_audited(admin: Client, api: AdminApi) -> None:
    writer = api.client(await api.token("write", name="the robot"))
    await writer.put("/tiers/gold", json={"limits": [LIMIT]}, headers={"X-Request-Id": "first-1"})
    await writer.put("/tiers/gold", json={"limits": [FEW]})
    newest, oldest = (await admin.get("/audit", params={"kind": "tier", "subject": "gold"})).json()["items"]
    assert (oldest["actor"], oldest["action"], oldest["request_id"]) == ("the robot", "create", "first-1")
    assert (oldest["address"], oldest["at"]) == ("192.0.2.1", "2027-01-15T08:00:00Z")
    assert oldest["before"] is None
    assert (newest["before"]["limits"], newest["after"]["limits"]) == ([LIMIT], [FEW])
    by_others = (await admin.get("/audit", params={"actor": "somebody else"})).json()["items"]
    assert by_others == []
