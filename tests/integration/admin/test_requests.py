"""Requests that cannot be carried out, whatever they ask: each is told why, and nothing is a fault of the service."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from threading import current_thread
from typing import Any

import pytest
import yaml

from ratelimit_rls.records.database import Database
from ratelimit_rls.records.desk import Desk
from ratelimit_rls.transport.http.admin import documents
from ratelimit_rls.transport.http.admin.frame import MOST_BODY_BYTES
from ratelimit_rls.transport.http.admin.models import MOST_PARTS
from ratelimit_rls.transport.http.admin.versions import Version
from tests.databases import PASSWORD
from tests.integration.admin.office import FIRST_TOKEN, Client, Office
from tests.integration.admin.waited import longest_wait
from tests.process import free_port

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


async def test_bodies_are_looked_at(any_admin: Client) -> None:
    for path, body, status, field in BODIES:
        refused = await any_admin.post(path, content=body, headers={"Content-Type": "application/json"})
        assert refused.status_code == status, (path, body, refused.text)
        assert refused.headers["content-type"] == "application/problem+json"
        told = refused.json()
        assert told["status"] == status
        assert told["type"].startswith("urn:ratelimit-rls:problem:")
        if field is not None:
            assert field in told["errors"][0]["field"]
    assert (await any_admin.get("/audit")).json()["items"] == []


def nested(levels: int) -> Any:
    document: Any = 0
    for _ in range(levels):
        document = [document]
    return {"domain": "edge", "descriptors": document}


@pytest.mark.slow
async def test_documents_that_are_vast_objects_hold_up_nobody(any_office: Office, any_admin: Client) -> None:
    path = (await any_admin.post("/rules", json={"name": "a", "document": "domain: a"})).headers["location"]
    reader = any_office.client(await any_office.token("read"))
    simulated = [{"domain": "a", "descriptors": [{"entries": [{"key": "a"}]}], "at": "2030-01-01T00:00:00Z"}]
    half = {"domain": "a", "descriptors": [0] * (MOST_PARTS // 2)}
    for vast, why in (({"domain": "a", "descriptors": [0] * 480_000}, "as text"), (nested(150), "too deep")):
        async with longest_wait() as held_up:
            answers = [
                await any_admin.post("/rules", json={"name": "b", "document": vast}),
                await any_admin.put(path, json={"name": "b", "document": vast}),
                await reader.post("/decisions/simulate", json={"requests": simulated, "documents": [vast]}),
            ]
        for answer in answers:
            assert (answer.status_code, len(answer.json()["errors"])) == (422, 1)
            assert answer.json()["errors"][0]["field"].startswith("document")
            assert why in answer.json()["detail"]
        assert held_up.longest_s < 1
    several = await reader.post("/decisions/simulate", json={"requests": simulated, "documents": [half, half]})
    assert (several.status_code, several.json()["errors"][0]["field"]) == (422, "documents")


@pytest.mark.slow
async def test_an_object_is_written_as_yaml_beside_the_loop(any_admin: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    document = {
        "domain": "zürich",
        "descriptors": [
            {"key": f"{number}: é\n'\" #", "rate_limit": {"unit": "minute", "requests_per_unit": number}}
            for number in range(50)
        ],
        "a": None,
    }
    threads, dumped = [], documents._dumped

    def noting(document: dict[str, Any]) -> str:
        threads.append(current_thread())
        return dumped(document)

    monkeypatch.setattr(documents, "_dumped", noting)
    assert await documents.document_text(document) == yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    del document["a"]
    made = await any_admin.post("/rules", json={"name": "a", "document": document})
    assert yaml.safe_load(made.json()["document"]) == document
    assert len(threads) == 2
    assert current_thread() not in threads


@pytest.mark.slow
async def test_very_many_mistakes_hold_up_nobody(any_admin: Client) -> None:
    bodies = {
        "/counters/peek": {f"field{number}": 0 for number in range(60_000)},
        "/decisions/simulate": {"requests": [{}] * 10_000},
        "/decisions/check": {"domain": "a", "descriptors": [{"entries": [{}] * 64}] * 100},
    }
    for path, body in bodies.items():
        async with longest_wait() as held_up:
            refused = await any_admin.post(path, json=body)
        assert (refused.status_code, len(refused.json()["errors"]) <= 100) == (422, True), path
        assert held_up.longest_s < 0.3, path


async def test_a_body_says_that_it_is_json(any_admin: Client) -> None:
    for said in ("text/plain", "application/x-www-form-urlencoded", "", "application/jsonp"):
        refused = await any_admin.post("/tiers", content=TIER, headers={"Content-Type": said})
        assert (refused.status_code, refused.json()["type"][-8:]) == (415, "not-json"), said
    assert (await any_admin.get("/tiers")).json()["items"] == []
    said = "Application/JSON; charset=utf-8"
    assert (await any_admin.post("/tiers", content=TIER, headers={"Content-Type": said})).status_code == 201


@pytest.mark.slow
async def test_a_body_has_a_size(any_admin: Client) -> None:
    too_large = b'{"name": "' + b"a" * MOST_BODY_BYTES
    said = await any_admin.post("/tiers", content=too_large)
    assert (said.status_code, said.json()["type"][-9:]) == (413, "too-large")

    async def unsaid() -> AsyncIterator[bytes]:
        for at in range(0, len(too_large), 65536):
            yield too_large[at : at + 65536]

    assert (await any_admin.post("/tiers", content=unsaid())).status_code == 413


async def test_paths_are_looked_at(any_admin: Client) -> None:
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
        refused = await any_admin.get(path)
        assert refused.status_code == status, (path, refused.text)
        assert refused.headers["content-type"] == "application/problem+json"
    wrong_method = await any_admin.request("TRACE", "/rules")
    assert (wrong_method.status_code, wrong_method.headers["allow"]) == (405, "GET, POST")


@pytest.mark.slow
async def test_every_answer_has_the_id_of_its_request(any_office: Office, any_admin: Client) -> None:
    given = await any_admin.get("/nothing", headers={"X-Request-Id": "mine-1"})
    assert (given.headers["x-request-id"], given.json()["request_id"]) == ("mine-1", "mine-1")
    for odd in ("a b", "x" * 129, 'a"b'):
        made = await any_admin.get("/tiers", headers={"X-Request-Id": odd})
        assert made.headers["x-request-id"] not in ("", odd)
    assert (await any_admin.get("/tiers")).headers["cache-control"] == "no-store"


@pytest.mark.slow
async def test_a_version_that_ages_says_so(any_office: Office) -> None:
    old = Version("v1", datetime(2030, 1, 1, tzinfo=UTC), datetime(2030, 7, 1, tzinfo=UTC), "v2")
    any_office.versions = (old,)
    any_office.__post_init__()
    client = any_office.client()
    for _ in range(2):
        await client.post("/tokens", json={"name": "a", "role": "read"})
    answers = [
        await client.get("/tokens?limit=1"),
        await client.get("/nothing"),
        await any_office.client(None).get("/tiers"),
    ]
    for answer in answers:
        assert answer.headers["deprecation"] == "@1893456000"
        assert answer.headers["sunset"] == "Mon, 01 Jul 2030 00:00:00 GMT"
        assert '</api/v2>; rel="successor-version"' in answer.headers["link"]
    assert 'rel="next"' in answers[0].headers["link"]
    assert "deprecation" not in (await client.get("/healthz")).headers


@pytest.mark.slow
async def test_a_database_that_is_away_is_told_as_such(any_office: Office, any_admin: Client) -> None:
    await any_admin.put("/users/alice", json={"limits": [{"unit": "minute", "requests_per_unit": 7}]})
    await any_office.follow()
    token = await any_office.token("read")
    nowhere = Database(f"postgresql://user:{PASSWORD}@127.0.0.1:{free_port()}/records")
    away = any_office.with_backend(desk=Desk(nowhere), database=nowhere)
    client = away.client(FIRST_TOKEN)
    for told in (
        await client.get("/users/alice"),
        await client.put("/users/alice", json={}),
        await client.get("/usage"),
        await away.client(token).get("/sources"),
    ):
        assert (told.status_code, told.headers["retry-after"]) == (503, "2"), told.text
        assert told.json()["type"] == "urn:ratelimit-rls:problem:unavailable"
        assert "127.0.0.1" not in told.text
    # What this process knows by itself is still told.
    assert (await client.get("/users/alice/limits")).json()["source"] == "custom"
    assert (await client.get("/sources")).status_code == 200
    asked = {"domain": "edge", "descriptors": [{"entries": [{"key": "user", "value": "alice"}]}]}
    assert (await client.post("/counters/peek", json=asked)).status_code == 200
    assert (await away.client(None).get("/healthz")).status_code == 200
