"""The benchmark collector counts traced calls of the real exporter and scrapes of a real server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind

from bench import answers, collector
from bench.collector import Received
from bench.connection import LoadError
from bench.fleet import telemetry
from ratelimit_rls.settings import Settings
from tests.support.ports import free_port


@pytest.fixture
def so_far() -> Received:
    return Received()


@pytest.fixture
def url(so_far: Received) -> Iterator[str]:
    with collector.server(so_far) as listening:
        yield from _serving(listening)


def _serving(listening: ThreadingHTTPServer) -> Iterator[str]:
    thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.server_address[1]}"
    finally:
        listening.shutdown()
        thread.join()


def test_only_server_spans_are_counted(url: str) -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{url}/v1/traces")))
    tracer = provider.get_tracer("test")
    for kind in (SpanKind.SERVER, SpanKind.CLIENT, SpanKind.SERVER, SpanKind.INTERNAL, SpanKind.SERVER):
        tracer.start_span("a call", kind=kind).end()
    provider.shutdown()
    assert collector.fetch_received(url) == Received(calls=3)


def test_scrape_fails_without_a_server(url: str) -> None:
    assert collector.scrape(url)
    assert not collector.scrape(f"http://127.0.0.1:{free_port()}/metrics")


@pytest.mark.parametrize(
    ("received", "error"),
    [
        (Received(calls=100, scrapes=1), None),
        (Received(calls=50, scrapes=1), None),
        (Received(calls=49, scrapes=1), "of 10000 calls, 49 were traced"),
        (Received(calls=201, scrapes=1), "of 10000 calls, 201 were traced: not 1%"),
        (Received(calls=100, scrapes=0), "metrics scraped 0 times"),
    ],
)
def test_telemetry_figures_need_traces_and_scrapes(
    url: str, so_far: Received, received: Received, error: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "EXPORT_TIMEOUT_S", 0.0)
    so_far.calls, so_far.scrapes = received.calls, received.scrapes
    if error is None:
        answers.check_exported(url, 10_000)
        return
    with pytest.raises(LoadError, match=error):
        answers.check_exported(url, 10_000)


def test_telemetry_settings_are_valid_settings_of_the_service(read: Callable[..., Settings]) -> None:
    settings = read(USE_STATSD="false", **telemetry("127.0.0.1:1234", "http://127.0.0.1:99"))
    assert settings.stats_sink == "prometheus"
    assert settings.prometheus_listen == ("127.0.0.1", 1234)
    assert settings.tracing_enabled
    assert settings.tracing_sampling_rate == 0.01
