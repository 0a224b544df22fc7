"""OTLP collector for tests, over HTTP and gRPC, on free ports; it records everything it receives.

It decodes messages with OpenTelemetry's own definitions, like any collector.
"""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, Self, TypeVar

import grpc
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import (
    MetricsServiceServicer,
    add_MetricsServiceServicer_to_server,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span

PATIENCE_S = 10.0

T = TypeVar("T")


class ReceivedSpan(NamedTuple):
    """A span with the resource and scope of its export."""

    span: Span
    scope: str
    resource: dict[str, Any]

    @property
    def name(self) -> str:
        return self.span.name

    @property
    def trace_id(self) -> str:
        return self.span.trace_id.hex()

    @property
    def span_id(self) -> str:
        return self.span.span_id.hex()

    @property
    def parent_id(self) -> str:
        """Return the id of the parent span; empty if there is none."""
        return self.span.parent_span_id.hex()

    @property
    def attributes(self) -> dict[str, Any]:
        return _plain(self.span.attributes)


class ReceivedMetric(NamedTuple):
    """A metric with its points, and the resource and scope of its export."""

    metric: Metric
    scope: str
    resource: dict[str, Any]

    @property
    def name(self) -> str:
        return self.metric.name

    @property
    def points(self) -> list[Any]:
        """Return the data points of a metric of any type."""
        return list(getattr(self.metric, self.metric.WhichOneof("data") or "").data_points)

    def by_attributes(self) -> dict[tuple[tuple[str, Any], ...], Any]:
        """Return the points by their sorted attributes."""
        return {tuple(sorted(_plain(point.attributes).items())): point for point in self.points}


class OtlpCollector:
    """Use it as a context manager, or call start and stop. `rejecting` makes it respond with an unavailable status."""

    def __init__(self) -> None:
        self.rejecting = False
        self.exports = 0
        self.headers: list[dict[str, str]] = []  # headers of each export, names in lower case
        self._spans: list[ReceivedSpan] = []
        self._metrics: list[ReceivedMetric] = []
        self._changed = threading.Condition()

    def start(self) -> Self:
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _http_handler(self))
        self._http.daemon_threads = True
        self._serving = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._serving.start()
        self._grpc = grpc.server(ThreadPoolExecutor(2))
        add_TraceServiceServicer_to_server(_Traces(self), self._grpc)
        add_MetricsServiceServicer_to_server(_Metrics(self), self._grpc)
        self._grpc_port = self._grpc.add_insecure_port("127.0.0.1:0")
        self._grpc.start()
        return self

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._serving.join()
        self._grpc.stop(0).wait()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def http_url(self) -> str:
        """Endpoint for OTEL_EXPORTER_OTLP_ENDPOINT; exporters add /v1/traces or /v1/metrics."""
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    @property
    def grpc_url(self) -> str:
        """Endpoint for OTEL_EXPORTER_OTLP_ENDPOINT; http means without TLS."""
        return f"http://127.0.0.1:{self._grpc_port}"

    def spans(self, name: str = "") -> list[ReceivedSpan]:
        """Return the spans received so far, optionally of one name, in order of arrival."""
        with self._changed:
            return [span for span in self._spans if name in ("", span.name)]

    def metrics(self, name: str = "") -> list[ReceivedMetric]:
        """Return the metrics received so far. Every export has every metric, so the last of a name is the latest."""
        with self._changed:
            return [metric for metric in self._metrics if name in ("", metric.name)]

    def wait_for_spans(self, count: int = 1, name: str = "", timeout_s: float = PATIENCE_S) -> list[ReceivedSpan]:
        """Wait for `count` spans; raises AssertionError on timeout."""
        return self._wait(lambda: self.spans(name), count, timeout_s, f"spans {name!r}")

    def wait_for_metrics(self, count: int = 1, name: str = "", timeout_s: float = PATIENCE_S) -> list[ReceivedMetric]:
        return self._wait(lambda: self.metrics(name), count, timeout_s, f"metrics {name!r}")

    def wait_until(self, true: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
        """Wait until a condition is true; it is evaluated whenever something arrives."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not true():
                left = deadline - time.monotonic()
                assert left > 0, "what was waited for did not come"
                self._changed.wait(left)

    def forget(self) -> None:
        with self._changed:
            self._spans.clear()
            self._metrics.clear()
            self.headers.clear()
            self.exports = 0

    def _wait(self, observed: Callable[[], list[T]], count: int, timeout_s: float, what: str) -> list[T]:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while len(found := observed()) < count:
                left = deadline - time.monotonic()
                assert left > 0, f"{len(found)} {what} came within {timeout_s} s, {count} were waited for"
                self._changed.wait(left)
        return found

    def take(self, request: ExportTraceServiceRequest | ExportMetricsServiceRequest, headers: dict[str, str]) -> None:
        with self._changed:
            if isinstance(request, ExportTraceServiceRequest):
                self._spans += [
                    ReceivedSpan(span, scope.scope.name, _plain(whole.resource.attributes))
                    for whole in request.resource_spans
                    for scope in whole.scope_spans
                    for span in scope.spans
                ]
            else:
                self._metrics += [
                    ReceivedMetric(metric, scope.scope.name, _plain(whole.resource.attributes))
                    for whole in request.resource_metrics
                    for scope in whole.scope_metrics
                    for metric in scope.metrics
                ]
            self.headers.append(headers)
            self.exports += 1
            self._changed.notify_all()


def _plain(attributes: Any) -> dict[str, Any]:
    pairs: list[KeyValue] = list(attributes)
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind) if kind else None


def _http_handler(collector: OtlpCollector) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", "0")))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            headers = {name.lower(): value for name, value in self.headers.items()}
            if collector.rejecting:
                self._answer(400, b"")  # 400 is not retried; 503 would be, for a minute
            elif self.path == "/v1/traces":
                collector.take(ExportTraceServiceRequest.FromString(body), headers)
                self._answer(200, ExportTraceServiceResponse().SerializeToString())
            elif self.path == "/v1/metrics":
                collector.take(ExportMetricsServiceRequest.FromString(body), headers)
                self._answer(200, ExportMetricsServiceResponse().SerializeToString())
            else:
                self._answer(404, b"")

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *_: object) -> None:
            """Log nothing; tests inspect what arrived."""

    return Handler


class _Traces(TraceServiceServicer):
    def __init__(self, collector: OtlpCollector) -> None:
        self._collector = collector

    def Export(  # noqa: N802 - gRPC's name
        self, request: ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> ExportTraceServiceResponse:
        _take(self._collector, request, context)
        return ExportTraceServiceResponse()


class _Metrics(MetricsServiceServicer):
    def __init__(self, collector: OtlpCollector) -> None:
        self._collector = collector

    def Export(  # noqa: N802 - gRPC's name
        self, request: ExportMetricsServiceRequest, context: grpc.ServicerContext
    ) -> ExportMetricsServiceResponse:
        _take(self._collector, request, context)
        return ExportMetricsServiceResponse()


def _take(collector: OtlpCollector, request: Any, context: grpc.ServicerContext) -> None:
    if collector.rejecting:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "rejecting")
    collector.take(request, {str(name): str(value) for name, value in context.invocation_metadata()})
