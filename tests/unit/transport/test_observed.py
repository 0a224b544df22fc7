"""What is measured of a batch of calls: each once, with its status, its time and its span."""

from __future__ import annotations

from time import monotonic

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from ratelimit_rls.telemetry.metrics import Metrics
from ratelimit_rls.telemetry.traces import Traces
from ratelimit_rls.transport.grpc.door import Failure, FailureCode, Held
from ratelimit_rls.transport.grpc.observed import Observer

METHOD = "/service/Method"
FAILED = Failure(FailureCode.UNAVAILABLE, "no connection")


async def nothing_back() -> None: ...


HELD = Held(b"later", 60.0, "queue", nothing_back)


class House:
    def __init__(self) -> None:
        self.metrics = Metrics()
        self._told = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._told))
        self.observer = Observer(METHOD, self.metrics, Traces(provider))

    def counts(self) -> dict[str, int]:
        return {status: times.count for status, times in self.metrics.calls[METHOD].by_status.items() if times.count}

    def statuses(self) -> list[StatusCode]:
        return [span.status.status_code for span in self._told.get_finished_spans()]


@pytest.fixture
def house() -> House:
    return House()


def test_every_call_is_counted_once_and_its_span_ended(house: House) -> None:
    observed = house.observer.batch(monotonic(), [()] * 5)
    observed.answered_apart(1, FAILED)
    observed.answered_apart(4, b"late")
    assert house.statuses() == [StatusCode.ERROR, StatusCode.UNSET]
    observed.answered([b"one", None, FAILED, HELD, None])
    assert house.counts() == {"OK": 3, "UNAVAILABLE": 2}
    assert house.statuses() == [
        StatusCode.ERROR,
        StatusCode.UNSET,
        StatusCode.UNSET,
        StatusCode.ERROR,
        StatusCode.UNSET,
    ]


def test_a_call_that_is_held_took_as_long_as_it_is_held(house: House) -> None:
    house.observer.batch(monotonic(), [()]).answered([HELD])
    assert 60 <= house.metrics.calls[METHOD].by_status["OK"].value.sum_s < 61


def test_without_traces_a_batch_is_counted_all_the_same() -> None:
    metrics = Metrics()
    observer = Observer(METHOD, metrics, None)
    assert not observer.wants_metadata
    observer.batch(monotonic(), []).answered([b"one", b"two"])
    assert metrics.calls[METHOD].count == 2
