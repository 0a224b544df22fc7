"""The two HTTP ports over real sockets."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack

import pytest

from ratelimit_rls.api.responses import ResponseOptions
from ratelimit_rls.errors import Problem, RulesError, SettingsError, StoreUnavailable
from ratelimit_rls.server.worker_stats import WorkerStats
from ratelimit_rls.telemetry.hot_keys import HotKeys
from ratelimit_rls.transport.grpc.options import GrpcOptions
from ratelimit_rls.transport.http.debug import debug_app
from ratelimit_rls.transport.http.json_api import MAX_BODY_BYTES, json_app
from ratelimit_rls.transport.http.server import HttpServer
from tests.integration.transport.conftest import Service, new_service
from tests.support.grpc_client import Http, Reply

ASK = {"domain": "edge", "descriptors": [{"entries": [{"key": "user", "value": "a"}]}]}


@pytest.fixture
def service(answers: ResponseOptions) -> Service:
    service = new_service(GrpcOptions("127.0.0.1:0"), answers)
    service.health.listening()
    return service


class Port:
    def __init__(self, server: HttpServer) -> None:
        self._url = f"http://127.0.0.1:{server.port}"

    async def get(self, path: str) -> Reply:
        return await asyncio.to_thread(self._get, path)

    async def post(self, path: str, body: object) -> Reply:
        return await asyncio.to_thread(self._post, path, body if isinstance(body, str) else json.dumps(body))

    def _get(self, path: str) -> Reply:
        with Http(self._url) as client:
            return client.get(path)

    def _post(self, path: str, body: str) -> Reply:
        with Http(self._url) as client:
            return client.post(path, body)


@pytest.fixture
async def http(service: Service) -> AsyncIterator[Port]:
    server = HttpServer(json_app(service.json_pipeline(), service.throttle_queue, service.health))
    await server.start("127.0.0.1", 0)
    yield Port(server)
    await server.stop()


async def no_metrics() -> list[bytes]:
    return []


@pytest.fixture
async def ops(service: Service) -> AsyncIterator[Port]:
    workers = WorkerStats(service.metrics, HotKeys())
    server = HttpServer(debug_app(service.rules, workers.stats, workers.hot, no_metrics))
    await server.start("127.0.0.1", 0)
    yield Port(server)
    await server.stop()


@pytest.mark.parametrize("answers", [ResponseOptions(headers_enabled=True)])
async def test_json_matches_grpc(http: Port, service: Service) -> None:
    replies = [await http.post("/json", ASK) for _ in range(3)]
    assert [reply.status for reply in replies] == [200, 200, 429]
    assert replies[0].headers["content-type"] == "application/json"
    received = json.loads(replies[2].body)
    reset = received["statuses"][0].pop("durationUntilReset")
    assert received.pop("dynamicMetadata")["rule"]["path"] == "edge.user"
    assert received == {
        "overallCode": "OVER_LIMIT",
        "statuses": [
            {"code": "OVER_LIMIT", "currentLimit": {"requestsPerUnit": 2, "unit": "YEAR", "name": "per-user"}}
        ],
        "responseHeadersToAdd": [
            {"key": "RateLimit-Limit", "value": "2"},
            {"key": "RateLimit-Remaining", "value": "0"},
            {"key": "RateLimit-Reset", "value": reset.removesuffix("s")},
        ],
    }
    assert not service.metrics.calls


async def test_json_accepts_both_spellings_of_a_field(http: Port) -> None:
    for spelling in ("hitsAddend", "hits_addend"):
        reply = await http.post("/json", ASK | {spelling: 1})
        assert reply.status == 200


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("", "not a RateLimitRequest in JSON"),
        ("{", "not a RateLimitRequest in JSON"),
        ("[" * 1000, "not a RateLimitRequest in JSON"),
        ("[" * 1001, "more than 1000 values in the body"),
        ('{"domain": "\\ud800"}', "not a RateLimitRequest in JSON"),
        (
            '{"hits_addend": ' + "1" * 60_000 + "}",
            "not a RateLimitRequest in JSON: a number has more than 4300 digits\n",
        ),
        ({"set_int_max_str_digits": 1}, 'no field named "set_int_max_str_digits"'),
        ('{"hits_addend": ' + "1" * 4300 + "}", "not a RateLimitRequest in JSON"),
        ({"domian": "edge"}, 'no field named "domian"'),
        ({"domain": "edge"}, "rate limit descriptor list must not be empty"),
        (ASK | {"domain": ""}, "rate limit domain must not be empty"),
    ],
)
async def test_a_bad_request_is_400_with_a_reason(http: Port, body: object, reason: str) -> None:
    reply = await http.post("/json", body)
    assert reply.status == 400
    assert reason in reply.body
    assert len(reply.body) < 1000


async def test_server_errors_are_5xx(http: Port, service: Service) -> None:
    service.store.fault = StoreUnavailable("no connection to the store")
    assert (await http.post("/json", ASK)).status == 503
    service.store.fault = ZeroDivisionError("a secret")
    reply = await http.post("/json", ASK)
    assert (reply.status, reply.body) == (500, "internal error\n")
    service.rules.current = None
    reply = await http.post("/json", ASK)
    assert (reply.status, reply.body) == (503, "no rate limit configuration loaded\n")


async def test_a_body_that_is_too_large_is_413(http: Port) -> None:
    text = json.dumps(ASK)
    assert (await http.post("/json", text + " " * (MAX_BODY_BYTES - len(text)))).status == 200
    reply = await http.post("/json", text + " " * (MAX_BODY_BYTES - len(text) + 1))
    assert (reply.status, reply.body) == (
        413,
        "the body is too large; at most 65536 bytes are allowed (RLS_MAX_JSON_BYTES)\n",
    )


async def test_livez_does_not_depend_on_components(http: Port, service: Service) -> None:
    service.health.set("redis", False, "connection refused")
    assert (await http.get("/livez")).status == 200
    service.health.stopping()
    assert (await http.get("/livez")).status == 500


async def test_healthcheck_is_ok_or_describes_the_problem(http: Port, service: Service) -> None:
    reply = await http.get("/healthcheck")
    assert (reply.status, reply.body) == (200, "OK")
    service.health.set("config", True, "the last update was rejected:\n  a.yaml:1:1: nö")
    reply = await http.get("/healthcheck")
    assert (reply.status, reply.body) == (200, "OK")
    assert reply.headers["x-ratelimit-detail"] == "config: the last update was rejected: a.yaml:1:1: n?"
    service.health.set("redis", False, "connection refused")
    reply = await http.get("/healthcheck")
    assert reply.status == 500
    assert "redis: connection refused" in reply.body


async def test_other_paths_are_404(http: Port, ops: Port) -> None:
    assert (await http.get("/")).status == 404
    assert (await ops.get("/nothing")).status == 404


async def test_debug_port_lists_its_pages(ops: Port) -> None:
    listing = (await ops.get("/")).body
    for line in listing.splitlines():
        assert (await ops.get(line.split(":")[0])).status == 200
    assert "/rlconfig: " in listing


async def test_rlconfig_prints_every_limit_sorted(ops: Port, service: Service) -> None:
    service.load(
        b"domain: edge\ndescriptors:\n"
        b"- {key: user, rate_limit: {unit: hour, requests_per_unit: 2}, shadow_mode: true}\n"
        b"- {key: staff, rate_limit: {unlimited: true}, quota_mode: true}\n"
        b"- {key: plan, rate_limit: {unit: day, requests_per_unit: 9, algorithm: gcra, burst: 3}}\n"
    )
    reply = await ops.get("/rlconfig")
    assert reply.body.splitlines() == [
        "edge.plan: unit=DAY requests_per_unit=9, shadow_mode: false, quota_mode: false, algorithm: gcra, burst: 3",
        "edge.staff: unit=UNKNOWN requests_per_unit=0, shadow_mode: false, quota_mode: true",
        "edge.user: unit=HOUR requests_per_unit=2, shadow_mode: true, quota_mode: false",
    ]
    assert service.rules.current is not None
    assert reply.headers["x-ratelimit-rules-version"] == "2"
    assert reply.headers["x-ratelimit-rules-digest"] == service.rules.current.digest
    assert reply.headers["x-ratelimit-rules-failures"] == "0"
    assert "x-ratelimit-rules-last-error" not in reply.headers


async def test_rejected_rules_update_is_reported_in_rlconfig(ops: Port, service: Service) -> None:
    service.rules.reject(RulesError(Problem("a.yaml", line, 1, "wröng " * 20) for line in range(1, 9)))
    headers = (await ops.get("/rlconfig")).headers
    assert headers["x-ratelimit-rules-failures"] == "1"
    error = headers["x-ratelimit-rules-last-error"]
    assert error.startswith("a.yaml:1:1: error: wr?ng")
    assert len(error) <= 512


async def test_rlconfig_without_rules_is_empty(ops: Port, service: Service) -> None:
    service.rules.current = None
    reply = await ops.get("/rlconfig")
    assert (reply.status, reply.body) == (200, "")


async def test_stats_prints_real_counters(ops: Port, http: Port) -> None:
    for _ in range(3):
        await http.post("/json", ASK)
    lines = (await ops.get("/stats")).body.splitlines()
    assert "ratelimit.service.rate_limit.edge.user.total_hits: 3" in lines
    assert "ratelimit.service.rate_limit.edge.user.over_limit: 1" in lines


async def test_http_port_in_use_is_a_settings_error(service: Service) -> None:
    first, second = (
        HttpServer(json_app(service.json_pipeline(), service.throttle_queue, service.health)) for _ in range(2)
    )
    await first.start("127.0.0.1", 0)
    with pytest.raises(SettingsError, match=rf"cannot listen on 127\.0\.0\.1:{first.port}: Address already in use"):
        await second.start("127.0.0.1", first.port)
    await second.stop()
    await first.stop()


@pytest.mark.slow
async def test_hundreds_of_connections_in_one_iteration_are_accepted(service: Service) -> None:
    """If the backlog were full, probes would retry after a second."""
    server = HttpServer(json_app(service.json_pipeline(), service.throttle_queue, service.health))
    await server.start("127.0.0.1", 0)
    try:
        with ExitStack() as stack:
            for _ in range(300):
                stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=0.5))
    finally:
        await server.stop()


async def test_server_does_not_handle_signals(service: Service) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    server = HttpServer(json_app(service.json_pipeline(), service.throttle_queue, service.health))
    await server.start("127.0.0.1", 0)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    await server.stop()


@pytest.mark.slow
async def test_date_header_is_updated(http: Port) -> None:
    first = (await http.get("/healthcheck")).headers["date"]
    async with asyncio.timeout(10):
        while (await http.get("/healthcheck")).headers["date"] == first:
            await asyncio.sleep(0.1)
