"""Pushed metrics: statsd and OTLP while serving and on exit, without affecting calls."""

from __future__ import annotations

import socket
from pathlib import Path
from signal import SIGTERM

import grpc
import pytest

from ratelimit_rls.protos.messages import SHOULD_RATE_LIMIT
from tests.support.otlp_collector import OtlpCollector
from tests.support.service_process import HIT, ServiceProcess

pytestmark = pytest.mark.slow

CALLS = 7


def ask(service: ServiceProcess) -> None:
    with grpc.insecure_channel(service.grpc_address) as channel:
        for _ in range(CALLS):
            channel.unary_unary(SHOULD_RATE_LIMIT)(HIT, timeout=5)  # type: ignore[arg-type]


def received(listener: socket.socket) -> list[str]:
    lines: list[str] = []
    listener.settimeout(0.3)
    try:
        while True:
            lines += listener.recv(65536).decode().splitlines()
    except TimeoutError:
        return lines


def test_pending_metrics_are_flushed_on_exit(rules: Path) -> None:
    with OtlpCollector() as collector, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as statsd:
        statsd.bind(("127.0.0.1", 0))
        variables = {
            "USE_STATSD": "true",
            "STATSD_HOST": "127.0.0.1",
            "STATSD_PORT": statsd.getsockname()[1],
            "STATSD_PROTOCOL": "udp",
            "STATS_FLUSH_INTERVAL": "1h",
            "RLS_OTLP_METRICS": "http",
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.http_url,
        }
        with ServiceProcess({"RLS_RULES": rules, **variables}) as service:
            ask(service)
            assert not received(statsd)  # the interval of an hour has not elapsed
            service.signal(SIGTERM)
            assert service.ended() == 0
        assert f"ratelimit_server.ShouldRateLimit.total_requests:{CALLS}|c" in received(statsd)
        (decisions,) = collector.wait_for_metrics(1, "ratelimit.decisions")
        rule = {"ratelimit.domain": "roomy", "ratelimit.rule": "roomy.all"}
        result = {key: point.as_int for key, point in decisions.by_attributes().items()}
        outcome = {**rule, "ratelimit.outcome": "ok", "ratelimit.source": "store"}
        assert result[tuple(sorted(outcome.items()))] == CALLS
        assert decisions.resource["service.name"] == "RateLimit"


def test_hanging_collector_delays_neither_calls_nor_exit(rules: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        variables = {
            "TRACING_ENABLED": "true",
            "RLS_OTLP_METRICS": "http",
            "STATS_FLUSH_INTERVAL": "50ms",
            "OTEL_BSP_SCHEDULE_DELAY": "50",
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}",
        }
        with ServiceProcess({"RLS_RULES": rules, **variables}) as service:
            ask(service)
            service.signal(SIGTERM)
            assert service.ended(timeout_s=20) == 0
            assert "Traceback" not in service.log()
