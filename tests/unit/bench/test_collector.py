"""The collector counts calls that were traced, as the real exporter sends them, and metrics that a real server has."""

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
from bench.collector import Taken
from bench.connection import LoadError
from bench.fleet import telemetry
from bench.servers import free_port
from ratelimit_rls.settings import Settings


@pytest.fixture
def so_far() -> Taken:
    return Taken()


@pytest.fixture
def url(so_far: Taken) -> Iterator[str]:
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


def test_spans_of_calls_are_counted_and_those_of_what_was_done_for_them_are_not(url: str) -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{url}/v1/traces")))
    tracer = provider.get_tracer("test")
    for kind in (SpanKind.SERVER, SpanKind.CLIENT, SpanKind.SERVER, SpanKind.INTERNAL, SpanKind.SERVER):
        tracer.start_span("a call", kind=kind).end()
    provider.shutdown()
    assert collector.taken(url) == Taken(calls=3)


def test_a_scrape_finds_metrics_only_where_something_answers(url: str) -> None:
    assert collector.scrape(url)
    assert not collector.scrape(f"http://127.0.0.1:{free_port()}/metrics")


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (Taken(calls=100, scrapes=1), None),
        (Taken(calls=50, scrapes=1), None),
        (Taken(calls=49, scrapes=1), "of 10000 calls, 49 were traced"),
        (Taken(calls=201, scrapes=1), "of 10000 calls, 201 were traced: not 1%"),
        (Taken(calls=100, scrapes=0), "metrics scraped 0 times"),
    ],
)
def test_figures_of_a_service_that_tells_need_traces_and_scrapes(
    url: str, so_far: Taken, told: Taken, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "TOLD_WITHIN_S", 0.0)
    so_far.calls, so_far.scrapes = told.calls, told.scrapes
    if said is None:
        answers.check_told(url, 10_000)
        return
    with pytest.raises(LoadError, match=said):
        answers.check_told(url, 10_000)


def test_a_service_is_told_where_to_tell_in_its_own_words(read: Callable[..., Settings]) -> None:
    settings = read(USE_STATSD="false", **telemetry("127.0.0.1:1234", "http://127.0.0.1:99"))
    assert settings.stats_sink == "prometheus"
    assert settings.prometheus_listen == ("127.0.0.1", 1234)
    assert settings.tracing_enabled
    assert settings.tracing_sampling_rate == 0.01
