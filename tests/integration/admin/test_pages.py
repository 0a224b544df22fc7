"""Pagination of lists."""

from __future__ import annotations

from typing import Any

import pytest

from ratelimit_rls.admin.http.pagination import Cursors
from tests.integration.admin.admin_client import AdminApi, Client

pytestmark = pytest.mark.slow


async def test_pagination_is_stable_under_concurrent_changes(api: AdminApi, admin: Client) -> None:
    for name in "bdfhj":
        await admin.put(f"/tiers/{name}", json={"limits": []})
    first = await admin.get("/tiers", params={"limit": 2})
    assert [tier["name"] for tier in first.json()["items"]] == ["b", "d"]
    assert first.headers["link"] == f'</api/v1/tiers?limit=2&cursor={first.json()["next"]}>; rel="next"'
    for name in "ae":
        await admin.put(f"/tiers/{name}", json={"limits": []})
    await admin.delete("/tiers/d")
    rest, cursor = [], first.json()["next"]
    while cursor:
        page = (await admin.get("/tiers", params={"limit": 2, "cursor": cursor})).json()
        rest += [tier["name"] for tier in page["items"]]
        cursor = page["next"]
    assert rest == ["e", "f", "h", "j"]
    exactly_all = (await admin.get("/tiers", params={"limit": 6})).json()
    assert (len(exactly_all["items"]), exactly_all["next"]) == (6, None)


async def test_every_list_is_paginated(api: AdminApi, admin: Client) -> None:
    document = "domain: edge\ndescriptors: [{{key: k{}, rate_limit: {{unit: day, requests_per_unit: 1}}}}]"
    for number in range(3):
        await admin.put(f"/users/user{number}", json={})
        await admin.put(f"/users/user{number}/block", json={})
        await admin.post("/keys", json={"user_id": "user0"})
        await admin.post("/tokens", json={"name": "a", "role": "read"})
        rule = {"name": f"rule{number}", "priority": 9 - number, "document": document.format(number)}
        assert (await admin.post("/rules", json=rule)).status_code == 201
    for path in ("/users", "/users?blocked=true", "/blocks", "/keys?user_id=user0", "/tokens", "/rules", "/audit"):
        whole = (await admin.get(path)).json()["items"]
        parts: list[Any] = []
        url: str | None = f"{path}{'&' if '?' in path else '?'}limit=2"
        while url is not None:
            page = await admin.get(url)
            assert page.status_code == 200, page.text
            parts += page.json()["items"]
            url = page.links["next"]["url"] if "next" in page.links else None
        assert len(whole) >= 3
        assert parts == whole, path


async def test_cursor_is_valid_only_for_its_list_and_filters(sqlite_admin: Client) -> None:
    for name in "abc":
        await sqlite_admin.put(f"/users/{name}", json={})
        await sqlite_admin.put(f"/tiers/{name}", json={"limits": []})
    cursor = (await sqlite_admin.get("/users", params={"limit": 1, "blocked": "false"})).json()["next"]
    same = await sqlite_admin.get("/users", params={"limit": 5, "blocked": "false", "cursor": cursor})
    assert [user["user_id"] for user in same.json()["items"]] == ["b", "c"]
    foreign = Cursors(b"another secret").write("/api/v1/users", {"blocked": "false"}, ["a"])
    for path, wrong in (
        ("/users", cursor),  # without its filter
        ("/users?blocked=true", cursor),
        ("/tiers", cursor),
        ("/users?blocked=false", cursor[:-1] + ("A" if cursor[-1] != "A" else "B")),
        ("/users?blocked=false", foreign),
        ("/users", "%00"),
        ("/users", "é"),
        ("/users", ""),
    ):
        rejected = await sqlite_admin.get(f"{path}{'&' if '?' in path else '?'}cursor={wrong}")
        assert (rejected.status_code, rejected.json()["errors"][0]["field"]) == (422, "cursor"), (path, wrong)


@pytest.mark.parametrize("limit", ["0", "501", "-1", "ten", "1.5", "9" * 400])
async def test_invalid_page_sizes_are_rejected(sqlite_admin: Client, limit: str) -> None:
    rejected = await sqlite_admin.get("/tiers", params={"limit": limit})
    assert (rejected.status_code, rejected.json()["errors"][0]["field"]) == (422, "limit")
