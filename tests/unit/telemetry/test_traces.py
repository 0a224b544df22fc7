"""Spans: whose children they are, what they say, and which of them there are at all."""

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

from ratelimit_rls.core.decide import decide
from ratelimit_rls.core.model import Answer, Charge, Limit, Outline, Position, Reading, Refusal, Rule, Slot, Step, Unit
from ratelimit_rls.telemetry.traces import Ids, Metadata, TracedBatch, Traces, current_ids, store_span

METHOD = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
W3C = (("content-type", "application/grpc"), ("traceparent", f"00-{TRACE}-{PARENT}-01"))
W3C_NOT_SAMPLED = (("traceparent", f"00-{TRACE}-{PARENT}-00"),)
B3_SINGLE = (("b3", f"{TRACE}-{PARENT}-1"),)
B3_MULTI = (("x-b3-traceid", TRACE), ("x-b3-spanid", PARENT), ("x-b3-sampled", "1"))

STEP = Step(Limit(10, Unit.MINUTE), 1, Charge.ALWAYS)
RULE = Rule("edge.user", (STEP.limit,), position=Position("rules.yaml", 1, 1))
OUTLINE = Outline("edge", True, (STEP,), (Slot(RULE, (STEP,), 1, "edge.user"),))


class House:
    def __init__(self, sampling_rate: float = 1.0, drawn: Iterable[float] = repeat(0.5)) -> None:
        self._told = InMemorySpanExporter()
        self._provider = TracerProvider(sampler=ParentBased(ALWAYS_ON), shutdown_on_exit=False)
        self._provider.add_span_processor(SimpleSpanProcessor(self._told))
        self.drawn = iter(drawn)
        self.traces = Traces(self._provider, sampling_rate, self.drawn.__next__)

    def batch(self, *metadata: Metadata) -> TracedBatch:
        return self.traces.batch(METHOD, metadata, 1_000)

    def spans(self) -> Sequence[ReadableSpan]:
        return self._told.get_finished_spans()


@pytest.fixture(autouse=True)
def own_context() -> Iterator[None]:
    """A batch is answered in a task of its own; so is each test here."""
    from ratelimit_rls.telemetry import traces

    token = traces._current.set(None)
    yield
    traces._current.reset(token)


def ids(span: ReadableSpan) -> Ids:
    assert span.context is not None
    return Ids(f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}")


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


@pytest.mark.parametrize("sent", [W3C, B3_SINGLE, B3_MULTI])
def test_a_call_is_a_child_of_the_span_it_came_with(sent: Metadata) -> None:
    house = House(sampling_rate=0)  # Envoy has said yes
    house.batch(sent).ended(0)
    (span,) = house.spans()
    assert ids(span).trace_id == TRACE
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == PARENT
    assert (span.name, span.kind, span.start_time) == (METHOD[1:], SpanKind.SERVER, 1_000)
    assert attributes(span)["rpc.status_code"] == "OK"
    assert span.status.status_code is StatusCode.UNSET


def test_what_envoy_does_not_sample_has_no_span_but_can_be_found_by_its_id() -> None:
    house = House()
    batch = house.batch(W3C_NOT_SAMPLED, ())
    assert list(batch.spans) == [1]  # which came without a word on it
    assert batch.ids(0) == Ids(TRACE, PARENT)


@pytest.mark.parametrize(
    "sent",
    [(("traceparent", "00-nonsense"),), (("b3", b"\xff\x00"),), (("traceparent", ""),), (("x-b3-traceid", "0"),)],
)
def test_a_parent_that_cannot_be_read_is_none(sent: Metadata) -> None:
    house = House()
    batch = house.batch(sent)
    batch.ended(0)
    (span,) = house.spans()
    assert span.parent is None


@pytest.mark.parametrize("sent", [(("b3", "0"),), (("x-b3-sampled", "0"),)])
def test_a_decision_without_a_parent_is_heeded(sent: Metadata) -> None:
    assert not House().batch(sent).spans


def test_a_batch_that_is_over_has_no_part_in_what_it_has_set_going() -> None:
    house = House()
    batch = house.batch(W3C)
    batch.ended(0)
    batch.over()
    assert store_span("redis", 1) is None
    assert current_ids() is None


def test_of_several_calls_nobody_can_say_whose_line_it_is() -> None:
    House().batch(W3C, B3_SINGLE)
    assert current_ids() is None


def test_nothing_is_sampled_at_a_rate_of_nothing() -> None:
    batch = House(sampling_rate=0).batch((), ())
    assert not batch.spans
    assert batch.ids(0) is None
    assert store_span("redis", 2) is None


def test_of_those_without_a_parent_as_many_are_sampled_as_are_drawn() -> None:
    house = House(sampling_rate=0.3, drawn=[0.0, 0.3, 0.29, 0.9, 0.31, 0.1])
    nonsense = (("traceparent", "00-nonsense"),)
    batch = house.batch((), (), (), W3C, W3C_NOT_SAMPLED, (), nonsense, nonsense)
    assert list(batch.spans) == [0, 2, 3, 7]
    assert not list(house.drawn)


