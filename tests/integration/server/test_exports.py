"""What a process sends of itself: by statsd and OTLP while it serves and when it ends, and never at its own cost."""

from __future__ import annotations

import socket
from pathlib import Path
from signal import SIGTERM

import grpc
import pytest

from ratelimit_rls.transport.grpc.messages import SHOULD_RATE_LIMIT
from tests.launched import HIT, Watched
from tests.otlp_collector import OtlpCollector

pytestmark = pytest.mark.slow

CALLS = 7


def ask(service: Watched) -> None:
    with grpc.insecure_channel(service.grpc_address) as channel:
        for _ in range(CALLS):
            channel.unary_unary(SHOULD_RATE_LIMIT)(HIT, timeout=5)


def received(listener: socket.socket) -> list[str]:
    lines: list[str] = []
    listener.settimeout(0.3)
    try:
        while True:
            lines += listener.recv(65536).decode().splitlines()
    except TimeoutError:
        return lines


def test_what_was_counted_is_sent_at_the_latest_when_the_process_ends(rules: Path) -> None:
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
        with Watched({"RLS_RULES": rules, **variables}) as service:
            ask(service)
            assert not received(statsd)  # the hour is not over
            service.signal(SIGTERM)
            assert service.ended() == 0
        assert f"ratelimit_server.ShouldRateLimit.total_requests:{CALLS}|c" in received(statsd)
        (decisions,) = collector.wait_for_metrics(1, "ratelimit.decisions")
        rule = {"ratelimit.domain": "roomy", "ratelimit.rule": "roomy.all"}
        told = {key: point.as_int for key, point in decisions.by_attributes().items()}
        outcome = {**rule, "ratelimit.outcome": "ok", "ratelimit.source": "store"}
        assert told[tuple(sorted(outcome.items()))] == CALLS
        assert decisions.resource["service.name"] == "RateLimit"


def test_a_collector_that_hangs_costs_no_call_and_does_not_keep_the_process(rules: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        variables = {
            "TRACING_ENABLED": "true",
            "RLS_OTLP_METRICS": "http",
            "STATS_FLUSH_INTERVAL": "50ms",
            "OTEL_BSP_SCHEDULE_DELAY": "50",
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}",
        }
        with Watched({"RLS_RULES": rules, **variables}) as service:
            ask(service)
            service.signal(SIGTERM)
            assert service.ended(timeout_s=20) == 0
            assert "Traceback" not in service.log()
