"""Metrics by OTLP: what a collector understands of them, over HTTP and gRPC, and what happens when there is none."""

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
from ratelimit_rls.telemetry.collected import Collected, Distribution, Series
from ratelimit_rls.telemetry.export_errors import EVERY_S, RareWarnings, warn_rarely
from ratelimit_rls.telemetry.instruments import DURATIONS_S, INSTRUMENTS, Instrument, Kind
from ratelimit_rls.telemetry.otlp import Collect, OtlpMetrics, new_otlp_metrics
from ratelimit_rls.telemetry.resource import resource
from tests.otlp_collector import OtlpCollector, ReceivedMetric

TIMES = Distribution((1, 2, *[0] * 10, 4, 3), 5.25)
CUMULATIVE = AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE


def series(instrument: Instrument, *attributes: str) -> Series:
    return Series(instrument.name, attributes)


EVERYTHING: Collected = {
    series(one, *(f"v{n}" for n in range(len(one.attributes)))): TIMES if one.kind is Kind.HISTOGRAM else 7
    for one in INSTRUMENTS
}


@pytest.fixture(scope="module")
def running() -> Iterator[OtlpCollector]:
    with OtlpCollector() as collector:
        yield collector


@pytest.fixture
def collector(running: OtlpCollector) -> OtlpCollector:
    running.refusing = False
    running.forget()
    return running


@pytest.fixture(autouse=True)
def _library_log() -> Iterator[None]:
    """As it was before the test."""
    logger = logging.getLogger("opentelemetry")
    handlers, propagate = logger.handlers[:], logger.propagate
    yield
    logger.handlers[:], logger.propagate = handlers, propagate


NewSink = Callable[..., OtlpMetrics]


