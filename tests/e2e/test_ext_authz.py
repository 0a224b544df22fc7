"""ext_authz through a real Envoy: client addresses, responses, and headers that cannot be forged."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.grpc_client import Reply
from tests.support.servers import SANDBOXES, EnvoyServer, Service, Upstream
from tests.support.windows import with_yearly_limits

pytestmark = pytest.mark.e2e

SANDBOX = SANDBOXES / "ext-authz-only"
YEAR_S = 31_536_000


class LoggingEnvoy(EnvoyServer):
    """Envoy that flushes its access log at once instead of after ten seconds."""

    def __init__(self, upstream_port: int, service: Service, **values: Any) -> None:
        super().__init__(SANDBOX / "envoy.yaml", {8000: upstream_port, 8081: service.grpc_port}, values)

    def command(self) -> Sequence[str | Path]:
        return [*super().command(), "--file-flush-interval-msec", "50"]

    def wait_for_log(self, words: str) -> None:
        self.wait_until(lambda: words in self.log(), f"logs {words!r}")


def get(envoy: EnvoyServer, path: str, source: str = "127.0.0.1", **headers: str) -> Reply:
    """Send a GET from a loopback address; `x_user="a"` becomes the header `x-user: a`."""
    connection = http.client.HTTPConnection("127.0.0.1", envoy.port, timeout=10, source_address=(source, 0))
    try:
        connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        body = answer.read().decode()
        return Reply(answer.status, {name.lower(): value for name, value in answer.getheaders()}, body)
    finally:
        connection.close()


def write_rules(directory: Path) -> Path:
    """Write the sandbox's rules with yearly limits, so that no window ends during a test."""
    path = directory / "rules.yaml"
    path.write_text(with_yearly_limits((SANDBOX / "rules.yaml").read_text()))
    return path


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    """Rules for a test that changes them."""
    return write_rules(tmp_path)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Service for all tests that do not change the rules; each test uses its own client address."""
    with Service({"RLS_RULES": write_rules(tmp_path_factory.mktemp("rules"))}) as service:
        yield service


@pytest.fixture(scope="module")
def envoy(upstream: Upstream, service: Service) -> Iterator[LoggingEnvoy]:
    with LoggingEnvoy(upstream.port, service, failure_mode_allow=False) as envoy:
        yield envoy


def behind_a_proxy(rules: Path, more: str = "") -> None:
    """Rewrites the rules for an Envoy behind one trusted proxy."""
    text = rules.read_text()
    assert "trusted_proxies: 0 " in text
    rules.write_text(text.replace("trusted_proxies: 0 ", f"trusted_proxies: 1{more} "))


def test_requests_over_the_limit_are_denied_with_json(envoy: LoggingEnvoy, upstream: Upstream) -> None:
    before = upstream.requests
    # The paths differ only in the id and match one template, so they share a counter.
    answers = [
        get(envoy, f"/users/{number}?page={number}", "127.0.1.1", x_request_id=f"id-{number}") for number in range(6)
    ]

    assert [answer.status for answer in answers] == [200] * 5 + [429]
    assert upstream.requests == before + 5
    assert [answer.headers["x-ratelimit-limit"] for answer in answers] == ["5"] * 6
    assert [answer.headers["x-ratelimit-remaining"] for answer in answers] == ["4", "3", "2", "1", "0", "0"]
    assert all("retry-after" not in answer.headers for answer in answers[:5])
    denial = answers[-1]
    assert 0 < int(denial.headers["retry-after"]) <= YEAR_S
    assert denial.headers["content-type"] == "application/json"
    error = json.loads(denial.body)["error"]
    assert error["code"] == 429
    assert error["details"]["retry_after"] == int(denial.headers["retry-after"])
    # Another template and another client have their own counters.
    assert get(envoy, "/users/1/orders/7", "127.0.1.1").status == 200
    assert get(envoy, "/users/1", "127.0.1.2").status == 200


def test_access_log_contains_the_rule(envoy: LoggingEnvoy) -> None:
    for _ in range(6):
        get(envoy, "/limited", "127.0.1.3")
    envoy.wait_for_log("GET /limited 200 rule=edge.remote_address.path")
    envoy.wait_for_log("GET /limited 429 rule=edge.remote_address.path")


def test_upstream_headers_cannot_be_forged(envoy: LoggingEnvoy, upstream: Upstream) -> None:
    get(envoy, "/any", "127.0.1.4", x_limited_by="mine", x_ratelimit_rule="mine")
    assert upstream.last_headers["x-limited-by"] == "edge.remote_address.path"
    assert "x-ratelimit-rule" not in upstream.last_headers


def test_upstream_headers_are_removed_without_a_limit(upstream: Upstream, rules: Path) -> None:
    text = rules.read_text()
    rules.write_text(text[: text.index("\ndescriptors:")])
    with Service({"RLS_RULES": rules}) as service, LoggingEnvoy(upstream.port, service) as envoy:
        assert get(envoy, "/any", x_limited_by="mine").status == 200
        assert "x-limited-by" not in upstream.last_headers


def test_x_forwarded_for_is_ignored_without_trusted_proxies(envoy: LoggingEnvoy) -> None:
    statuses = [get(envoy, "/a", "127.0.1.5", x_forwarded_for=f"203.0.113.{n}").status for n in range(6)]
    assert statuses == [200] * 5 + [429]


@pytest.mark.parametrize("envoy_adds", [True, False], ids=["use_remote_address", "as_received"])
def test_trusted_proxy_determines_the_client_address(upstream: Upstream, rules: Path, envoy_adds: bool) -> None:
    behind_a_proxy(rules, f"\n  use_remote_address: {str(envoy_adds).lower()}")
    proxy = "127.0.0.2"  # appends the address of its peer to the client's header
    with (
        Service({"RLS_RULES": rules}) as service,
        LoggingEnvoy(upstream.port, service, use_remote_address=envoy_adds, failure_mode_allow=False) as envoy,
    ):
        spoofed = [
            get(envoy, "/a", proxy, x_forwarded_for=f"203.0.113.{number}, 198.51.100.7").status for number in range(6)
        ]
        assert spoofed == [200] * 5 + [429]
        assert get(envoy, "/a", proxy, x_forwarded_for="203.0.113.1, 198.51.100.8").status == 200
        # An invalid address at the client's position: such requests are counted by the connection's address.
        garbage = [get(envoy, "/a", proxy, x_forwarded_for=f"203.0.113.{n}, n{n}").status for n in range(6)]
        assert garbage == [200] * 5 + [429]


def test_ipv6_network_shares_a_counter(upstream: Upstream, rules: Path) -> None:
    behind_a_proxy(rules, "\n  use_remote_address: true")
    forms = [
        "2001:db8::1",
        "2001:DB8:0:0:0:0:0:1",
        "[2001:0db8::0001]:4711",
        "2001:db8::1%eth0",
        "2001:db8:0:0:ffff::1",
        "2001:db8::0.0.0.1",
    ]
    # From 127.0.0.1, for which Envoy adds the machine's own address.
    with (
        Service({"RLS_RULES": rules}) as service,
        LoggingEnvoy(upstream.port, service, failure_mode_allow=False) as envoy,
    ):
        assert [get(envoy, "/a", x_forwarded_for=form).status for form in forms] == [200] * 5 + [429]
        assert get(envoy, "/a", x_forwarded_for="2001:db8:0:1::1").status == 200
        mapped = [
            "192.0.2.9",
            "::ffff:192.0.2.9",
            "192.0.2.9:80",
            "::FFFF:c000:209",
            "[::ffff:192.0.2.9]:1",
            "192.0.2.9",
        ]
        assert [get(envoy, "/a", x_forwarded_for=form).status for form in mapped] == [200] * 5 + [429]


def test_grpc_client_gets_resource_exhausted(service: Service) -> None:
    # The upstream is a gRPC service: the health service of the process itself.
    with (
        LoggingEnvoy(service.grpc_port, service, failure_mode_allow=False) as envoy,
        grpc.insecure_channel(f"127.0.0.1:{envoy.port}") as channel,
    ):
        health = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest()
        for _ in range(5):
            assert health.Check(request, timeout=5).status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as raised:
            health.Check(request, timeout=5)
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        (retry_after,) = [line.value for line in raised.value.trailing_metadata() if line.key == "retry-after"]
        assert int(retry_after) > 0


def test_invalid_utf8_and_long_paths_are_counted(envoy: LoggingEnvoy) -> None:
    statuses = [
        get(envoy, path, "127.0.1.6", x_odd=odd).status
        for path, odd in (
            ("/x?" + "a=b&" * 5000, "plain"),
            ("/%ff", "\xff\xfe"),
            ("/%zz", "\x80"),
            ("/" + "s/" * 5000, "ö"),
            ("/a%20b", ""),
            ("/again", ""),
        )
    ]
    assert statuses == [200] * 5 + [429]


def test_missing_mapping_fails_the_check_and_envoy_decides(upstream: Upstream, tmp_path: Path) -> None:
    rules = tmp_path / "plain.yaml"
    rules.write_text("domain: edge\ndescriptors: [{key: user, rate_limit: {unit: day, requests_per_unit: 1}}]\n")
    with Service({"RLS_RULES": rules}) as service:
        for allow, status in ((True, 200), (False, 403)):
            with LoggingEnvoy(upstream.port, service, failure_mode_allow=allow) as envoy:
                assert get(envoy, "/").status == status
