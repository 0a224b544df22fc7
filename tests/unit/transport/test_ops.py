"""/hot of the debug port: what is asked for most, in JSON."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from ratelimit_rls.rules.snapshot import Rules
from ratelimit_rls.telemetry.hot_keys import HotKey, HotReport
from ratelimit_rls.transport.http.ops import ops_app
from ratelimit_rls.transport.http.server import HttpServer
from tests.client import Reply, get

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
    server = HttpServer(ops_app(Rules(), no_stats, report, no_metrics))
    await server.start("127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.port}"
    await server.stop()


async def asked(url: str, path: str) -> Reply:
    return await asyncio.to_thread(get, url, path)


async def test_both_tables_with_whose_counter_it_is(url: str) -> None:
    reply = await asked(url, "/hot")
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
    told = json.loads(reply.body)
    assert (told["seconds"], told["calls_per_second"]) == (10.0, 2000.0)
    first, second, third = told["hottest"]
    assert first == {
        "key": "p:rl:{edge/user=a%2Fb/plan=free}:gcra:60",
        "domain": "edge",
        "descriptor": "user=a/b,plan=free",
        "rule": "edge.user.plan",
        "per_second": 1500.0,
        "refused_per_second": 0.0,
        "share": 0.75,
        "leased": False,
    }
    assert (second["descriptor"], second["leased"]) == ("user=x\x1b:", True)
    assert (third["domain"], third["descriptor"]) == ("", "")
    assert [row["key"] for row in told["refused"]] == [third["key"], second["key"]]


async def test_as_many_as_are_asked_for(url: str) -> None:
    told = json.loads((await asked(url, "/hot?limit=1")).body)
    assert (len(told["hottest"]), len(told["refused"])) == (1, 1)


async def test_a_limit_that_is_none_is_a_sentence(url: str) -> None:
    for limit in ("0", "-1", "x", "", "1001", "9" * 5000, "1.5"):
        reply = await asked(url, f"/hot?limit={limit}")
        assert (reply.status, reply.body) == (400, "limit must be a whole number from 1 to 1000\n")


async def test_a_name_is_one_line_whatever_a_client_put_into_it(url: str) -> None:
    assert (await asked(url, "/stats")).body == 'a"} 1\\nforged: 2\n'


async def test_metrics_are_there_to_be_looked_at(url: str) -> None:
    reply = await asked(url, "/metrics")
    assert (reply.headers["content-type"], reply.body) == ("text/plain; version=0.0.4; charset=utf-8", "up 1\n")
