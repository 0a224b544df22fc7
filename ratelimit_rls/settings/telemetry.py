"""Variables of metrics and traces.

The exporters of OpenTelemetry additionally read its own OTEL_… variables.
"""

from __future__ import annotations

import re
import socket
from datetime import timedelta
from typing import Literal

from pydantic import BaseModel, Field

from ratelimit_rls.settings.parse import Bool, Duration, Float, Port, TextList, TextMap, applies_unset

Sink = Literal["", "statsd", "dogstatsd", "prometheus"]

_PATH = re.compile(r"/[A-Za-z0-9/._~-]*")
_PORT = re.compile(r"[0-9]{1,5}")
_SINGLE_HOST = re.compile(r"\[[0-9A-Za-z:.%]+\]|[^\s:/\[\]]*")


class StatsSettings(BaseModel):
    """Metrics"""

    use_prometheus: Bool = Field(False, description="Serve metrics for Prometheus to scrape.")
    prometheus_addr: str = Field(":9090", description="Prometheus endpoint: host:port, or :port for all addresses.")
    prometheus_path: str = Field("/metrics", description="Path of the Prometheus endpoint.")
    prometheus_mapper_yaml: str = Field(
        "", description="File with statsd_exporter mappings for the names of envoyproxy/ratelimit."
    )
    prometheus_response_time_as_milliseconds: Bool = Field(
        False, description="Report ratelimit_service_response_time_seconds in milliseconds."
    )
    use_statsd: Bool = Field(True, description="Send metrics to statsd.", json_schema_extra=applies_unset("off"))
    statsd_host: str = Field("localhost", description="Host of statsd or DogStatsD.")
    statsd_port: Port = Field(8125, description="Port of statsd or DogStatsD.")
    statsd_protocol: str = Field("tcp", description="tcp or udp; DogStatsD always uses udp.")
    use_dog_statsd: Bool = Field(False, description="Send metrics to DogStatsD.")
    use_dog_statsd_mogrifiers: TextList = Field(
        (), description="Names of DOG_STATSD_MOGRIFIER_<NAME>_PATTERN, _NAME and _TAGS, tried in order."
    )
    extra_tags: TextMap = Field({}, description="key:value,… added to all metrics except OTLP's.")
    stats_flush_interval: Duration = Field(
        timedelta(seconds=10), gt=timedelta(), description="Metrics flush interval of statsd, DogStatsD and OTLP."
    )
    rls_otlp_metrics: Literal["", "http", "grpc"] = Field(
        "", description="Send metrics by OTLP, configured by OTEL_EXPORTER_OTLP_*; empty: do not."
    )
    disable_stats: Bool = Field(
        False, description="Serve and send no metrics; takes precedence over all other settings."
    )


class TracingSettings(BaseModel):
    """Traces"""

    tracing_enabled: Bool = Field(False, description="Send traces by OTLP, configured by OTEL_EXPORTER_OTLP_*.")
    tracing_service_name: str = Field("RateLimit", description="service.name of traces and of OTLP metrics.")
    tracing_service_namespace: str = Field("", description="service.namespace of traces and of OTLP metrics.")
    tracing_service_instance_id: str = Field(
        "", description="service.instance.id of traces and of OTLP metrics; empty: random."
    )
    tracing_exporter_protocol: str = Field("http", description="OTLP protocol of traces: http or grpc.")
    tracing_sampling_rate: Float = Field(
        1.0, ge=0, le=1, description="Fraction of traces to sample if the caller made no sampling decision."
    )


def parse_listen_address(text: str) -> tuple[str, int]:
    """Return host and port of host:port or [IPv6 address]:port. An empty host means all addresses."""
    host, colon, port = text.rpartition(":")
    if not (colon and _SINGLE_HOST.fullmatch(host) and _PORT.fullmatch(port) and int(port) <= 65_535):
        raise ValueError(f"PROMETHEUS_ADDR={text!r} is not an address; use host:port, [IPv6 address]:port or :port")
    if not host:
        return "::" if socket.has_dualstack_ipv6() else "0.0.0.0", int(port)
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_http_path(text: str) -> bool:
    return _PATH.fullmatch(text) is not None
