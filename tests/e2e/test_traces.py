"""One trace from Envoy through the service to the store, as received by a collector."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from tests.support.grpc_client import get
from tests.support.otlp_collector import OtlpCollector
from tests.support.servers import SANDBOXES, EnvoyServer, RedisServer, Service, Upstream

pytestmark = pytest.mark.e2e

SERVICE_SPAN = "envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit"


def traced_envoy(collector: OtlpCollector) -> str:
    """The plain sandbox, with an Envoy that traces every request and sends its spans to the same collector."""
    config = yaml.safe_load((SANDBOXES / "rls-http" / "envoy.yaml").read_text())
    (listener,) = config["static_resources"]["listeners"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    manager["tracing"] = {
        "random_sampling": {"value": 100},
        "provider": {
            "name": "envoy.tracers.opentelemetry",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.config.trace.v3.OpenTelemetryConfig",
                "grpc_service": {"envoy_grpc": {"cluster_name": "collector"}, "timeout": "1s"},
                "service_name": "envoy",
            },
        },
    }
    clusters = config["static_resources"]["clusters"]
    (ratelimit,) = (cluster for cluster in clusters if cluster["name"] == "ratelimit")
    address = {"address": "127.0.0.1", "port_value": urlsplit(collector.grpc_url).port}
    endpoint = {"endpoint": {"address": {"socket_address": address}}}
    clusters.append(
        {
            **ratelimit,
            "name": "collector",
            "load_assignment": {"cluster_name": "collector", "endpoints": [{"lb_endpoints": [endpoint]}]},
        }
    )
    return str(yaml.safe_dump(config))


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_trace_contains_envoy_service_and_store_spans(
    upstream: Upstream, rules: Path, any_redis: RedisServer, tmp_path: Path, protocol: str
) -> None:
    with OtlpCollector() as collector:
        config = tmp_path / "envoy.yaml"
        config.write_text(traced_envoy(collector))
        service = Service(
            {
                "RLS_RULES": rules,
                "REDIS_URL": any_redis.address,
                "TRACING_ENABLED": "true",
                "TRACING_SAMPLING_RATE": "0",  # Envoy decides about sampling
                "TRACING_EXPORTER_PROTOCOL": protocol,
                "OTEL_EXPORTER_OTLP_ENDPOINT": collector.http_url if protocol == "http" else collector.grpc_url,
                "OTEL_BSP_SCHEDULE_DELAY": "50",
                "RLS_LOG_DENIALS": "10",
                "LOG_FORMAT": "json",
            }
        )
        with service, EnvoyServer(config, {8000: upstream.port, 8081: service.grpc_port}) as proxy:
            assert [get(proxy.url, "/limited").status for _ in range(6)] == [200] * 5 + [429]
            last = collector.wait_for_spans(6, SERVICE_SPAN)[-1]
            collector.wait_until(lambda: any(one.span_id == last.parent_id for one in collector.spans()))
            log = service.log()
        spans = {one.span_id: one for one in collector.spans()}
        parent = spans[last.parent_id]
        (of_store,) = (one for one in spans.values() if one.parent_id == last.span_id)
        assert parent.resource["service.name"] == "envoy"
        assert {parent.trace_id, last.trace_id, of_store.trace_id} == {last.trace_id}
        assert (of_store.name, of_store.attributes["db.system.name"]) == ("decide", "redis")
        assert last.attributes["ratelimit.limited"] is True
        assert last.attributes["ratelimit.rule"] == "edge.path_/limited"
        assert last.resource["service.name"] == "RateLimit"
        # The log line of the denial has the same ids.
        assert f'"trace_id": "{last.trace_id}"' in log
        assert f'"span_id": "{last.span_id}"' in log