def once(collected: Collected) -> Collect:
    """As a process tells it."""

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
async def test_a_collector_is_told_of_everything(collector: OtlpCollector, new_sink: NewSink, protocol: str) -> None:
    sink = new_sink(protocol, tracing_service_namespace="edge", tracing_service_instance_id="one")
    await sink.flush()
    await sink.close()
    told = {metric.name: metric for metric in collector.wait_for_metrics(2 * len(INSTRUMENTS) // 3)}
    ours = [one for one in INSTRUMENTS if not one.reference]
    assert set(told) == {one.name for one in ours}
    for one in ours:
        _check(one, told[one.name])
    assert collector.headers[0]["x-team"] == "limits"
    assert collector.exports == 2


def _check(one: Instrument, told: ReceivedMetric) -> None:
    metric = told.metric
    assert (metric.description, metric.unit, told.scope) == (one.about, one.unit, "ratelimit_rls")
    assert told.resource["service.name"] == "RateLimit"
    assert told.resource["service.namespace"] == "edge"
    assert told.resource["service.instance.id"] == "one"
    assert told.resource["service.version"] == ratelimit_rls.__version__
    ((attributes, point),) = told.by_attributes().items()
    assert dict(attributes) == {key: f"v{n}" for n, key in enumerate(one.attributes)}
    assert point.time_unix_nano >= point.start_time_unix_nano
    assert (point.start_time_unix_nano > 0) is (one.kind is not Kind.GAUGE)  # which did not start at any time
    match one.kind:
        case Kind.COUNTER:
            assert metric.sum.is_monotonic
            assert metric.sum.aggregation_temporality == CUMULATIVE
            assert point.as_int == 7
        case Kind.GAUGE:
            assert metric.HasField("gauge")
            assert point.as_int == 7
        case Kind.HISTOGRAM:
            assert metric.histogram.aggregation_temporality == CUMULATIVE
            assert (point.count, point.sum) == (10, 5.25)
            assert tuple(point.bucket_counts) == TIMES.counts
            assert tuple(point.explicit_bounds) == DURATIONS_S
            assert not point.HasField("min")


async def test_what_does_not_apply_is_no_attribute(collector: OtlpCollector, new_sink: NewSink) -> None:
    sink = new_sink("http", once({series(instruments.STORE_DURATION, "redis", ""): TIMES}))
    await sink.close()
    (metric,) = collector.wait_for_metrics(1, "ratelimit.store.duration")
    assert list(metric.by_attributes()) == [(("ratelimit.store", "redis"),)]


async def test_it_is_sent_again_and_again_from_the_same_start(collector: OtlpCollector, new_sink: NewSink) -> None:
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


async def test_many_series_are_several_messages(
    collector: OtlpCollector, new_sink: NewSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otlp, "BATCH_POINTS", 10)
    sink = new_sink("http", once({series(instruments.NEAR_LIMIT, "d", f"r{n}"): n for n in range(25)}))
    await sink.close()
    assert [len(metric.points) for metric in collector.wait_for_metrics(3)] == [10, 10, 5]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
async def test_a_collector_that_refuses_is_said_once(
    collector: OtlpCollector, new_sink: NewSink, protocol: str
) -> None:
    collector.refusing = True
    sink = new_sink(protocol)
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            await sink.flush()
        await sink.close()
    assert [entry["event"] for entry in logs] == ["telemetry is not exported"]
    assert logs[0]["source"].startswith("opentelemetry.exporter.otlp")


class Troubled:
    """An exporter that breaks at first, and then does not come back until it is let go."""

    def __init__(self) -> None:
        self.exports = 0
        self.let_go = threading.Event()

    def export(self, _data: object) -> None:
        self.exports += 1
        if self.exports == 1:
            raise ValueError("broken")
        self.let_go.wait()

    def shutdown(self) -> None:
        """Nothing to end."""


async def test_an_exporter_that_breaks_or_hangs_does_neither_to_us(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "CLOSE_S", 0.01)
    exporter: Any = Troubled()
    sink = OtlpMetrics(exporter, resource(Settings()), once(EVERYTHING), interval_s=60)
    with structlog.testing.capture_logs() as logs:
        await sink.flush()
    assert logs == [{"event": "metrics are not exported", "error": "broken", "log_level": "warning"}]
    await sink.close()  # which waits so long and no longer
    await sink.close()  # and does not start a second one beside the first
    assert exporter.exports == 2
    exporter.let_go.set()


async def test_figures_that_cannot_be_had_are_not_the_end_of_it() -> None:
    async def none() -> Collected:
        raise OSError("no space left")

    exporter: Any = Troubled()
    sink = OtlpMetrics(exporter, resource(Settings()), none, interval_s=60)
    with structlog.testing.capture_logs() as logs:
        await sink.flush()
    assert [line["error"] for line in logs] == ["no space left"]
    assert exporter.exports == 0


def test_it_is_off_by_default() -> None:
    assert new_otlp_metrics(Settings(), once({})) is None


@pytest.mark.slow
def test_what_is_off_costs_no_import() -> None:
    package = Path(ratelimit_rls.__file__).parent.parent
    code = "import sys, ratelimit_rls.telemetry.otlp, ratelimit_rls.telemetry.resource; print(*sys.modules)"
    environ = {**os.environ, "PYTHONPATH": str(package)}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ, check=True)
    assert "ratelimit_rls.telemetry.otlp" in ran.stdout.split()
    assert "opentelemetry" not in ran.stdout.split()


def _attributes(**settings: Any) -> dict[str, Any]:
    return dict(resource(Settings(**settings)).attributes)


def test_who_sends_is_said_by_settings_then_by_opentelemetrys_variables(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_what_a_client_sent_is_no_complaint_of_ours() -> None:
    record = logging.LogRecord("opentelemetry.trace.span", logging.WARNING, "f", 1, "bad %s", ("password",), None)
    with structlog.testing.capture_logs() as logs:
        RareWarnings().handle(record)
    assert not logs


def test_a_complaint_is_heard_once_a_minute() -> None:
    now = 100.0
    handler = RareWarnings(clock=lambda: now)
    record = logging.LogRecord("opentelemetry.sdk.a", logging.WARNING, "f", 1, "no %s", ("route",), None)
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            handler.handle(record)
        now += EVERY_S
        handler.handle(record)
    assert [(entry["error"], entry["source"], entry["not_repeated"]) for entry in logs] == [
        ("no route", "opentelemetry.sdk.a", 0),
        ("no route", "opentelemetry.sdk.a", 2),
    ]


def test_it_is_heard_once_however_often_that_is_asked_for() -> None:
    for _ in range(3):
        warn_rarely()
    logger = logging.getLogger("opentelemetry")
    assert sum(isinstance(handler, RareWarnings) for handler in logger.handlers) == 1
    assert not logger.propagate
