"""Who may come in: every route of the OpenAPI document itself, so that none can be forgotten."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ratelimit_rls.identity.secrets import new_secret
from ratelimit_rls.records.database import Database
from ratelimit_rls.records.desk import Desk
from ratelimit_rls.transport.http.admin.app import documented_app
from ratelimit_rls.transport.http.admin.known_tokens import KNOWN_S, MOST_KNOWN, KnownTokens
from ratelimit_rls.transport.http.admin.own_limits import (
    FAILED_LOGINS_A_MINUTE,
    READS_A_MINUTE,
    WRITES_A_MINUTE,
    OwnLimits,
)
from ratelimit_rls.transport.http.admin.page import docs_page
from tests.integration.admin.office import FIRST_TOKEN, NOW_S, Client, Office
from tests.process import free_port

EXAMPLES = {
    "rule_id": "6f1e0a52-0000-4000-8000-000000000000",
    "key_id": "abcdefghijkl",
    "token_id": "abcdefghijkl",
    "user_id": "alice",
    "name": "gold",
}
RANKS = {"read": 0, "write": 1, "admin": 2}


def operations() -> Iterator[tuple[str, str, str | None]]:
    """Method, path, and the role it needs; None: no token."""
    for path, found in documented_app().openapi()["paths"].items():
        for method, operation in found.items():
            security = operation.get("security")
            yield method.upper(), path.format(**EXAMPLES), security[0]["token"][0] if security else None


GUARDED = [(method, path, role) for method, path, role in operations() if role is not None]


def test_what_needs_no_token() -> None:
    assert [(method, path) for method, path, role in operations() if role is None] == [("GET", "/healthz")]
    assert len(GUARDED) >= 39


def test_reading_needs_less_than_writing() -> None:
    for method, path, role in GUARDED:
        is_read = method == "GET" or path.endswith(("/peek", "/explain", "/simulate"))
        needed = "admin" if "/tokens" in path else "read" if is_read else "write"
        assert role == needed, (method, path)


@pytest.mark.slow
async def test_bad_tokens_open_nothing(any_office: Office) -> None:
    good = await any_office.token("admin")
    forged = good[:-1] + ("A" if good[-1] != "A" else "B")
    expired = await any_office.token("admin", expires_s=NOW_S)
    revoked = await any_office.token("admin")
    await any_office.revoke(revoked)
    bad = {
        "missing": None,
        "empty": "",
        "forged": forged,
        "expired": expired,
        "revoked": revoked,
        "unknown": new_secret("rla").text,
        "of a caller": new_secret("rlk").text,
        "part of the first": FIRST_TOKEN[:-1],
        "long": "rla_" + 100_000 * "x",
        "not ASCII": "rla_\xff",
    }
    number = 0
    for method, path, _ in GUARDED:
        for what, token in bad.items():
            number += 1
            client = any_office.client(address=f"198.51.{number // 250}.{number % 250}")
            headers = {b"Authorization": b"Bearer " + token.encode("latin-1")} if token is not None else {}
            del client.headers["Authorization"]
            refused = await client.request(method, path, headers=headers, content=b"not json")
            assert refused.status_code == 401, (what, method, path)
            assert refused.headers["www-authenticate"].startswith("Bearer")
            assert refused.headers["content-type"] == "application/problem+json"
            assert not token or token not in refused.text


@pytest.mark.slow
async def test_a_role_opens_what_it_may_and_no_more(any_office: Office) -> None:
    for role, rank in RANKS.items():
        client = any_office.client(await any_office.token(role))
        for method, path, needed in GUARDED:
            any_office.clock.now_s += 1  # so that nobody is too quick
            told = await client.request(method, path, json=None)
            assert (told.status_code == 403) == (rank < RANKS[needed]), (role, method, path)
            assert told.status_code != 401


async def test_failed_logins_are_limited_by_address(any_office: Office) -> None:
    token = await any_office.token("read")
    liar = any_office.client(new_secret("rla").text, address="2001:db8::1")
    for _ in range(FAILED_LOGINS_A_MINUTE):
        assert (await liar.get("/sources")).status_code == 401
    locked_out = await liar.get("/sources")
    assert (locked_out.status_code, locked_out.json()["type"]) == (429, "urn:ratelimit-rls:problem:too-many-requests")
    assert 1 <= int(locked_out.headers["retry-after"]) <= 120  # as a sliding window has it
    # A good token that was not seen of late is not even looked at; from a neighbouring address, neither.
    assert (await any_office.client(token, address="2001:db8::2").get("/sources")).status_code == 429
    assert (await any_office.client(token, address="2001:db8:0:1::1").get("/sources")).status_code == 200
    any_office.clock.now_s += 120
    assert (await any_office.client(token, address="2001:db8::1").get("/sources")).status_code == 200


async def lock_out(office: Office) -> None:
    liar = office.client(new_secret("rla").text)
    for _ in range(FAILED_LOGINS_A_MINUTE):
        await liar.get("/sources")
    assert (await liar.get("/sources")).status_code == 429


@pytest.mark.slow
async def test_those_who_fail_lock_out_nobody_who_is_known(any_office: Office) -> None:
    known, fresh = await any_office.token("read"), await any_office.token("read")
    assert (await any_office.client(known).get("/sources")).status_code == 200
    await lock_out(any_office)
    assert (await any_office.client(FIRST_TOKEN).get("/sources")).status_code == 200
    assert (await any_office.client(known).get("/sources")).status_code == 200
    assert (await any_office.client(fresh).get("/sources")).status_code == 429
    # It is still looked up: a revoked one is out at once, and then is as unknown as any other.
    await any_office.revoke(known)
    for _ in range(2):
        assert (await any_office.client(known).get("/sources")).status_code == 429
    any_office.clock.now_s += 120
    assert (await any_office.client(known).get("/sources")).status_code == 401


@pytest.mark.slow
async def test_a_token_is_known_for_a_quarter_of_an_hour(any_office: Office) -> None:
    token = await any_office.token("read")
    assert (await any_office.client(token).get("/sources")).status_code == 200
    any_office.clock.now_s += KNOWN_S - 1
    await lock_out(any_office)
    assert (await any_office.client(token, address="192.0.2.7").get("/sources")).status_code == 200
    any_office.clock.now_s += KNOWN_S
    await lock_out(any_office)
    assert (await any_office.client(token).get("/sources")).status_code == 429


@pytest.mark.slow
async def test_whoever_is_locked_out_does_not_reach_the_database(any_office: Office) -> None:
    await lock_out(any_office)
    nowhere = Database(f"postgresql://user@127.0.0.1:{free_port()}/records")
    away = any_office.with_backend(desk=Desk(nowhere), database=nowhere)
    assert (await away.client(await any_office.token("read")).get("/sources")).status_code == 429
    assert (await away.client(await any_office.token("read"), address="192.0.2.7").get("/sources")).status_code == 503


async def test_to_send_no_token_is_no_failed_login(any_office: Office) -> None:
    nobody = any_office.client(None)
    for said in ({}, {"Authorization": "Basic YTpi"}, {"Authorization": "Bearer "}) * FAILED_LOGINS_A_MINUTE:
        assert (await nobody.get("/sources", headers=said)).status_code == 401
    assert (await any_office.client(new_secret("rla").text).get("/sources")).status_code == 401


def test_few_tokens_are_known_and_the_newest_of_them() -> None:
    now_s = NOW_S
    known = KnownTokens(lambda: now_s)
    for number in range(MOST_KNOWN + 1):
        known.add(number.to_bytes(32))
        known.add((1).to_bytes(32))
    assert [number for number in range(MOST_KNOWN + 1) if number.to_bytes(32) not in known] == [0]
    known.discard((1).to_bytes(32))
    assert (1).to_bytes(32) not in known
    now_s += KNOWN_S
    assert (2).to_bytes(32) not in known


@pytest.mark.slow
async def test_a_token_has_so_many_reads_and_writes_a_minute(any_office: Office) -> None:
    token = await any_office.token("write")
    client, other = any_office.client(token), any_office.client(await any_office.token("write"))
    used = OwnLimits(any_office.backend.store)
    for is_write, most in ((False, READS_A_MINUTE), (True, WRITES_A_MINUTE)):
        for _ in range(most - 1):
            assert await used.count(token.split("_")[1], is_write=is_write) is None

    async def write() -> int:
        return (await client.put("/tiers/a", json={"limits": []})).status_code

    assert ((await client.get("/sources")).status_code, await write()) == (200, 201)
    refused = await client.get("/sources")
    assert (refused.status_code, int(refused.headers["retry-after"]) > 0) == (429, True)
    assert await write() == 429
    assert (await other.get("/sources")).status_code == 200
    any_office.clock.now_s += 120
    assert ((await client.get("/sources")).status_code, await write()) == (200, 200)


@pytest.mark.slow
async def test_without_tokens_only_this_machine_is_heard(any_office: Office) -> None:
    """A page elsewhere can have a browser send requests to a loopback address, under a name of its own."""
    open_office = any_office.with_backend(needs_tokens=False)

    def client(host: str) -> Client:
        return open_office.client(None, address="127.0.0.1", host=host)

    for host in ("127.0.0.1", "localhost:8082", "[::1]:8082", "admin.localhost"):
        assert (await client(host).put("/tiers/a", json={"limits": []})).is_success, host
    for host in ("evil.example", "localhost.evil.example", "10.0.0.1", "127.0.0.1.evil.example"):
        refused = await client(host).get("/tiers")
        assert (refused.status_code, refused.json()["type"][-11:]) == (421, "misdirected"), host
    for origin in (
        "https://evil.example",
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
    for origin in ("http://localhost:3000", "https://127.0.0.1", "http://[::1]:8082"):
        assert (await client("localhost").get("/tiers", headers={"Origin": origin})).status_code == 200, origin
    (row,) = (await client("localhost").get("/audit", params={"limit": 1})).json()["items"]
    assert row["actor"] == "anybody"


@pytest.mark.slow
async def test_health_and_documents_need_no_token(any_office: Office) -> None:
    client = any_office.client(None)
    assert (await client.get("/healthz")).json() == {"status": "ok"}
    assert (await client.get("/openapi.json")).json()["openapi"].startswith("3.1")
    page = await client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "/api/v1/users/{user_id}/override" in page.text
    assert "https://" not in page.text.replace("https://json-schema.org", "")
    assert "<li><b>Ids</b> in paths are escaped: of the user <code>acme/alice</code>" in page.text
    assert "**" not in page.text


def test_of_what_a_description_says_nothing_becomes_markup_but_our_own() -> None:
    about = "One `<a>` **&** two.\n\n* **A <b>.** First\n  line.\n* `**`\n"
    page = docs_page({"info": {"description": about}, "paths": {}, "components": {"schemas": {}}})
    assert "<p>One <code>&lt;a&gt;</code> <b>&amp;</b> two.</p>" in page
    assert "<ul><li><b>A &lt;b&gt;.</b> First\n  line.</li><li><code>**</code></li></ul>" in page
