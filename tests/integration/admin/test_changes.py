"""Changes that are concurrent, repeated, dry runs, or invalid."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from ratelimit_rls.admin.rules import MAX_ATTEMPTS, CompiledRule, RulesChanged, compile_and_store, stored_rules
from ratelimit_rls.admin.rules_import import FileRule, import_rules
from ratelimit_rls.database.queries import IDEMPOTENCY_TTL_S
from ratelimit_rls.database.repository import Actor, Reader, Repository, UnitOfWork
from ratelimit_rls.errors import Conflict
from ratelimit_rls.rules.source_document import SourceDocument
from ratelimit_rls.rules.stored_rule import StoredRule, Targeting
from tests.integration.admin.admin_client import AdminApi, Client

RULE: dict[str, Any] = {
    "name": "mine",
    "document": "domain: edge\ndescriptors:\n  - key: tenant\n    rate_limit: {unit: minute, requests_per_unit: 5}\n",
}
TIER = {"limits": [{"unit": "minute", "requests_per_unit": 1}]}


async def snapshot(api: AdminApi) -> Any:
    async with api.backend.repository.reading() as reader:
        return await reader.accounts(), await reader.audit(), await reader.tokens()


# ── concurrent ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_concurrent_edit_of_a_rule_fails_with_412(api: AdminApi, admin: Client) -> None:
    path = (await admin.post("/rules", json=RULE)).headers["location"]
    seen = {"If-Match": (await admin.get(path)).headers["etag"]}
    bodies = [{**RULE, "name": name} for name in ("first", "second")]
    one, other = await asyncio.gather(*(api.client().put(path, json=body, headers=seen) for body in bodies))
    assert sorted((one.status_code, other.status_code)) == [200, 412]
    winner, loser = (one, other) if one.is_success else (other, one)
    assert loser.headers["etag"] == winner.headers["etag"] == '"2"'
    assert loser.json()["type"].endswith(":stale")
    assert (await admin.get(path)).json() == winner.json()


@pytest.mark.slow
async def test_etags_of_all_resources(sqlite_admin: Client) -> None:
    await sqlite_admin.put("/tiers/gold", json=TIER)
    await sqlite_admin.put("/users/alice", json={})
    key = (await sqlite_admin.post("/keys", json={"user_id": "alice"})).headers["location"]
    rule = (await sqlite_admin.post("/rules", json=RULE)).headers["location"]
    stale = {"If-Match": '"77", W/"78"'}
    for method, path, body in (
        ("PUT", "/tiers/gold", TIER),
        ("DELETE", "/tiers/gold", None),
        ("PUT", "/users/alice", {}),
        ("PUT", "/users/alice/tier", {"tier": "gold"}),
        ("POST", "/users/alice/override", {**TIER, "duration": "1h"}),
        ("DELETE", "/users/alice/override", None),
        ("PUT", "/users/alice/block", {}),
        ("DELETE", "/users/alice/block", None),
        ("DELETE", "/users/alice", None),
        ("PATCH", key, {"name": "x"}),
        ("DELETE", key, None),
        ("PUT", rule, RULE),
        ("DELETE", rule, None),
    ):
        rejected = await sqlite_admin.request(method, path, json=body, headers=stale)
        assert (rejected.status_code, rejected.headers["etag"]) == (412, '"1"'), (method, path)
    for path in ("/tiers/gold", "/users/alice", key, rule):
        known = await sqlite_admin.get(path, headers={"If-None-Match": '"1"'})
        assert (known.status_code, known.content, known.headers["etag"]) == (304, b"", '"1"')
        assert (await sqlite_admin.get(path, headers={"If-None-Match": '"2"'})).status_code == 200
        assert (await sqlite_admin.get(path, headers={"If-None-Match": "nonsense"})).status_code == 400
    only_new = {"If-None-Match": "*"}
    assert (await sqlite_admin.put("/tiers/gold", json=TIER, headers=only_new)).status_code == 412
    assert (await sqlite_admin.put("/tiers/silver", json=TIER, headers=only_new)).status_code == 201
    assert (await sqlite_admin.put("/tiers/bronze", json=TIER, headers={"If-Match": "*"})).status_code == 412
    assert (await sqlite_admin.put("/tiers/silver", json=TIER, headers={"If-Match": "*"})).status_code == 200


async def test_if_none_match_any_only_creates(sqlite_admin: Client) -> None:
    await sqlite_admin.put("/users/alice", json={})
    await sqlite_admin.put("/tiers/gold", json=TIER)
    for method, path, body in (
        ("PUT", "/users/alice", {}),
        ("PUT", "/users/alice/tier", {"tier": "gold"}),
        ("PUT", "/users/alice/block", {}),
        ("POST", "/users/alice/override", {**TIER, "duration": "1h"}),
        ("DELETE", "/users/alice", None),
        ("DELETE", "/tiers/gold", None),
    ):
        rejected = await sqlite_admin.request(method, path, json=body, headers={"If-None-Match": "*"})
        assert (rejected.status_code, rejected.headers["etag"]) == (412, '"1"'), (method, path)
        malformed = await sqlite_admin.request(method, path, json=body, headers={"If-None-Match": "1"})
        assert malformed.status_code == 400, (method, path)


async def test_malformed_etags_are_rejected_everywhere(sqlite_admin: Client) -> None:
    for method, path, body in (
        ("GET", "/tiers", None),
        ("GET", "/users/alice/limits", None),
        ("POST", "/tiers", {"name": "gold", **TIER}),
        ("POST", "/decisions/explain", {"domain": "edge", "descriptors": [{"entries": [{"key": "user"}]}]}),
    ):
        for header in ("If-Match", "If-None-Match"):
            rejected = await sqlite_admin.request(method, path, json=body, headers={header: "3"})
            assert (rejected.status_code, header in rejected.json()["detail"]) == (400, True), (method, path)
    assert (await sqlite_admin.get("/tiers")).json()["items"] == []


# ── invalid ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_rule_that_does_not_compile_is_rejected_with_its_position(api: AdminApi, admin: Client) -> None:
    path = (await admin.post("/rules", json=RULE)).headers["location"]
    before = await snapshot(api)
    wrong = {"name": "broken", "document": RULE["document"].replace("minute", "fortnight").replace("tenant", "seller")}
    for rejected in (
        await admin.post("/rules", json=wrong),
        await admin.put(path, json=wrong),
        await admin.post("/rules", json={**wrong, "enabled": False}),
        await admin.post("/rules?dry_run=true", json=wrong),
    ):
        assert (rejected.status_code, rejected.json()["type"][-5:]) == (422, "rules")
        (error,) = rejected.json()["errors"]
        assert (error["file"], error["line"], error["column"]) == ("database:broken", 4, 24)
        assert "fortnight" in error["message"]
    assert await snapshot(api) == before


async def test_unknown_tier_and_user_are_reported_with_their_fields(sqlite_admin: Client) -> None:
    await sqlite_admin.put("/users/alice", json={})
    key = (await sqlite_admin.post("/keys", json={"user_id": "alice"})).headers["location"]
    for method, path, body, field in (
        ("PUT", "/users/bob", {"tier": "gold"}, "tier"),
        ("PUT", "/users/alice/tier", {"tier": "gold"}, "tier"),
        ("POST", "/keys", {"user_id": "alice", "tier": "gold"}, "tier"),
        ("PATCH", key, {"tier": "gold"}, "tier"),
        ("POST", "/keys", {"user_id": "bob"}, "user_id"),
    ):
        rejected = await sqlite_admin.request(method, path, json=body)
        assert (rejected.status_code, rejected.json()["type"][-7:]) == (422, "invalid"), (method, path)
        (error,) = rejected.json()["errors"]
        assert (error["field"], error["message"].partition(" does ")[2]) == (field, "not exist: create it first")


@pytest.mark.slow
async def test_rule_is_compiled_with_all_others(api: AdminApi, admin: Client) -> None:
    await admin.post("/rules", json=RULE)
    before = await snapshot(api)
    twice = await admin.post("/rules", json={**RULE, "name": "same"})  # same priority
    assert twice.status_code == 422, twice.text
    assert {error["file"] for error in twice.json()["errors"]} <= {"database:mine", "database:same"}
    assert await snapshot(api) == before
    assert (await admin.post("/rules", json={**RULE, "name": "stronger", "priority": 1})).status_code == 201


@pytest.mark.slow
async def test_errors_in_targeting_and_object_documents(sqlite_admin: Client) -> None:
    targeted = {
        "name": "a",
        "targeting": {"cidrs": ["10.0.0.0/8", "10.0.0"]},
        "document": "domain: x\nunlimited: true\n",
    }
    rejected = await sqlite_admin.post("/rules", json=targeted)
    assert rejected.status_code == 422
    assert any("cidrs[1]" in str(error) for error in rejected.json()["errors"])
    as_object = await sqlite_admin.post("/rules", json={"name": "a", "document": {"domain": "x", "descriptors": [{}]}})
    assert as_object.status_code == 422
    assert as_object.json()["document"] == "domain: x\ndescriptors:\n- {}\n"
    deep: Any = []
    for _ in range(200):
        deep = [deep]
    assert (await sqlite_admin.post("/rules", json={"name": "a", "document": {"domain": deep}})).status_code == 422


@pytest.mark.slow
async def test_rule_sent_twice_fails_because_its_name_is_taken(admin: Client) -> None:
    made = (await admin.post("/rules", json=RULE)).json()
    for body in (RULE, {**RULE, "enabled": False}):
        again = await admin.post("/rules", json=body)
        assert again.status_code == 409, again.text
        assert made["rule_id"] in again.json()["detail"]
    assert [rule["version"] for rule in (await admin.get("/rules")).json()["items"]] == [1]


@pytest.mark.slow
async def test_conflicting_rules_are_not_both_stored(api: AdminApi, admin: Client) -> None:
    bodies = [{**RULE, "name": f"rule {number}"} for number in range(4)]
    result = await asyncio.gather(*(api.client().post("/rules", json=body) for body in bodies))
    assert sorted(one.status_code for one in result) == [201, 422, 422, 422], [one.text for one in result]
    assert len((await admin.get("/rules")).json()["items"]) == 1


@pytest.mark.slow
async def test_rules_can_be_stored_concurrently(api: AdminApi, admin: Client) -> None:
    """Each rule is compiled with exactly those it is stored with, and all are stored eventually."""

    def body(number: int) -> dict[str, Any]:
        return {"name": f"rule {number}", "document": RULE["document"].replace("tenant", f"tenant{number}")}

    result = await asyncio.gather(*(api.client().post("/rules", json=body(number)) for number in range(4)))
    assert {one.status_code for one in result} == {201}


async def test_rule_is_not_stored_while_others_keep_changing(sqlite_api: AdminApi) -> None:
    repository, attempts = sqlite_api.backend.repository, 0
    document = RULE["document"]

    async def find_nothing(reader: Reader) -> None:
        return None

    async def store(compiled: CompiledRule) -> StoredRule:
        nonlocal attempts
        attempts += 1
        async with repository.change(Actor("another")) as unit:
            await unit.add_rule(StoredRule("", f"other {attempts}", document.replace("tenant", f"tenant{attempts}")))
        async with repository.change(Actor("tests")) as unit:
            return await compiled.add(unit)

    with pytest.raises(RulesChanged, match="other rules are being changed concurrently; retry"):
        await compile_and_store(sqlite_api.backend, StoredRule("", "mine", document), find_nothing, store)
    assert attempts == MAX_ATTEMPTS
    assert {rule.name for rule in await stored_rules(repository)} == {f"other {n + 1}" for n in range(attempts)}


async def test_import_gives_up_while_rules_keep_changing(sqlite_api: AdminApi) -> None:
    document, attempts = RULE["document"], 0

    class Contended(Repository):
        @asynccontextmanager
        async def change(self, actor: Actor, **more: Any) -> AsyncIterator[UnitOfWork]:
            nonlocal attempts
            attempts += 1
            other = StoredRule("", f"other {attempts}", document.replace("tenant", f"tenant{attempts}"))
            async with super().change(Actor("another")) as unit:
                await unit.add_rule(other)
            async with super().change(actor, **more) as unit:
                yield unit

    source = SourceDocument("mine.yaml", document.encode(), 100, Targeting())
    file_rules = {"mine": FileRule(source, StoredRule("", "mine", document))}
    repository = Contended(sqlite_api.backend.database)
    with pytest.raises(Conflict, match="other clients keep changing the stored rules; try again"):
        await import_rules(repository, Actor("tests"), file_rules, prune=False, dry_run=False)
    assert attempts == MAX_ATTEMPTS
    assert "mine" not in {rule.name for rule in await stored_rules(repository)}


# ── repeated ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
async def test_repeated_request_gets_the_first_response(api: AdminApi, admin: Client) -> None:
    once = {"Idempotency-Key": "a-key"}
    first = await admin.post("/tiers", json={"name": "gold", **TIER}, headers=once)
    await admin.put("/tiers/gold", json=TIER)
    again = await admin.post("/tiers", json={"name": "gold", **TIER}, headers=once)
    assert (first.status_code, "idempotency-replayed" in first.headers) == (201, False)
    assert (again.status_code, again.headers["idempotency-replayed"], again.content) == (201, "true", first.content)
    assert [again.headers[name] for name in ("etag", "location")] == ['"1"', "/api/v1/tiers/gold"]

    other_request = await admin.post("/tiers", json={"name": "silver", **TIER}, headers=once)
    assert (other_request.status_code, other_request.json()["type"][-22:]) == (422, "idempotency-key-reused")
    of_another = api.client(await api.token("write"))
    assert (await of_another.post("/tiers", json={"name": "silver", **TIER}, headers=once)).status_code == 201
    for _ in range(2):  # also if it is already deleted
        deleted = await admin.delete("/tiers/silver", headers={"Idempotency-Key": "another"})
        assert (deleted.status_code, deleted.content) == (204, b"")
    failed = await admin.delete("/tiers/none", headers={"Idempotency-Key": "failed"})
    assert failed.status_code == 404
    await admin.put("/tiers/none", json=TIER)
    assert (await admin.delete("/tiers/none", headers={"Idempotency-Key": "failed"})).status_code == 204

    api.clock.now_s += IDEMPOTENCY_TTL_S
    assert (await admin.post("/tiers", json={"name": "gold", **TIER}, headers=once)).status_code == 409


@pytest.mark.slow
@pytest.mark.parametrize(("path", "body"), [("/tiers", {"name": "gold", **TIER}), ("/rules", RULE)])
async def test_concurrent_repetitions_are_one_change(api: AdminApi, admin: Client, path: str, body: Any) -> None:
    once = {"Idempotency-Key": "a-key"}
    result = await asyncio.gather(*(api.client().post(path, json=body, headers=once) for _ in range(4)))
    result.append(await admin.post(path, json=body, headers=once))
    assert {one.status_code for one in result} == {201}
    assert sorted(one.headers.get("idempotency-replayed", "") for one in result) == ["", *["true"] * 4]
    assert len((await admin.get("/audit")).json()["items"]) == 1


@pytest.mark.slow
async def test_secret_is_returned_only_once(api: AdminApi, admin: Client) -> None:
    await admin.put("/users/alice", json={})
    for path, body in (("/keys", {"user_id": "alice"}), ("/tokens", {"name": "a", "role": "read"})):
        once = {"Idempotency-Key": f"once {path}".replace(" ", "")}
        first = await admin.post(path, json=body, headers=once)
        made = first.json().get("key_id") or first.json()["token_id"]
        again = await admin.post(path, json=body, headers=once)
        assert (again.status_code, again.json()["id"], again.headers["idempotency-replayed"]) == (409, made, "true")
        secret = (first.json().get("key") or first.json()["token"]).split("_", 2)[2]
        async with api.backend.repository.reading() as reader:
            kept = await reader.stored_response("RLS_ADMIN_TOKEN", once["Idempotency-Key"])
        assert kept is not None
        assert secret.encode() not in kept.body
    assert len((await admin.get("/keys")).json()["items"]) == 1


# ── dry run ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
async def test_dry_run_leaves_no_trace(api: AdminApi, admin: Client) -> None:
    await admin.put("/tiers/gold", json=TIER)
    await admin.put("/users/alice", json={})
    key = (await admin.post("/keys", json={"user_id": "alice"})).headers["location"]
    rule = (await admin.post("/rules", json=RULE)).headers["location"]
    token = (await admin.post("/tokens", json={"name": "a", "role": "read"})).json()["token_id"]
    result: list[None] = []
    api.backend.repository._on_commit = lambda: result.append(None)
    before = await snapshot(api)
    for method, path, body, status in (
        ("POST", "/tiers", {"name": "silver", **TIER}, 201),
        ("POST", "/tiers", {"name": "gold", **TIER}, 409),
        ("PUT", "/tiers/gold", {"limits": []}, 200),
        ("DELETE", "/tiers/gold", None, 204),
        ("PUT", "/users/bob", {"tier": "gold"}, 201),
        ("PUT", "/users/bob", {"tier": "silver"}, 422),
        ("PUT", "/users/alice/tier", {"tier": "gold"}, 200),
        ("POST", "/users/alice/override", {**TIER, "duration": "1h"}, 201),
        ("PUT", "/users/alice/block", {}, 200),
        ("DELETE", "/users/alice", None, 204),
        ("POST", "/keys", {"user_id": "alice"}, 201),
        ("PATCH", key, {"name": "x"}, 200),
        ("DELETE", key, None, 200),
        ("POST", "/rules", {**RULE, "name": "other", "priority": 7}, 201),
        ("DELETE", rule, None, 204),
        ("POST", "/tokens", {"name": "b", "role": "admin"}, 201),
        ("DELETE", f"/tokens/{token}", None, 200),
    ):
        tried = await admin.request(
            method, path, json=body, params={"dry_run": "true"}, headers={"Idempotency-Key": "dry"}
        )
        assert tried.status_code == status, (method, path, tried.text)
        assert ("dry-run" in tried.headers) == tried.is_success
        assert "location" not in tried.headers
        if path in ("/keys", "/tokens"):
            assert tried.json()[path[1:-1]] is None
    assert await snapshot(api) == before
    assert not result


@pytest.mark.slow
@pytest.mark.parametrize("query", ["dry_run=yes", "dry_run=true&dry_run=false", "dryrun=true", "dry_run="])
async def test_misspelt_dry_run_is_rejected(sqlite_api: AdminApi, sqlite_admin: Client, query: str) -> None:
    rejected = await sqlite_admin.put(f"/tiers/gold?{query}", json=TIER)
    assert (rejected.status_code, rejected.json()["errors"][0]["field"]) == (422, query.partition("=")[0])
    assert (await sqlite_admin.get("/tiers")).json()["items"] == []
