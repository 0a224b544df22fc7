"""The OTLP exporter: what a collector receives over HTTP and gRPC, and failures of the collector."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality

import ratelimit_rls
from ratelimit_rls.settings import Settings
from ratelimit_rls.telemetry import instruments, otlp
from ratelimit_rls.telemetry.export_errors import WARNING_INTERVAL_S, ThrottledWarnings, throttle_export_warnings
from ratelimit_rls.telemetry.instruments import DURATIONS_S, INSTRUMENTS, Instrument, InstrumentKind
from ratelimit_rls.telemetry.otel_resource import resource
from ratelimit_rls.telemetry.otlp import Collect, OtlpMetrics, new_otlp_metrics
from ratelimit_rls.telemetry.series import Collected, Distribution, Series
from tests.support.otlp_collector import OtlpCollector, ReceivedMetric

TIMES = Distribution((1, 2, *[0] * 10, 4, 3), 5.25)
CUMULATIVE = AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE


def series(instrument: Instrument, *attributes: str) -> Series:
    return Series(instrument.name, attributes)


EVERYTHING: Collected = {
    series(one, *(f"v{n}" for n in range(len(one.attributes)))): TIMES if one.kind is InstrumentKind.HISTOGRAM else 7
    for one in INSTRUMENTS
}


@pytest.fixture(scope="module")
def running() -> Iterator[OtlpCollector]:
    with OtlpCollector() as collector:
        yield collector


@pytest.fixture
def collector(running: OtlpCollector) -> OtlpCollector:
    running.rejecting = False
    running.forget()
    return running


@pytest.fixture(autouse=True)
def _library_log() -> Iterator[None]:
    """Restore the logger after the test."""
    logger = logging.getLogger("opentelemetry")
    handlers, propagate = logger.handlers[:], logger.propagate
    yield
    logger.handlers[:], logger.propagate = handlers, propagate


NewSink = Callable[..., OtlpMetrics]


def once(collected: Collected) -> Collect:
    """Return a collect function with fixed series."""

    async def collect() -> Collected:
        return collected

    return collect


@pytest.fixture
def new_sink(collector: OtlpCollector, monkeypatch: pytest.MonkeyPatch) -> NewSink:
    def new_sink(protocol: str, collect: Collect | None = None, **settings: Any) -> OtlpMetrics:
        url = collector.http_url if protocol == "http" else collector.grpc_url
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=limits")
        sink = new_otlp_metrics(Settings(rls_otlp_metrics=protocol, **settings), collect or once(EVERYTHING))
        assert sink is not None
        return sink

    return new_sink


@pytest.mark.parametrize("protocol", ["http", "grpc"])
async def test_every_instrument_reaches_a_collector(collector: OtlpCollector, new_sink: NewSink, protocol: str) -> None:
    sink = new_sink(protocol, tracing_service_namespace="edge", tracing_service_instance_id="one")
    await sink.flush()
    await sink.close()
    received = {metric.name: metric for metric in collector.wait_for_metrics(2 * len(INSTRUMENTS) // 3)}
    own = [one for one in INSTRUMENTS if not one.reference]
    assert set(received) == {one.name for one in own}
    for one in own:
        _check(one, received[one.name])
    assert collector.headers[0]["x-team"] == "limits"
    assert collector.exports == 2


def _check(one: Instrument, received: ReceivedMetric) -> None:
    metric = received.metric
    assert (metric.description, metric.unit, received.scope) == (one.about, one.unit, "ratelimit_rls")
    assert received.resource["service.name"] == "RateLimit"
    assert received.resource["service.namespace"] == "edge"
    assert received.resource["service.instance.id"] == "one"
    assert received.resource["service.version"] == ratelimit_rls.__version__
    ((attributes, point),) = received.by_attributes().items()
    assert dict(attributes) == {key: f"v{n}" for n, key in enumerate(one.attributes)}
    assert point.time_unix_nano >= point.start_time_unix_nano
    assert (point.start_time_unix_nano > 0) is (one.kind is not InstrumentKind.GAUGE)  # gauges have no start time
    match one.kind:
        case InstrumentKind.COUNTER:
            assert metric.sum.is_monotonic
            assert metric.sum.aggregation_temporality == CUMULATIVE
            assert point.as_int == 7
        case InstrumentKind.GAUGE:
            assert metric.HasField("gauge")
            assert point.as_int == 7
        case InstrumentKind.HISTOGRAM:
            assert metric.histogram.aggregation_temporality == CUMULATIVE
            assert (point.count, point.sum) == (10, 5.25)
            assert tuple(point.bucket_counts) == TIMES.counts
            assert tuple(point.explicit_bounds) == DURATIONS_S
            assert not point.HasField("min")


async def test_empty_attributes_are_omitted(collector: OtlpCollector, new_sink: NewSink) -> None:
    sink = new_sink("http", once({series(instruments.STORE_DURATION, "redis", ""): TIMES}))
    await sink.close()
    (metric,) = collector.wait_for_metrics(1, "ratelimit.store.duration")
    assert list(metric.by_attributes()) == [(("ratelimit.store", "redis"),)]


async def test_exports_are_cumulative_from_the_same_start(collector: OtlpCollector, new_sink: NewSink) -> None:
    count = iter(range(1, 1000))

    async def collect() -> Collected:
        return {series(instruments.GLOBAL_SHADOW): next(count)}

    sink = new_sink("http", collect)
    sink._interval_s = 0.001
    running = asyncio.create_task(sink.run())
    while collector.exports < 3:
        await asyncio.sleep(0.001)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await sink.close()
    points = [metric.points[0] for metric in collector.metrics()]
    assert [point.as_int for point in points] == list(range(1, 1 + len(points)))
    assert len({point.start_time_unix_nano for point in points}) == 1


async def test_many_series_are_split_into_several_messages(
    collector: OtlpCollector, new_sink: NewSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otlp, "BATCH_POINTS", 10)
    sink = new_sink("http", once({series(instruments.NEAR_LIMIT, "d", f"r{n}"): n for n in range(25)}))
    await sink.close()
    assert [len(metric.points) for metric in collector.wait_for_metrics(3)] == [10, 10, 5]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
async def test_a_rejecting_collector_is_logged_once(collector: OtlpCollector, new_sink: NewSink, protocol: str) -> None:
    collector.rejecting = True
    sink = new_sink(protocol)
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            await sink.flush()
        await sink.close()
    assert [entry["event"] for entry in logs] == ["telemetry_export_failed"]
    assert logs[0]["source"].startswith("opentelemetry.exporter.otlp")


class FailingExporter:
    """An exporter that raises at first, and then blocks until it is released."""

    def __init__(self) -> None:
        self.exports = 0
        self.release = threading.Event()

    def export(self, _data: object) -> None:
        self.exports += 1
        if self.exports == 1:
            raise ValueError("broken")
        self.release.wait()

    def shutdown(self) -> None:
        """Do nothing."""


async def test_a_failing_or_hanging_exporter_does_not_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "CLOSE_S", 0.01)
    exporter: Any = FailingExporter()
    sink = OtlpMetrics(exporter, resource(Settings()), once(EVERYTHING), interval_s=60)
    with structlog.testing.capture_logs() as logs:
        await sink.flush()
    assert logs == [{"event": "metrics_export_failed", "error": "broken", "log_level": "warning"}]
    await sink.close()  # waits only for a bounded time
    await sink.close()  # does not start a second export beside the first
    assert exporter.exports == 2
    exporter.release.set()


async def test_a_failing_collection_does_not_stop_the_exporter() -> None:
    async def none() -> Collected:
        raise OSError("no space left")

    exporter: Any = FailingExporter()
    sink = OtlpMetrics(exporter, resource(Settings()), none, interval_s=60)
    with structlog.testing.capture_logs() as logs:
        await sink.flush()
    assert [line["error"] for line in logs] == ["no space left"]
    assert exporter.exports == 0


def test_otlp_is_off_by_default() -> None:
    assert new_otlp_metrics(Settings(), once({})) is None


@pytest.mark.slow
def test_a_disabled_exporter_imports_no_sdk() -> None:
    package = Path(ratelimit_rls.__file__).parent.parent
    code = "import sys, ratelimit_rls.telemetry.otlp, ratelimit_rls.telemetry.otel_resource; print(*sys.modules)"
    environ = {**os.environ, "PYTHONPATH": str(package)}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ, check=True)
    assert "ratelimit_rls.telemetry.otlp" in ran.stdout.split()
    assert "opentelemetry" not in ran.stdout.split()


def _attributes(**settings: Any) -> dict[str, Any]:
    return dict(resource(Settings(**settings)).attributes)


def test_the_resource_comes_from_settings_then_otel_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _attributes()["service.name"] == "RateLimit"
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=theirs,cloud.region=x,service.instance.id=i")
    found = _attributes()
    assert (found["service.name"], found["cloud.region"], found["service.instance.id"]) == ("theirs", "x", "i")
    found = _attributes(tracing_service_name="ours", tracing_service_instance_id="j")
    assert (found["service.name"], found["service.instance.id"]) == ("ours", "j")


def test_each_process_is_an_instance_of_its_own() -> None:
    assert _attributes()["service.instance.id"] == _attributes()["service.instance.id"]
    several = {"rls_workers": 2, "redis_url": "localhost:6379"}
    assert _attributes(tracing_service_instance_id="a", **several)["service.instance.id"] == f"a-{os.getpid()}"


def test_warnings_about_client_headers_are_dropped() -> None:
    record = logging.LogRecord("opentelemetry.trace.span", logging.WARNING, "f", 1, "bad %s", ("password",), None)
    with structlog.testing.capture_logs() as logs:
        ThrottledWarnings().handle(record)
    assert not logs


def test_export_warnings_are_logged_once_a_minute() -> None:
    now = 100.0
    handler = ThrottledWarnings(clock=lambda: now)
    record = logging.LogRecord("opentelemetry.sdk.a", logging.WARNING, "f", 1, "no %s", ("route",), None)
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            handler.handle(record)
        now += WARNING_INTERVAL_S
        handler.handle(record)
    assert [(entry["error"], entry["source"], entry["not_repeated"]) for entry in logs] == [
        ("no route", "opentelemetry.sdk.a", 0),
        ("no route", "opentelemetry.sdk.a", 2),
    ]


def test_the_warning_handler_is_installed_once() -> None:
    for _ in range(3):
        throttle_export_warnings()
    logger = logging.getLogger("opentelemetry")
    assert sum(isinstance(handler, ThrottledWarnings) for handler in logger.handlers) == 1
    assert not logger.propagate