NOT_TAKEN_FOR_A_NO = {
    "sampled, with another flag": f"00-{TRACE}-{PARENT}-03",
    "a trace of zeros": f"00-{'0' * 32}-{PARENT}-00",
    "a parent of zeros": f"00-{TRACE}-{'0' * 16}-00",
    "too long": f"00-{TRACE}-{PARENT}-000",
    "capitals": f"00-{TRACE.upper()}-{PARENT}-00",
}


@pytest.mark.parametrize("traceparent", NOT_TAKEN_FOR_A_NO.values(), ids=NOT_TAKEN_FOR_A_NO.keys())
def test_only_a_parent_that_says_no_is_taken_at_its_word(traceparent: str) -> None:
    assert House().batch((("traceparent", traceparent),)).spans


@pytest.mark.parametrize("flags", ["00", "02", "fe"])
def test_a_parent_that_says_no_is_heard_whatever_b3_says(flags: str) -> None:
    batch = House().batch((("traceparent", f"00-{TRACE}-{PARENT}-{flags}"), *B3_MULTI))
    assert not batch.spans
    assert batch.ids(0) == Ids(TRACE, PARENT)


def test_a_refusal_says_by_which_rule_and_is_no_error() -> None:
    house = House()
    batch = house.batch(W3C)
    batch.asked(0, OUTLINE)
    batch.decided(0, decide(OUTLINE, Answer(True, 0, (Reading(-1, 5, 1),))))
    batch.ended(0)
    (span,) = house.spans()
    assert span.status.status_code is StatusCode.UNSET
    said = {name: value for name, value in attributes(span).items() if name.startswith("ratelimit.")}
    assert said == {
        "ratelimit.domain": "edge",
        "ratelimit.descriptors": 1,
        "ratelimit.limited": True,
        "ratelimit.rule": "edge.user",
        "ratelimit.source": "store",
    }


def test_who_is_turned_away_has_the_reason_in_place_of_a_rule() -> None:
    house = House()
    batch = house.batch(W3C)
    batch.decided(0, decide(replace(OUTLINE, steps=(), refusal=Refusal("blocked", "no", 403)), None))
    batch.ended(0)
    (span,) = house.spans()
    said = attributes(span)
    assert (said["ratelimit.limited"], said["ratelimit.reason"]) == (True, "blocked")
    assert "ratelimit.rule" not in said


def test_a_failure_is_an_error_with_its_status() -> None:
    house = House()
    house.batch(W3C).ended(0, "UNAVAILABLE", "no connection")
    (span,) = house.spans()
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "no connection")
    assert (attributes(span)["rpc.status_code"], attributes(span)["error.type"]) == ("UNAVAILABLE", "UNAVAILABLE")


def test_an_answer_that_is_held_ends_its_span_when_it_is_given() -> None:
    house = House()
    batch = house.batch((), ())
    batch.ended(0)
    batch.ended(1, in_s=3600)
    first, held = house.spans()
    assert first.end_time is not None
    assert held.end_time is not None
    assert held.end_time - first.end_time >= 3600e9


def test_a_batch_of_the_store_is_the_first_call_s_and_linked_to_the_others() -> None:
    house = House()
    batch = house.batch(W3C_NOT_SAMPLED, W3C, B3_SINGLE)
    span = store_span("redis", 3)
    assert span is not None
    span.end(None)
    for number in range(3):
        batch.ended(number)
    of_store, first, second = house.spans()
    assert (of_store.name, of_store.kind) == ("EVALSHA decide", SpanKind.CLIENT)
    assert of_store.parent is not None
    assert f"{of_store.parent.span_id:016x}" == ids(first).span_id
    assert [link.context.span_id for link in of_store.links] == [int(ids(second).span_id, 16)]
    assert attributes(of_store)["ratelimit.calls"] == 3
    assert attributes(of_store)["db.system.name"] == "redis"


def test_a_store_that_fails_is_told_with_the_kind_of_its_fault() -> None:
    house = House()
    house.batch(W3C)
    span = store_span("embedded", 1)
    assert span is not None
    span.end("StoreTimeout")
    (told,) = house.spans()
    assert (told.name, told.kind, told.status.status_code) == ("decide", SpanKind.INTERNAL, StatusCode.ERROR)
    assert attributes(told)["error.type"] == "StoreTimeout"


def test_a_batch_is_current_in_its_own_task_alone() -> None:
    house = House()
    assert current_ids() is None

    def answer() -> Ids | None:
        house.batch(W3C)
        return current_ids()

    seen = contextvars.copy_context().run(answer)
    assert seen is not None
    assert seen.trace_id == TRACE
    assert current_ids() is None
