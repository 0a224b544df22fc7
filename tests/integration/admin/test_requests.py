"""Invalid requests: each gets an error with a reason, and none is an internal error."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from threading import current_thread
from typing import Any

import pytest
import yaml

from ratelimit_rls.admin import rules
from ratelimit_rls.admin.http.middleware import MAX_BODY_BYTES, ApiVersion
from ratelimit_rls.admin.http.schemas.requests import MAX_DOCUMENT_VALUES
from ratelimit_rls.database.database import Database
from ratelimit_rls.database.repository import Repository
from tests.integration.admin.admin_client import BOOTSTRAP_TOKEN, AdminApi, Client
from tests.integration.admin.eventually import longest_wait
from tests.support.databases import PASSWORD
from tests.support.ports import free_port

TIER = '{"name": "a", "limits": []}'
DEEP = '{"name": "a", "document": ' + "[" * 5000 + "]" * 5000 + "}"


BODIES: list[tuple[str, str, int, str | None]] = [
    ("/tiers", "", 422, "body"),
    ("/tiers", "{", 422, "body"),
    ("/tiers", "[]", 422, "body"),
    ("/tiers", "null", 422, "body"),
    ("/tiers", '{"limits": []}', 422, "name"),
    ("/tiers", '{"name": "a", "limits": [], "colour": 1}', 422, "colour"),
    ("/tiers", '{"name": 1, "limits": []}', 422, "name"),
    ("/tiers", '{"name": "", "limits": []}', 422, "name"),
    ("/tiers", '{"name": "a\\u0000", "limits": []}', 422, "name"),
    ("/tiers", '{"name": "a\\nb", "limits": []}', 422, "name"),
    ("/tiers", '{"name": " a", "limits": []}', 422, "name"),
    ("/tiers", '{"name": "a ", "limits": []}', 422, "name"),
    ("/keys", '{"user_id": " alice"}', 422, "user_id"),
    ("/tiers", '{"name": "\\ud800", "limits": []}', 422, "name"),
    ("/tiers", '{"name": "a", "limits": [], "description": "\\u0000"}', 422, "description"),
    ("/tiers", json.dumps({"name": "a" * 256, "limits": []}), 422, "name"),
    ("/tiers", '{"name": "a", "limits": [{"unit": "minute", "requests_per_unit": 1e400}]}', 422, None),
    ("/tiers", '{"name": "a", "limits": [{"unit": "minute", "requests_per_unit": NaN}]}', 422, None),
    (
        "/tiers",
        '{"name": "a", "limits": [{"unit": "minute", "requests_per_unit": 1' + "0" * 5000 + "}]}",
        400,
        None,
    ),
    ("/rules", DEEP, 400, None),
    ("/rules", '{"name": "a", "document": "\\ud800"}', 422, None),
    ("/rules", '{"name": "a", "document": "\\u0000"}', 422, None),
    ("/rules", '{"name": "a", "document": {"domain": "\\ud800"}}', 422, None),
    ("/rules", '{"name": "a", "document": "domain: a", "priority": 1e99}', 422, None),
    ("/counters/peek", '{"domain": "edge", "descriptors": []}', 422, "descriptors"),
    ("/counters/peek", '{"domain": "\\ud800", "descriptors": [{"entries": [{"key": "a"}]}]}', 422, "domain"),
]


async def test_invalid_bodies_are_rejected(sqlite_admin: Client) -> None:
    for path, body, status, field in BODIES:
        rejected = await sqlite_admin.post(path, content=body, headers={"Content-Type": "application/json"})
        assert rejected.status_code == status, (path, body, rejected.text)
        assert rejected.headers["content-type"] == "application/problem+json"
        result = rejected.json()
        assert result["status"] == status
        assert result["type"].startswith("urn:ratelimit-rls:problem:")
        if field is not None:
            assert field in result["errors"][0]["field"]
    assert (await sqlite_admin.get("/audit")).json()["items"] == []


async def test_names_in_paths_are_validated_on_write(sqlite_admin: Client) -> None:
    written = [
        ("/users/%20alice", {}),
        ("/users/alice%20", {}),
        ("/users/%20alice/block", {}),
        ("/users/alice", {"org": " acme"}),
        ("/tiers/gold%20", {"limits": []}),
    ]
    for path, body in written:
        rejected = await sqlite_admin.put(path, json=body)
        assert rejected.status_code in (400, 422), (path, rejected.text)
        assert "space" in rejected.text or "org" in rejected.text
    assert (await sqlite_admin.get("/users/%20alice")).status_code == 404
    assert (await sqlite_admin.get("/audit")).json()["items"] == []


def nested(levels: int) -> Any:
    document: Any = 0
    for _ in range(levels):
        document = [document]
    return {"domain": "edge", "descriptors": document}


@pytest.mark.slow
async def test_huge_object_documents_do_not_block_the_event_loop(sqlite_api: AdminApi, sqlite_admin: Client) -> None:
    path = (await sqlite_admin.post("/rules", json={"name": "a", "document": "domain: a"})).headers["location"]
    reader = sqlite_api.client(await sqlite_api.token("read"))
    simulated = [{"domain": "a", "descriptors": [{"entries": [{"key": "a"}]}], "at": "2030-01-01T00:00:00Z"}]
    half = {"domain": "a", "descriptors": [0] * (MAX_DOCUMENT_VALUES // 2)}
    for huge, expected_error in (({"domain": "a", "descriptors": [0] * 480_000}, "as text"), (nested(150), "levels")):
        async with longest_wait() as blocked_for:
            answers = [
                await sqlite_admin.post("/rules", json={"name": "b", "document": huge}),
                await sqlite_admin.put(path, json={"name": "b", "document": huge}),
                await reader.post("/decisions/simulate", json={"requests": simulated, "documents": [huge]}),
            ]
        for answer in answers:
            assert (answer.status_code, len(answer.json()["errors"])) == (422, 1)
            assert answer.json()["errors"][0]["field"].startswith("document")
            assert expected_error in answer.json()["detail"]
        assert blocked_for.longest_s < 1
    several = await reader.post("/decisions/simulate", json={"requests": simulated, "documents": [half, half]})
    assert (several.status_code, several.json()["errors"][0]["field"]) == (422, "documents")


@pytest.mark.slow
async def test_object_documents_are_dumped_in_a_thread(sqlite_admin: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    document = {
        "domain": "zürich",
        "descriptors": [
            {"key": f"{number}: é\n'\" #", "rate_limit": {"unit": "minute", "requests_per_unit": number}}
            for number in range(50)
        ],
        "a": None,
    }
    threads, dumped = [], rules._dump_yaml

    def noting(document: dict[str, Any]) -> str:
        threads.append(current_thread())
        return dumped(document)

    monkeypatch.setattr(rules, "_dump_yaml", noting)
    assert await rules.document_text(document) == yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    del document["a"]
    made = await sqlite_admin.post("/rules", json={"name": "a", "document": document})
    assert yaml.safe_load(made.json()["document"]) == document
    assert len(threads) == 2
    assert current_thread() not in threads


@pytest.mark.slow
async def test_many_validation_errors_do_not_block_the_event_loop(sqlite_admin: Client) -> None:
    bodies = {
        "/counters/peek": {f"field{number}": 0 for number in range(60_000)},
        "/decisions/simulate": {"requests": [{}] * 10_000},
        "/decisions/check": {"domain": "a", "descriptors": [{"entries": [{}] * 64}] * 100},
    }
    for path, body in bodies.items():
        async with longest_wait() as blocked_for:
            rejected = await sqlite_admin.post(path, json=body)
        assert (rejected.status_code, len(rejected.json()["errors"]) <= 100) == (422, True), path
        assert blocked_for.longest_s < 0.3, path


async def test_body_must_have_json_content_type(sqlite_admin: Client) -> None:
    for content_type in ("text/plain", "application/x-www-form-urlencoded", "", "application/jsonp"):
        rejected = await sqlite_admin.post("/tiers", content=TIER, headers={"Content-Type": content_type})
        assert (rejected.status_code, rejected.json()["type"][-8:]) == (415, "not-json"), content_type
    assert (await sqlite_admin.get("/tiers")).json()["items"] == []
    content_type = "Application/JSON; charset=utf-8"
    assert (await sqlite_admin.post("/tiers", content=TIER, headers={"Content-Type": content_type})).status_code == 201


@pytest.mark.slow
async def test_large_bodies_are_rejected(sqlite_admin: Client) -> None:
    too_large = b'{"name": "' + b"a" * MAX_BODY_BYTES
    content_type = await sqlite_admin.post("/tiers", content=too_large)
    assert (content_type.status_code, content_type.json()["type"][-9:]) == (413, "too-large")

    async def unsaid() -> AsyncIterator[bytes]:
        for at in range(0, len(too_large), 65536):
            yield too_large[at : at + 65536]

    assert (await sqlite_admin.post("/tiers", content=unsaid())).status_code == 413


async def test_unknown_paths_and_methods_are_rejected(sqlite_admin: Client) -> None:
    for path, status in {
        "/nothing": 404,
        "/users/%00": 422,
        "/users/%ff": 422,
        "/users/a%0Ab/limits": 422,
        f"/users/{'a' * 256}": 422,
        "/rules/not-a-uuid": 422,
        "/keys/UPPER": 422,
        "/users/alice?colour=1": 422,
        "/audit?subject=%00": 422,
    }.items():
        rejected = await sqlite_admin.get(path)
        assert rejected.status_code == status, (path, rejected.text)
        assert rejected.headers["content-type"] == "application/problem+json"
    wrong_method = await sqlite_admin.request("TRACE", "/rules")
    assert (wrong_method.status_code, wrong_method.headers["allow"]) == (405, "GET, POST")
    for path, allowed in {"/users/a%2Fb": "DELETE, GET, PUT", "/decisions/check": "POST", "/docs": "GET"}.items():
        wrong_method = await sqlite_admin.patch(path)
        assert (wrong_method.status_code, wrong_method.headers["allow"]) == (405, allowed)


@pytest.mark.slow
async def test_every_response_has_a_request_id(sqlite_api: AdminApi, sqlite_admin: Client) -> None:
    given = await sqlite_admin.get("/nothing", headers={"X-Request-Id": "mine-1"})
    assert (given.headers["x-request-id"], given.json()["request_id"]) == ("mine-1", "mine-1")
    for odd in ("a b", "x" * 129, 'a"b'):
        made = await sqlite_admin.get("/tiers", headers={"X-Request-Id": odd})
        assert made.headers["x-request-id"] not in ("", odd)
    assert (await sqlite_admin.get("/tiers")).headers["cache-control"] == "no-store"


@pytest.mark.slow
async def test_deprecated_version_sends_headers(sqlite_api: AdminApi) -> None:
    old = ApiVersion("v1", datetime(2030, 1, 1, tzinfo=UTC), datetime(2030, 7, 1, tzinfo=UTC), "v2")
    sqlite_api.versions = (old,)
    sqlite_api.__post_init__()
    client = sqlite_api.client()
    for _ in range(2):
        await client.post("/tokens", json={"name": "a", "role": "read"})
    answers = [
        await client.get("/tokens?limit=1"),
        await client.get("/nothing"),
        await sqlite_api.client(None).get("/tiers"),
    ]
    for answer in answers:
        assert answer.headers["deprecation"] == "@1893456000"
        assert answer.headers["sunset"] == "Mon, 01 Jul 2030 00:00:00 GMT"
        assert '</api/v2>; rel="successor-version"' in answer.headers["link"]
    assert 'rel="next"' in answers[0].headers["link"]
    assert "deprecation" not in (await client.get("/healthz")).headers


@pytest.mark.slow
async def test_unavailable_database_is_503(sqlite_api: AdminApi, sqlite_admin: Client) -> None:
    await sqlite_admin.put("/users/alice", json={"limits": [{"unit": "minute", "requests_per_unit": 7}]})
    await sqlite_api.follow()
    token = await sqlite_api.token("read")
    nowhere = Database(f"postgresql://user:{PASSWORD}@127.0.0.1:{free_port()}/records")
    away = sqlite_api.with_backend(repository=Repository(nowhere), database=nowhere)
    client = away.client(BOOTSTRAP_TOKEN)
    request_body = {"domain": "edge", "descriptors": [{"entries": [{"key": "user", "value": "alice"}]}]}
    for result in (
        await client.get("/users/alice"),
        await client.put("/users/alice", json={}),
        await client.get("/usage"),
        await client.get("/decisions"),
        await client.post("/counters/reset", json=request_body),
        await away.client(token).get("/sources"),
    ):
        assert (result.status_code, result.headers["retry-after"]) == (503, "2"), result.text
        assert result.json()["type"] == "urn:ratelimit-rls:problem:unavailable"
        assert "127.0.0.1" not in result.text
    # Operations that need no database still work.
    assert (await client.get("/users/alice/limits")).json()["source"] == "custom"
    assert (await client.get("/sources")).status_code == 200
    for path in ("/counters/peek", "/decisions/check", "/decisions/explain"):
        assert (await client.post(path, json=request_body)).status_code == 200, path
    simulated = {"requests": [{**request_body, "at": "2030-01-01T00:00:00Z"}]}
    assert (await client.post("/decisions/simulate", json=simulated)).status_code == 200
    without_tokens = sqlite_api.with_backend(repository=Repository(nowhere), database=nowhere, needs_tokens=False)
    anybody = without_tokens.client(None, host="localhost")
    assert [(await anybody.get(path)).status_code for path in ("/sources", "/users/alice")] == [200, 503]
    assert (await away.client(None).get("/healthz")).status_code == 200
