"""Spans: parents, attributes, and sampling."""

from __future__ import annotations

import contextvars
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
from opentelemetry.trace import SpanKind, StatusCode

from ratelimit_rls.core.decision import decision_of
from ratelimit_rls.core.model import (
    Charge,
    DescriptorPlan,
    Limit,
    PlanTemplate,
    Position,
    Reading,
    Rejection,
    Rule,
    Step,
    StoreResult,
    Unit,
)
from ratelimit_rls.telemetry.traces import Metadata, TracedBatch, TraceIds, Traces, current_ids, store_span

METHOD = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
W3C = (("content-type", "application/grpc"), ("traceparent", f"00-{TRACE}-{PARENT}-01"))
W3C_NOT_SAMPLED = (("traceparent", f"00-{TRACE}-{PARENT}-00"),)
B3_SINGLE = (("b3", f"{TRACE}-{PARENT}-1"),)
B3_MULTI = (("x-b3-traceid", TRACE), ("x-b3-spanid", PARENT), ("x-b3-sampled", "1"))

STEP = Step(Limit(10, Unit.MINUTE), 1, Charge.ALWAYS)
RULE = Rule("edge.user", (STEP.limit,), position=Position("rules.yaml", 1, 1))
TEMPLATE = PlanTemplate("edge", True, (STEP,), (DescriptorPlan(RULE, (STEP,), 1, "edge.user"),))


class Setup:
    def __init__(self, sampling_rate: float = 1.0, drawn: Iterable[float] = repeat(0.5)) -> None:
        self._exported = InMemorySpanExporter()
        self._provider = TracerProvider(sampler=ParentBased(ALWAYS_ON), shutdown_on_exit=False)
        self._provider.add_span_processor(SimpleSpanProcessor(self._exported))
        self.drawn = iter(drawn)
        self.traces = Traces(self._provider, sampling_rate, self.drawn.__next__)

    def batch(self, *metadata: Metadata) -> TracedBatch:
        return self.traces.batch(METHOD, metadata, 1_000)

    def spans(self) -> Sequence[ReadableSpan]:
        return self._exported.get_finished_spans()


@pytest.fixture(autouse=True)
def own_context() -> Iterator[None]:
    """Run each test in a context of its own, as a batch is answered in a task of its own."""
    from ratelimit_rls.telemetry import traces

    token = traces._current.set(None)
    yield
    traces._current.reset(token)


def ids(span: ReadableSpan) -> TraceIds:
    assert span.context is not None
    return TraceIds(f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}")


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


@pytest.mark.parametrize("sent", [W3C, B3_SINGLE, B3_MULTI])
def test_a_span_is_a_child_of_the_propagated_parent(sent: Metadata) -> None:
    setup = Setup(sampling_rate=0)  # Envoy has sampled the call
    setup.batch(sent).ended(0)
    (span,) = setup.spans()
    assert ids(span).trace_id == TRACE
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == PARENT
    assert (span.name, span.kind, span.start_time) == (METHOD[1:], SpanKind.SERVER, 1_000)
    assert attributes(span)["rpc.response.status_code"] == "OK"
    assert span.status.status_code is StatusCode.UNSET


def test_unsampled_calls_have_no_span_but_trace_ids() -> None:
    setup = Setup()
    batch = setup.batch(W3C_NOT_SAMPLED, ())
    assert list(batch.spans) == [1]  # without a sampling decision
    assert batch.ids(0) == TraceIds(TRACE, PARENT)


@pytest.mark.parametrize(
    "sent",
    [(("traceparent", "00-nonsense"),), (("b3", b"\xff\x00"),), (("traceparent", ""),), (("x-b3-traceid", "0"),)],
)
def test_an_invalid_parent_is_ignored(sent: Metadata) -> None:
    setup = Setup()
    batch = setup.batch(sent)
    batch.ended(0)
    (span,) = setup.spans()
    assert span.parent is None


@pytest.mark.parametrize("sent", [(("b3", "0"),), (("x-b3-sampled", "0"),)])
def test_a_sampling_decision_without_a_parent_is_respected(sent: Metadata) -> None:
    assert not Setup().batch(sent).spans


def test_a_finished_batch_is_detached_from_tasks_it_started() -> None:
    setup = Setup()
    batch = setup.batch(W3C)
    batch.ended(0)
    batch.detach()
    assert store_span("redis", 1) is None
    assert current_ids() is None


def test_a_batch_of_several_calls_has_no_current_ids() -> None:
    Setup().batch(W3C, B3_SINGLE)
    assert current_ids() is None


def test_nothing_is_sampled_at_rate_zero() -> None:
    batch = Setup(sampling_rate=0).batch((), ())
    assert not batch.spans
    assert batch.ids(0) is None
    assert store_span("redis", 2) is None


def test_calls_without_a_parent_are_sampled_at_the_rate() -> None:
    setup = Setup(sampling_rate=0.3, drawn=[0.0, 0.3, 0.29, 0.9, 0.31, 0.1])
    nonsense = (("traceparent", "00-nonsense"),)
    batch = setup.batch((), (), (), W3C, W3C_NOT_SAMPLED, (), nonsense, nonsense)
    assert list(batch.spans) == [0, 2, 3, 7]
    assert not list(setup.drawn)


