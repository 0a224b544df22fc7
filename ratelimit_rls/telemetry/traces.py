"""Traces: a span for each sampled call, and one for each batch sent to the store.

    Envoy's span ─► envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit ─► decide

Calls are processed in batches, so a batch has one store span: a child of the first sampled call, with links to the
others. Envoy decides which calls are sampled; calls without a parent are sampled by TRACING_SAMPLING_RATE. With tracing
off, the only cost is reading one variable per batch of the store.

Most calls are not sampled, and the SDK would create a span for each to find out: 6 µs for a call without a parent, 14
with one. So it is used only for spans that will exist, and only their parents are parsed.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from random import random
from time import time_ns
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ratelimit_rls.core.model import Code, Decision, PlanTemplate
from ratelimit_rls.telemetry.rule_labels import rule_label

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.propagators.textmap import TextMapPropagator
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

Metadata = Sequence[tuple[str, str | bytes]]
"""The metadata of a call, with keys in lower case."""

Carrier = Mapping[str, str]
"""The part of the metadata that may name a parent span."""

_HEADERS = frozenset({"traceparent", "tracestate", "b3", "x-b3-traceid", "x-b3-spanid", "x-b3-sampled", "x-b3-flags"})
"""Headers that name the parent: W3C's, and Zipkin's in one header or in several."""

_NOT_SAMPLED = re.compile("00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f][02468ace]")
"""A `traceparent` that is not sampled. It takes precedence over B3."""

CLOSE_S = 3.0

_current: ContextVar[TracedBatch | None] = ContextVar("traced_batch", default=None)


class TraceIds(NamedTuple):
    """The ids in hexadecimal, as in logs."""

    trace_id: str
    span_id: str


class Traces:
    """Creates the spans of a process."""

    def __init__(
        self, provider: TracerProvider, sampling_rate: float = 1.0, draw: Callable[[], float] = random
    ) -> None:
        """`provider` must sample everything without a parent: those calls are sampled here, with `draw` below 1."""
        from opentelemetry.propagators.b3 import B3MultiFormat
        from opentelemetry.propagators.composite import CompositePropagator
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._sampling_rate = sampling_rate
        self._draw = draw
        self._tracer = provider.get_tracer("ratelimit_rls")
        # The last one takes precedence if both are present. The B3 propagator also reads the one-header form.
        self._propagator: TextMapPropagator = CompositePropagator([B3MultiFormat(), TraceContextTextMapPropagator()])

    def batch(self, method: str, metadata: Sequence[Metadata], received_ns: int) -> TracedBatch:
        """Begin the spans of a batch of calls, by the metadata of each. Call it in the task that answers them."""
        spans: dict[int, Span] = {}
        carriers: list[Carrier] = []
        for number, sent in enumerate(metadata):
            carrier = {name: value for name, value in sent if name in _HEADERS and isinstance(value, str)}
            carriers.append(carrier)
            if not carrier and self._draw() >= self._sampling_rate:
                continue
            if not carrier or not _is_unsampled(carrier):
                span = self._span(method, carrier, received_ns)
                if span is not None:
                    spans[number] = span
        traced = TracedBatch(self._tracer, spans, carriers, self._propagator)
        _current.set(traced)
        return traced

    def _span(self, method: str, carrier: Carrier, received_ns: int) -> Span | None:
        """Begin a span; None if its parent is not sampled, or it has no valid parent and was not drawn."""
        from opentelemetry.trace import get_current_span

        parent = self._propagator.extract(carrier) if carrier else None
        if parent is not None and not get_current_span(parent).get_span_context().is_valid:
            parent = None
            if self._draw() >= self._sampling_rate:
                return None
        span = _server_span(self._tracer, method, parent, received_ns)
        return span if span.is_recording() else None

    async def close(self) -> None:
        """Send the remaining spans, and wait at most CLOSE_S: a collector that hangs must not block the exit."""
        loop = asyncio.get_running_loop()
        sent = asyncio.Event()

        def send() -> None:
            self._provider.shutdown()
            with suppress(RuntimeError):  # the loop has ended, and nothing waits any more
                loop.call_soon_threadsafe(sent.set)

        # Not from a pool: the interpreter would wait for a pool's thread before it exits.
        threading.Thread(target=send, name="traces-close", daemon=True).start()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await sent.wait()


class TracedBatch:
    """The spans of the sampled calls of a batch, by their index in it.

    Timers and tasks that were started while it was answered inherit it, and may run long after: `detach` ends that.
    """

    def __init__(
        self, tracer: Tracer, spans: Mapping[int, Span], carriers: Sequence[Carrier], propagator: TextMapPropagator
    ) -> None:
        self.tracer = tracer
        self.spans = spans
        self._carriers = carriers
        self._propagator = propagator

    def detach(self) -> None:
        """Detach: all calls have their responses."""
        self.spans, self._carriers = {}, ()

    @property
    def is_single_call(self) -> bool:
        return len(self._carriers) == 1

    def planned(self, number: int, template: PlanTemplate) -> None:
        if (span := self.spans.get(number)) is not None:
            span.set_attribute("ratelimit.domain", template.domain)
            span.set_attribute("ratelimit.descriptors", len(template.descriptor_plans))

    def decided(self, number: int, decision: Decision) -> None:
        """Record a decision. A denial is not an error: denying is what the service is for."""
        span = self.spans.get(number)
        if span is None:
            return
        span.set_attribute("ratelimit.limited", decision.code is Code.OVER_LIMIT)
        denying = next((status for status in decision.statuses if status.code is Code.OVER_LIMIT), None)
        if decision.template.rejection is not None:
            span.set_attribute("ratelimit.reason", decision.template.rejection.reason)
        elif denying is not None:
            span.set_attribute("ratelimit.rule", rule_label(denying.descriptor_plan.rule))
        source = "fallback" if decision.without_store is not None else "cache" if decision.remembered else "store"
        span.set_attribute("ratelimit.source", source)

    def ended(self, number: int, status: str = "OK", message: str = "", in_s: float = 0.0) -> None:
        """End a span. `status` is the name of a gRPC status code; `in_s` is the remaining delay of the response."""
        span = self.spans.get(number)
        if span is None:
            return
        span.set_attribute("rpc.response.status_code", status)
        if status != "OK":
            from opentelemetry.trace import Status, StatusCode

            span.set_attribute("error.type", status)
            span.set_status(Status(StatusCode.ERROR, message))
        span.end(time_ns() + int(in_s * 1e9))

    def ids(self, number: int) -> TraceIds | None:
        """Return the ids of a call's span, or of its parent if it is not sampled."""
        from opentelemetry.trace import get_current_span

        span = self.spans.get(number)
        if span is None and (carrier := self._carriers[number]):
            span = get_current_span(self._propagator.extract(carrier))
        if span is None or not span.get_span_context().is_valid:
            return None
        context = span.get_span_context()
        return TraceIds(f"{context.trace_id:032x}", f"{context.span_id:016x}")


