"""Scraped metrics: parsed by the Prometheus parser, merged over all workers, and bounded."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from signal import SIGKILL

import grpc
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from bench.series_soak import soak
from ratelimit_rls.protos.messages import SHOULD_RATE_LIMIT
from ratelimit_rls.server.workers import MIN_LIFETIME_S
from ratelimit_rls.telemetry.instruments import INSTRUMENTS, InstrumentKind
from ratelimit_rls.telemetry.metrics import MAX_PATHS
from tests.support.grpc_client import get, rate_limit_request
from tests.support.ports import free_port
from tests.support.servers import RedisServer
from tests.support.service_process import HIT, ServiceProcess

pytestmark = pytest.mark.slow

CALLS = 300
OWN_POOL = [("grpc.use_local_subchannel_pool", 1)]


class Scraped(ServiceProcess):
    def __init__(self, **variables: object) -> None:
        self.metrics_port = free_port()
        super().__init__({"USE_PROMETHEUS": "true", "PROMETHEUS_ADDR": f"127.0.0.1:{self.metrics_port}", **variables})

    def scrape(self) -> dict[str, Metric]:
        reply = get(f"http://127.0.0.1:{self.metrics_port}", "/metrics")
        assert (reply.status, reply.headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
        return {family.name: family for family in text_string_to_metric_families(reply.body)}

    def value(self, name: str, **labels: str) -> float:
        return value(self.scrape(), name, **labels)

    def send(self, messages: list[bytes], connections: int = 8) -> None:
        """Send calls over several connections, so that every worker has some."""

        def send(share: list[bytes]) -> None:
            with grpc.insecure_channel(self.grpc_address, OWN_POOL) as channel:
                call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(SHOULD_RATE_LIMIT)
                for begun in [call.future(message, timeout=20) for message in share]:
                    begun.result()

        threads = [threading.Thread(target=send, args=(messages[n::connections],)) for n in range(connections)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def value(families: dict[str, Metric], name: str, **labels: str) -> float:
    """Return the sum of a metric's samples with these labels. The parser adds _total to counters without it."""
    return sum(
        sample.value
        for family in families.values()
        for sample in family.samples
        if sample.name in (name, f"{name}_total") and labels.items() <= sample.labels.items()
    )


@pytest.fixture
def two(rules: Path, any_redis: RedisServer) -> Iterator[Scraped]:
    with Scraped(RLS_RULES=rules, REDIS_URL=any_redis.address, RLS_WORKERS=2) as service:
        service.wait_for_log("msg=serving", times=2)
        yield service


def test_scrape_sums_workers_and_never_decreases_when_one_dies(two: Scraped) -> None:
    two.send([HIT] * CALLS)
    names = ("ratelimit_service_total_requests", "ratelimit_decisions_total", "rpc_server_call_duration_seconds_count")
    for name in names:
        assert {two.value(name) for _ in range(6)} == {CALLS}, name  # from any worker
    assert two.value("ratelimit_workers") == 2

    time.sleep(MIN_LIFETIME_S)  # a worker that exits sooner stops the supervisor
    os.kill(two.workers()[0], SIGKILL)
    two.wait_for_log("msg=serving", times=3)
    assert two.value("ratelimit_workers") == 2
    two.send([HIT] * CALLS)
    for name in names:
        assert {two.value(name) for _ in range(6)} == {2 * CALLS}, name


def test_metrics_have_declared_types_and_include_compatible_names(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(
        "domain: edge\ndescriptors:\n"
        "  - {key: user, rate_limit: {unit: year, requests_per_unit: 5}}\n"
        "  - {key: path, detailed_metric: true, rate_limit: {unit: year, requests_per_unit: 5}}\n"
    )
    with Scraped(RLS_RULES=rules) as service:
        service.send([bytes(rate_limit_request("edge", {"user": "a"}))] * 7, connections=1)
        service.send([bytes(rate_limit_request("elsewhere", {"user": "a"}))], connections=1)
        with pytest.raises(grpc.RpcError), grpc.insecure_channel(service.grpc_address) as channel:
            channel.unary_unary(SHOULD_RATE_LIMIT)(b"", timeout=5)  # type: ignore[arg-type]
        families = service.scrape()
        declared = {one.prometheus.removesuffix("_total"): one for one in INSTRUMENTS}
        for name, family in families.items():
            one = declared[name]
            assert family.type == one.kind.value, name
            labels = {attribute.replace(".", "_") for attribute in one.attributes}
            for sample in family.samples:
                assert set(sample.labels) <= labels | ({"le"} if one.kind is InstrumentKind.HISTOGRAM else set()), (
                    sample
                )

        rule = {"ratelimit_domain": "edge", "ratelimit_rule": "edge.user", "ratelimit_source": "store"}
        assert value(families, "ratelimit_decisions_total", **rule, ratelimit_outcome="ok") == 5
        assert value(families, "ratelimit_decisions_total", **rule, ratelimit_outcome="over_limit") == 2
        assert value(families, "ratelimit_service_rate_limit_over_limit", domain="edge", key1="user") == 2
        assert value(families, "ratelimit_service_rate_limit_total_hits", domain="edge", key1="user") == 7
        assert value(families, "ratelimit_unknown_domains_total", ratelimit_domain="elsewhere") == 1
        assert value(families, "ratelimit_service_should_rate_limit_error", err_type="service_error") == 1
        times = "ratelimit_service_response_time_seconds_count"
        assert value(families, times, grpc_method="ShouldRateLimit") == 9
        status = "rpc_server_call_duration_seconds_count"
        assert value(families, status, rpc_response_status_code="INVALID_ARGUMENT") == 1
        assert value(families, "ratelimit_store_duration_seconds_count", ratelimit_store="embedded") >= 1
        assert value(families, "ratelimit_store_available") == 1
        assert value(families, "ratelimit_rules_in_force") == 2
        assert 0 < value(families, "process_memory_usage_bytes") < 1e9


def test_label_values_are_bounded() -> None:
    """Short run of `python -m bench.series_soak`; `make soak` sends a million values."""
    (scrape,) = soak(MAX_PATHS + 2_000, steps=1)
    assert scrape.max_samples <= MAX_PATHS + 2
    assert scrape.hits >= MAX_PATHS + 2_000  # none is missing