NOT_TAKEN_FOR_A_NO = {
    "sampled, with another flag": f"00-{TRACE}-{PARENT}-03",
    "a trace of zeros": f"00-{'0' * 32}-{PARENT}-00",
    "a parent of zeros": f"00-{TRACE}-{'0' * 16}-00",
    "too long": f"00-{TRACE}-{PARENT}-000",
    "capitals": f"00-{TRACE.upper()}-{PARENT}-00",
}


@pytest.mark.parametrize("traceparent", NOT_TAKEN_FOR_A_NO.values(), ids=NOT_TAKEN_FOR_A_NO.keys())
def test_only_a_valid_unsampled_traceparent_skips_parsing(traceparent: str) -> None:
    assert Setup().batch((("traceparent", traceparent),)).spans


@pytest.mark.parametrize("flags", ["00", "02", "fe"])
def test_an_unsampled_traceparent_takes_precedence_over_b3(flags: str) -> None:
    batch = Setup().batch((("traceparent", f"00-{TRACE}-{PARENT}-{flags}"), *B3_MULTI))
    assert not batch.spans
    assert batch.ids(0) == TraceIds(TRACE, PARENT)


def test_a_denial_has_the_rule_and_is_not_an_error() -> None:
    setup = Setup()
    batch = setup.batch(W3C)
    batch.planned(0, TEMPLATE)
    batch.decided(0, decision_of(TEMPLATE, StoreResult.of(True, 0, (Reading(-1, 5, 1),))))
    batch.ended(0)
    (span,) = setup.spans()
    assert span.status.status_code is StatusCode.UNSET
    found = {name: value for name, value in attributes(span).items() if name.startswith("ratelimit.")}
    assert found == {
        "ratelimit.domain": "edge",
        "ratelimit.descriptors": 1,
        "ratelimit.limited": True,
        "ratelimit.rule": "edge.user",
        "ratelimit.source": "store",
    }


def test_a_rejected_caller_has_the_reason_and_no_rule() -> None:
    setup = Setup()
    batch = setup.batch(W3C)
    batch.decided(0, decision_of(replace(TEMPLATE, steps=(), rejection=Rejection("blocked", "no", 403)), None))
    batch.ended(0)
    (span,) = setup.spans()
    found = attributes(span)
    assert (found["ratelimit.limited"], found["ratelimit.reason"]) == (True, "blocked")
    assert "ratelimit.rule" not in found


def test_a_failed_call_is_an_error_with_its_status() -> None:
    setup = Setup()
    setup.batch(W3C).ended(0, "UNAVAILABLE", "no connection")
    (span,) = setup.spans()
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "no connection")
    assert (attributes(span)["rpc.response.status_code"], attributes(span)["error.type"]) == (
        "UNAVAILABLE",
        "UNAVAILABLE",
    )


def test_a_delayed_response_ends_its_span_when_it_is_sent() -> None:
    setup = Setup()
    batch = setup.batch((), ())
    batch.ended(0)
    batch.ended(1, in_s=3600)
    first, delayed = setup.spans()
    assert first.end_time is not None
    assert delayed.end_time is not None
    assert delayed.end_time - first.end_time >= 3600e9


def test_a_store_span_is_a_child_of_the_first_call_with_links() -> None:
    setup = Setup()
    batch = setup.batch(W3C_NOT_SAMPLED, W3C, B3_SINGLE)
    span = store_span("redis", 3)
    assert span is not None
    span.end(None)
    for number in range(3):
        batch.ended(number)
    of_store, first, second = setup.spans()
    assert (of_store.name, of_store.kind) == ("decide", SpanKind.CLIENT)
    assert of_store.parent is not None
    assert f"{of_store.parent.span_id:016x}" == ids(first).span_id
    assert [link.context.span_id for link in of_store.links] == [int(ids(second).span_id, 16)]
    assert attributes(of_store)["ratelimit.calls"] == 3
    assert attributes(of_store)["db.system.name"] == "redis"


def test_a_store_error_is_recorded_with_its_type() -> None:
    setup = Setup()
    setup.batch(W3C)
    span = store_span("embedded", 1)
    assert span is not None
    span.end("StoreTimeout")
    (recorded,) = setup.spans()
    assert (recorded.name, recorded.kind, recorded.status.status_code) == (
        "decide",
        SpanKind.INTERNAL,
        StatusCode.ERROR,
    )
    assert attributes(recorded)["error.type"] == "StoreTimeout"


def test_a_batch_is_current_only_in_its_own_task() -> None:
    setup = Setup()
    assert current_ids() is None

    def answer() -> TraceIds | None:
        setup.batch(W3C)
        return current_ids()

    seen = contextvars.copy_context().run(answer)
    assert seen is not None
    assert seen.trace_id == TRACE
    assert current_ids() is None
