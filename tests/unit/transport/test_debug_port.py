"""The pages of the debug port, especially /hot."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ratelimit_rls.rules.active_rules import ActiveRules
from ratelimit_rls.telemetry.hot_keys import HotKey, HotReport, as_json
from ratelimit_rls.telemetry.masking import Mask, share_mask_secret
from ratelimit_rls.transport.http.debug import debug_app
from ratelimit_rls.transport.http.server import HttpServer
from tests.support.grpc_client import Reply, get

REPORT = HotReport(
    10.0,
    2000.0,
    (
        HotKey("p:rl:{edge/user=a%2Fb/plan=free}:gcra:60", "edge.user.plan", False, 1500.04, 0.0),
        HotKey("rl:{edge}/user=x%1B%3A:penalty", "edge.user", True, 250.0, 125.0),
        HotKey("not ours", "", False, 1.0, 200.0),
    ),
)


async def no_stats() -> list[tuple[str, int]]:
    return [('a"} 1\nforged', 2)]


async def no_metrics() -> list[bytes]:
    return [b"", b"up 1\n"]


async def report() -> HotReport:
    return REPORT


@pytest.fixture
async def url() -> AsyncIterator[str]:
    server = HttpServer(debug_app(ActiveRules(), no_stats, report, no_metrics))
    await server.start("127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.port}"
    await server.stop()


async def fetch(url: str, path: str) -> Reply:
    return await asyncio.to_thread(get, url, path)


async def test_hot_report_has_both_tables(url: str) -> None:
    reply = await fetch(url, "/hot")
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
    result = json.loads(reply.body)
    assert (result["seconds"], result["calls_per_second"]) == (10.0, 2000.0)
    first, second, third = result["hottest"]
    assert first == {
        "key": "p:rl:{edge/user=a%2Fb/plan=free}:gcra:60",
        "domain": "edge",
        "descriptor": "user=a/b,plan=free",
        "rule": "edge.user.plan",
        "per_second": 1500.0,
        "denied_per_second": 0.0,
        "share": 0.75,
        "leased": False,
    }
    assert (second["descriptor"], second["leased"]) == ("user=x\x1b:", True)
    assert (third["domain"], third["descriptor"]) == ("", "")
    assert [row["key"] for row in result["denied"]] == [third["key"], second["key"]]


async def test_hot_report_respects_the_limit(url: str) -> None:
    result = json.loads((await fetch(url, "/hot?limit=1")).body)
    assert (len(result["hottest"]), len(result["denied"])) == (1, 1)


async def test_invalid_limit_is_rejected_with_a_message(url: str) -> None:
    for limit in ("0", "-1", "x", "", "1001", "9" * 5000, "1.5"):
        reply = await fetch(url, f"/hot?limit={limit}")
        assert (reply.status, reply.body) == (400, "limit must be a whole number from 1 to 1000\n")


async def test_stat_names_are_single_lines(url: str) -> None:
    assert (await fetch(url, "/stats")).body == 'a"} 1\\nforged: 2\n'


async def test_metrics_are_served(url: str) -> None:
    reply = await fetch(url, "/metrics")
    assert (reply.headers["content-type"], reply.body) == ("text/plain; version=0.0.4; charset=utf-8", "up 1\n")


def test_mask_hides_values_but_distinguishes_callers(tmp_path: Path) -> None:
    share_mask_secret(tmp_path)
    result = as_json(REPORT, 20, Mask(tmp_path))
    first, second, third = result["hottest"]
    for secret in ("a/b", "a%2Fb", "free", "not ours", "x\x1b:", "x%1B"):
        assert secret not in json.dumps(result, ensure_ascii=False)
    assert (first["domain"], first["rule"]) == ("edge", "edge.user.plan")
    user, plan = (pair.partition("=") for pair in first["descriptor"].split(","))
    assert (user[0], plan[0]) == ("user", "plan")
    assert user[2] != plan[2]
    assert first["key"] == f"rl:{{edge/user={user[2]}/plan={plan[2]}}}:gcra:60"
    assert second["descriptor"] != first["descriptor"]
    assert third["key"].startswith("#")
    # Another worker shows the same digest, another service does not.
    assert as_json(REPORT, 20, Mask(tmp_path)) == result
    assert as_json(REPORT, 20, Mask())["hottest"][0]["descriptor"] != first["descriptor"]