class StoreSpan(Protocol):
    def end(self, error: str | None) -> None:
        """End the span. `error` is the type of the error, if any."""
        ...


def store_span(store: str, calls: int) -> StoreSpan | None:
    """Begin the span of a batch that is sent to a store; None if none of its calls is sampled."""
    traced = _current.get()
    return _BatchSpan(traced, store, calls) if traced is not None and traced.spans else None


def current_ids() -> TraceIds | None:
    """Return the ids of the current call; None in a batch of several, where the current one is unknown."""
    traced = _current.get()
    return traced.ids(0) if traced is not None and traced.is_single_call else None


class _BatchSpan:
    def __init__(self, traced: TracedBatch, store: str, calls: int) -> None:
        from opentelemetry.trace import Link, SpanKind, set_span_in_context

        first, *others = traced.spans.values()
        is_redis = store == "redis"
        attributes: dict[str, str | int] = {"ratelimit.store": store, "ratelimit.calls": calls}
        if is_redis:
            attributes |= {
                "db.system.name": "redis",
                "db.stored_procedure.name": "decide",
            }
        self._span = traced.tracer.start_span(
            "decide",
            context=set_span_in_context(first),
            kind=SpanKind.CLIENT if is_redis else SpanKind.INTERNAL,
            attributes=attributes,
            links=[Link(span.get_span_context()) for span in others],
        )

    def end(self, error: str | None) -> None:
        if error is not None:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_attribute("error.type", error)
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()


def _is_unsampled(carrier: Carrier) -> bool:
    """Check without parsing the parent, which takes another 10 µs; False means perhaps."""
    if _NOT_SAMPLED.fullmatch(carrier.get("traceparent", "")):
        return True
    # A sampling decision without a parent.
    return carrier.get("b3") == "0" or (carrier.get("x-b3-sampled") == "0" and "x-b3-traceid" not in carrier)


def _server_span(tracer: Tracer, method: str, parent: Context | None, received_ns: int) -> Span:
    from opentelemetry.context import Context
    from opentelemetry.trace import SpanKind

    # An empty context, not the current one: earlier work on this loop is not a parent.
    return tracer.start_span(
        method.removeprefix("/"),
        context=parent if parent is not None else Context(),
        kind=SpanKind.SERVER,
        attributes={"rpc.system.name": "grpc", "rpc.method": method.removeprefix("/")},
        start_time=received_ns,
    )
