"""The observer of a method: each call once, with its status, time and span."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode as SpanStatus

from ratelimit_rls.h2.status import RpcError, StatusCode
from ratelimit_rls.pipeline.batch import DelayedResponse
from ratelimit_rls.pipeline.observer import Observer
from ratelimit_rls.telemetry.decision_recorder import DecisionRecorder
from ratelimit_rls.telemetry.metrics import Metrics
from ratelimit_rls.telemetry.traces import Traces
from tests.support.pipelines import RecordedBatch

METHOD = "/service/Method"
FAILED = RpcError(StatusCode.UNAVAILABLE, "no connection")


async def nothing_back() -> None: ...


DELAYED = DelayedResponse(b"later", 60.0, "queue", nothing_back)


def new_observer(metrics: Metrics, traces: Traces | None = None) -> Observer:
    return Observer(METHOD, metrics, DecisionRecorder(metrics, None, None), traces=traces)


class Harness:
    def __init__(self) -> None:
        self.metrics = Metrics()
        self._exported = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exported))
        self.observer = new_observer(self.metrics, Traces(provider))

    def counts(self) -> dict[str, int]:
        return {status: times.count for status, times in self.metrics.calls[METHOD].by_status.items() if times.count}

    def statuses(self) -> list[SpanStatus]:
        return [span.status.status_code for span in self._exported.get_finished_spans()]


@pytest.fixture
def harness() -> Harness:
    return Harness()


async def test_each_call_is_counted_once_and_its_span_ended(harness: Harness) -> None:
    batch = RecordedBatch([b""] * 5)
    traced = harness.observer.begin(batch)
    harness.observer.responded(batch, [(1, FAILED), (4, b"late")], traced)
    assert harness.statuses() == [SpanStatus.ERROR, SpanStatus.UNSET]
    harness.observer.responded(batch, [(0, b"one"), (2, FAILED), (3, DELAYED)], traced)
    assert harness.counts() == {"OK": 3, "UNAVAILABLE": 2}
    assert harness.statuses() == [
        SpanStatus.ERROR,
        SpanStatus.UNSET,
        SpanStatus.UNSET,
        SpanStatus.ERROR,
        SpanStatus.UNSET,
    ]


async def test_all_responses_of_a_batch_are_counted_and_their_spans_ended(harness: Harness) -> None:
    batch = RecordedBatch([b""] * 3)
    traced = harness.observer.begin(batch)
    harness.observer.responded_all(batch, [b"one", FAILED, DELAYED], traced)
    assert harness.counts() == {"OK": 2, "UNAVAILABLE": 1}
    assert harness.statuses() == [SpanStatus.UNSET, SpanStatus.ERROR, SpanStatus.UNSET]


async def test_delay_is_included_in_the_call_time(harness: Harness) -> None:
    batch = RecordedBatch([b""])
    harness.observer.responded_all(batch, [DELAYED], harness.observer.begin(batch))
    assert 60 <= harness.metrics.calls[METHOD].by_status["OK"].value.sum_s < 61


def test_batch_is_counted_without_traces() -> None:
    metrics = Metrics()
    observer = new_observer(metrics)
    assert not observer.wants_metadata
    batch = RecordedBatch([b"", b""])
    observer.responded_all(batch, [b"one", b"two"], observer.begin(batch))
    assert metrics.calls[METHOD].count == 2


def test_calls_that_are_not_grpc_have_no_durations() -> None:
    metrics = Metrics()
    observer = Observer(None, metrics, DecisionRecorder(metrics, None, None))
    observer.responded_all(RecordedBatch([b""]), [b"one"], None)
    assert not metrics.calls
