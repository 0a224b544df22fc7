"""OTLP exporter of metrics: cumulative, every STATS_FLUSH_INTERVAL and once more at the end.

OpenTelemetry's exporters send the data, so OTEL_EXPORTER_OTLP_* have their usual meaning. Its instruments do not count:
one of them costs more than a decision of ours (docs/adr/0018). The exporters block while they send, and retry for a
while, so they run in a thread, and collected series are passed to them.

The names of envoyproxy/ratelimit are omitted: there are no dashboards that expect them from OTLP.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Literal

import structlog

from ratelimit_rls import __version__
from ratelimit_rls.settings import Settings
from ratelimit_rls.telemetry.instruments import DURATIONS_S, INSTRUMENTS, Instrument, InstrumentKind
from ratelimit_rls.telemetry.series import Collected, Distribution, Value

if TYPE_CHECKING:  # slow to import, and most processes do not need it
    from opentelemetry.sdk.metrics.export import Metric, MetricExporter, MetricsData
    from opentelemetry.sdk.resources import Resource

SCOPE = "ratelimit_rls"
CLOSE_S = 3.0
BATCH_POINTS = 5000
"""Data points per message: collectors reject messages above 4 MiB over gRPC."""

Collect = Callable[[], Awaitable[Collected]]
Rows = list[tuple[tuple[str, ...], Value]]


def metrics_data(collected: Collected, resource: Resource, *, started_ns: int, now_ns: int) -> MetricsData:
    from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    rows: dict[str, Rows] = {}
    for (name, attributes), value in collected.items():
        rows.setdefault(name, []).append((attributes, value))
    metrics = [
        _metric(instrument, rows[instrument.name], started_ns, now_ns)
        for instrument in INSTRUMENTS
        if instrument.name in rows and not instrument.reference
    ]
    scope = ScopeMetrics(InstrumentationScope(SCOPE, __version__), metrics, schema_url="")
    return MetricsData([ResourceMetrics(resource, [scope], schema_url="")])


def _metric(instrument: Instrument, rows: Rows, started_ns: int, now_ns: int) -> Metric:
    from opentelemetry.sdk.metrics.export import (
        AggregationTemporality,
        Gauge,
        Histogram,
        HistogramDataPoint,
        Metric,
        NumberDataPoint,
        Sum,
    )

    def attributes(values: tuple[str, ...]) -> dict[str, str]:
        """Omit empty attributes, which do not apply, such as the error of a success."""
        return {key: text for key, text in zip(instrument.attributes, values, strict=True) if text}

    def histogram(values: tuple[str, ...], value: Distribution) -> HistogramDataPoint:
        unknown: Any = None  # minimum and maximum, which are not recorded, and need not be sent
        count = sum(value.counts)
        return HistogramDataPoint(
            *(attributes(values), started_ns, now_ns, count, value.sum_s, value.counts, DURATIONS_S, unknown, unknown)
        )

    cumulative = AggregationTemporality.CUMULATIVE
    data: Gauge | Histogram | Sum
    if instrument.kind is InstrumentKind.HISTOGRAM:
        times = [histogram(values, value) for values, value in rows if isinstance(value, Distribution)]
        data = Histogram(times, cumulative)
    else:
        points = [
            NumberDataPoint(attributes(values), started_ns, now_ns, value)
            for values, value in rows
            if not isinstance(value, Distribution)
        ]
        data = (
            Sum(points, cumulative, is_monotonic=True) if instrument.kind is InstrumentKind.COUNTER else Gauge(points)
        )
    return Metric(instrument.name, instrument.about, instrument.unit, data)


class OtlpMetrics:
    def __init__(
        self,
        exporter: MetricExporter,
        resource: Resource,
        collect: Collect,
        *,
        interval_s: float,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """`collect` covers this process; each worker sends its own, as an instance of the service."""
        self._exporter = exporter
        self._resource = resource
        self._collect = collect
        self._interval_s = interval_s
        self._now_ns = now_ns
        self._started_ns = now_ns()
        self._exporting: asyncio.Future[None] | None = None

    async def run(self) -> None:
        """Export periodically until cancelled; then close() sends the rest."""
        while True:
            await asyncio.sleep(self._interval_s)
            await self.flush()

    async def flush(self) -> None:
        """Export now. Returns when the export has succeeded or failed. Never raises, and never runs two at a time."""
        if self._exporting is not None:
            await asyncio.shield(self._exporting)
        try:
            collected = await self._collect()
        except Exception as error:
            structlog.get_logger().warning("metrics_export_failed", error=str(error))
            return
        loop = asyncio.get_running_loop()
        self._exporting = done = loop.create_future()
        # Not from a pool: the interpreter would wait for a pool's thread before it exits.
        threading.Thread(target=self._export, args=(collected, loop, done), name="otlp", daemon=True).start()
        await asyncio.shield(done)

    def _export(self, collected: Collected, loop: asyncio.AbstractEventLoop, done: asyncio.Future[None]) -> None:
        try:
            data = metrics_data(collected, self._resource, started_ns=self._started_ns, now_ns=self._now_ns())
            self._exporter.export(data)  # logs its own errors
        except Exception as error:
            structlog.get_logger().warning("metrics_export_failed", error=str(error))
        with contextlib.suppress(RuntimeError):  # the loop has ended, and nothing waits any more
            loop.call_soon_threadsafe(self._finish, done)

    def _finish(self, done: asyncio.Future[None]) -> None:
        if self._exporting is done:
            self._exporting = None
        if not done.done():
            done.set_result(None)

    async def close(self) -> None:
        """Export once more, and wait at most CLOSE_S for it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self.flush()
        # Shutting down may wait for an export that hangs, so do not wait for it.
        threading.Thread(target=self._exporter.shutdown, name="otlp-close", daemon=True).start()


def new_otlp_metrics(settings: Settings, collect: Collect) -> OtlpMetrics | None:
    """Return None unless the settings enable it."""
    protocol = settings.otlp_metrics
    if not protocol:
        return None
    from ratelimit_rls.telemetry.export_errors import throttle_export_warnings
    from ratelimit_rls.telemetry.otel_resource import resource

    throttle_export_warnings()
    return OtlpMetrics(
        _exporter(protocol),
        resource(settings),
        collect,
        interval_s=settings.stats_flush_interval.total_seconds(),
    )


def _exporter(protocol: Literal["http", "grpc"]) -> MetricExporter:
    if protocol == "http":
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as HttpExporter

        return HttpExporter(max_export_batch_size=BATCH_POINTS)
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcExporter

    return GrpcExporter(max_export_batch_size=BATCH_POINTS)
