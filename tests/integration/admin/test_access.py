"""Authentication and authorization of every operation in the OpenAPI document, so that none is missed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ratelimit_rls.admin.auth import RECENT_S
from ratelimit_rls.admin.http.app import documented_app
from ratelimit_rls.admin.rate_limits import (
    FAILED_LOGINS_PER_MINUTE,
    READS_PER_MINUTE,
    WRITES_PER_MINUTE,
    AdminRateLimits,
)
from ratelimit_rls.database.database import Database
from ratelimit_rls.database.repository import Repository
from ratelimit_rls.identity.key_format import new_secret
from tests.integration.admin.admin_client import BOOTSTRAP_TOKEN, NOW_S, AdminApi, Client
from tests.support.ports import free_port

EXAMPLES = {
    "rule_id": "6f1e0a52-0000-4000-8000-000000000000",
    "key_id": "abcdefghijkl",
    "token_id": "abcdefghijkl",
    "user_id": "alice",
    "name": "gold",
}
RANKS = {"read": 0, "write": 1, "admin": 2}


def operations() -> Iterator[tuple[str, str, str | None]]:
    """Return method, path and required role of each operation; None: no token is needed."""
    for path, found in documented_app().openapi()["paths"].items():
        for method, operation in found.items():
            security = operation.get("security")
            yield method.upper(), path.format(**EXAMPLES), security[0]["token"][0] if security else None


GUARDED = [(method, path, role) for method, path, role in operations() if role is not None]


def test_operations_without_a_token() -> None:
    assert [(method, path) for method, path, role in operations() if role is None] == [("GET", "/healthz")]
    assert len(GUARDED) >= 39


def test_default_roles_of_operations() -> None:
    for method, path, role in GUARDED:
        is_read = method == "GET" or path.endswith(("/peek", "/explain", "/simulate"))
        needed = "admin" if "/tokens" in path else "read" if is_read else "write"
        assert role == needed, (method, path)


@pytest.mark.slow
async def test_invalid_tokens_are_rejected_everywhere(sqlite_api: AdminApi) -> None:
    good = await sqlite_api.token("admin")
    forged = good[:-1] + ("A" if good[-1] != "A" else "B")
    expired = await sqlite_api.token("admin", expires_s=NOW_S)
    revoked = await sqlite_api.token("admin")
    await sqlite_api.revoke(revoked)
    bad = {
        "missing": None,
        "empty": "",
        "forged": forged,
        "expired": expired,
        "revoked": revoked,
        "unknown": new_secret("rla").text,
        "of a caller": new_secret("rlk").text,
        "part of the first": BOOTSTRAP_TOKEN[:-1],
        "long": "rla_" + 100_000 * "x",
        "not ASCII": "rla_\xff",
    }
    number = 0
    for method, path, _ in GUARDED:
        for what, token in bad.items():
            number += 1
            client = sqlite_api.client(address=f"198.51.{number // 250}.{number % 250}")
            headers = {b"Authorization": b"Bearer " + token.encode("latin-1")} if token is not None else {}
            del client.headers["Authorization"]
            rejected = await client.request(method, path, headers=headers, content=b"not json")
            assert rejected.status_code == 401, (what, method, path)
            assert rejected.headers["www-authenticate"].startswith("Bearer")
            assert rejected.headers["content-type"] == "application/problem+json"
            assert not token or token not in rejected.text


@pytest.mark.slow
async def test_each_role_allows_its_operations_only(sqlite_api: AdminApi) -> None:
    for role, rank in RANKS.items():
        client = sqlite_api.client(await sqlite_api.token(role))
        for method, path, needed in GUARDED:
            sqlite_api.clock.now_s += 1  # to stay below the rate limits
            result = await client.request(method, path, json=None)
            assert (result.status_code == 403) == (rank < RANKS[needed]), (role, method, path)
            assert result.status_code != 401


async def test_failed_logins_are_limited_by_address(sqlite_api: AdminApi) -> None:
    token = await sqlite_api.token("read")
    attacker = sqlite_api.client(new_secret("rla").text, address="2001:db8::1")
    for _ in range(FAILED_LOGINS_PER_MINUTE):
        assert (await attacker.get("/sources")).status_code == 401
    locked_out = await attacker.get("/sources")
    assert (locked_out.status_code, locked_out.json()["type"]) == (429, "urn:ratelimit-rls:problem:too-many-requests")
    assert 1 <= int(locked_out.headers["retry-after"]) <= 120  # bounds of a sliding window
    # A valid token that was not used recently is rejected unverified, also from a neighbouring address.
    assert (await sqlite_api.client(token, address="2001:db8::2").get("/sources")).status_code == 429
    assert (await sqlite_api.client(token, address="2001:db8:0:1::1").get("/sources")).status_code == 200
    sqlite_api.clock.now_s += 120
    assert (await sqlite_api.client(token, address="2001:db8::1").get("/sources")).status_code == 200


async def lock_out(api: AdminApi) -> None:
    attacker = api.client(new_secret("rla").text)
    for _ in range(FAILED_LOGINS_PER_MINUTE):
        await attacker.get("/sources")
    assert (await attacker.get("/sources")).status_code == 429


@pytest.mark.slow
async def test_recent_tokens_are_not_locked_out_by_failed_logins(sqlite_api: AdminApi) -> None:
    known, fresh = await sqlite_api.token("read"), await sqlite_api.token("read")
    assert (await sqlite_api.client(known).get("/sources")).status_code == 200
    await lock_out(sqlite_api)
    assert (await sqlite_api.client(BOOTSTRAP_TOKEN).get("/sources")).status_code == 200
    assert (await sqlite_api.client(known).get("/sources")).status_code == 200
    assert (await sqlite_api.client(fresh).get("/sources")).status_code == 429
    # It is still verified: a revoked token is rejected at once, and is no longer recent.
    await sqlite_api.revoke(known)
    for _ in range(2):
        assert (await sqlite_api.client(known).get("/sources")).status_code == 429
    sqlite_api.clock.now_s += 120
    assert (await sqlite_api.client(known).get("/sources")).status_code == 401


@pytest.mark.slow
async def test_token_counts_as_recent_for_fifteen_minutes(sqlite_api: AdminApi) -> None:
    token = await sqlite_api.token("read")
    assert (await sqlite_api.client(token).get("/sources")).status_code == 200
    sqlite_api.clock.now_s += RECENT_S - 1
    await lock_out(sqlite_api)
    assert (await sqlite_api.client(token, address="192.0.2.7").get("/sources")).status_code == 200
    sqlite_api.clock.now_s += RECENT_S
    await lock_out(sqlite_api)
    assert (await sqlite_api.client(token).get("/sources")).status_code == 429


@pytest.mark.slow
async def test_locked_out_address_causes_no_database_query(sqlite_api: AdminApi) -> None:
    await lock_out(sqlite_api)
    nowhere = Database(f"postgresql://user@127.0.0.1:{free_port()}/records")
    away = sqlite_api.with_backend(repository=Repository(nowhere), database=nowhere)
    assert (await away.client(await sqlite_api.token("read")).get("/sources")).status_code == 429
    assert (await away.client(await sqlite_api.token("read"), address="192.0.2.7").get("/sources")).status_code == 503


async def test_missing_token_is_not_a_failed_login(sqlite_api: AdminApi) -> None:
    anonymous = sqlite_api.client(None)
    for wrong_headers in ({}, {"Authorization": "Basic YTpi"}, {"Authorization": "Bearer "}) * FAILED_LOGINS_PER_MINUTE:
        assert (await anonymous.get("/sources", headers=wrong_headers)).status_code == 401
    assert (await sqlite_api.client(new_secret("rla").text).get("/sources")).status_code == 401


@pytest.mark.slow
async def test_reads_and_writes_of_a_token_are_limited(sqlite_api: AdminApi) -> None:
    token = await sqlite_api.token("write")
    client, other = sqlite_api.client(token), sqlite_api.client(await sqlite_api.token("write"))
    used = AdminRateLimits(sqlite_api.backend.store)
    for is_write, most in ((False, READS_PER_MINUTE), (True, WRITES_PER_MINUTE)):
        for _ in range(most - 1):
            assert await used.count(token.split("_")[1], is_write=is_write) is None

    async def write() -> int:
        return (await client.put("/tiers/a", json={"limits": []})).status_code

    assert ((await client.get("/sources")).status_code, await write()) == (200, 201)
    rejected = await client.get("/sources")
    assert (rejected.status_code, int(rejected.headers["retry-after"]) > 0) == (429, True)
    assert await write() == 429
    assert (await other.get("/sources")).status_code == 200
    sqlite_api.clock.now_s += 120
    assert ((await client.get("/sources")).status_code, await write()) == (200, 200)


@pytest.mark.slow
async def test_without_tokens_only_loopback_hosts_are_served(sqlite_api: AdminApi) -> None:
    """A foreign web page can make a browser send requests to a loopback address under its own host name."""
    open_office = sqlite_api.with_backend(needs_tokens=False)

    def client(host: str) -> Client:
        return open_office.client(None, address="127.0.0.1", host=host)

    for host in ("127.0.0.1", "localhost:8082", "[::1]:8082", "admin.localhost"):
        assert (await client(host).put("/tiers/a", json={"limits": []})).is_success, host
    for host in ("evil.example", "localhost.evil.example", "10.0.0.1", "127.0.0.1.evil.example"):
        rejected = await client(host).get("/tiers")
        assert (rejected.status_code, rejected.json()["type"][-11:]) == (421, "misdirected"), host
    for origin in (
        "https://evil.example",
        "http://localhost:3000",
        "http://127.0.0.1",
        "http://[",
        "http://[::1",
        "null",
        "",
        "localhost",
        "http://localhost@evil.example",
        "http://evil.example://localhost",
        "http://evil.example#localhost",
    ):
        elsewhere = await client("localhost").get("/tiers", headers={"Origin": origin})
        assert (elsewhere.status_code, elsewhere.json()["type"][-9:]) == (403, "forbidden"), origin
    for host in ("localhost:8082", "localhost.:8082", "127.0.0.1:8082", "[::1]:8082"):
        assert (await client(host).get("/tiers", headers={"Origin": f"http://{host}"})).status_code == 200, host
    (row,) = (await client("localhost").get("/audit", params={"limit": 1})).json()["items"]
    assert row["actor"] == "anybody"


@pytest.mark.slow
async def test_cross_origin_requests_are_rejected_before_authentication(sqlite_api: AdminApi) -> None:
    client = sqlite_api.client()
    for headers in (
        {"Origin": "https://evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ):
        rejected = await client.get("/tiers", headers=headers)
        assert (rejected.status_code, rejected.json()["type"][-9:]) == (403, "forbidden"), headers
    for headers in ({"Sec-Fetch-Site": "same-origin"}, {"Sec-Fetch-Site": "none"}, {}):
        assert (await client.get("/tiers", headers=headers)).status_code == 200, headers


@pytest.mark.slow
async def test_health_and_documents_need_no_token(sqlite_api: AdminApi) -> None:
    client = sqlite_api.client(None)
    assert (await client.get("/healthz")).json() == {"status": "ok"}
    assert (await client.get("/openapi.json")).json()["openapi"].startswith("3.1")
    page = await client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "/api/v1/users/{user_id}/override" in page.text
    assert "https://" not in page.text.replace("https://json-schema.org", "")
    assert "<li><b>Ids</b> in paths are percent-encoded: the path of the user <code>acme/alice</code>" in page.text
    assert "**" not in page.text
