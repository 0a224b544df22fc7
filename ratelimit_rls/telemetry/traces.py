"""Traces: a span for each call that is sampled, and one for each batch that the store is asked.

    Envoy's span ─► envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit ─► EVALSHA decide

Calls travel in batches, so a batch has one span of the store: a child of the first sampled call, with links to the
others. Who is sampled is Envoy's to say; calls without a parent are sampled by TRACING_SAMPLING_RATE. With tracing off
nothing here is reached but one look at a variable per batch of the store.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from time import time_ns
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ratelimit_rls.core.model import Code, Decision, Outline
from ratelimit_rls.telemetry.rule_names import told_as

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.propagators.textmap import TextMapPropagator
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

Metadata = Sequence[tuple[str, str | bytes]]
"""A call's, keys in lower case."""

_HEADERS = frozenset({"traceparent", "tracestate", "b3", "x-b3-traceid", "x-b3-spanid", "x-b3-sampled", "x-b3-flags"})
"""What says whose child a call is: W3C's and Zipkin's, in one header or in several."""

CLOSE_S = 3.0

_current: ContextVar[TracedBatch | None] = ContextVar("traced_batch", default=None)


class Ids(NamedTuple):
    """In hexadecimal, as logs have them."""

    trace_id: str
    span_id: str


class Traces:
    """Makes the spans of a process."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.propagators.b3 import B3MultiFormat
        from opentelemetry.propagators.composite import CompositePropagator
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("ratelimit_rls")
        # Where both are there, what is read last wins. B3's reader knows its one-header form, too.
        self._propagator: TextMapPropagator = CompositePropagator([B3MultiFormat(), TraceContextTextMapPropagator()])

    def batch(self, method: str, metadata: Sequence[Metadata], received_ns: int) -> TracedBatch:
        """Begin the spans of a batch of calls, by the metadata of each; in the task that is to answer them."""
        spans: dict[int, Span] = {}
        parents: list[Context | None] = []
        for number, sent in enumerate(metadata):
            carrier = {name: value for name, value in sent if name in _HEADERS and isinstance(value, str)}
            parent = self._propagator.extract(carrier) if carrier else None
            parents.append(parent)
            if carrier.get("b3") == "0" or (carrier.get("x-b3-sampled") == "0" and "x-b3-traceid" not in carrier):
                continue  # no parent, and yet a decision
            span = _server_span(self._tracer, method, parent, received_ns)
            if span.is_recording():
                spans[number] = span
        traced = TracedBatch(self._tracer, spans, parents)
        _current.set(traced)
        return traced

    async def close(self) -> None:
        """Send what is left, and wait for that only so long: a collector that hangs must not keep the process."""
        loop = asyncio.get_running_loop()
        sent = asyncio.Event()

        def send() -> None:
            self._provider.shutdown()
            with suppress(RuntimeError):  # the loop has ended, and nobody waits any more
                loop.call_soon_threadsafe(sent.set)

        # Not of a pool: the interpreter would not end before a thread of one does.
        threading.Thread(target=send, name="traces-close", daemon=True).start()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await sent.wait()


class TracedBatch:
    """The spans of those calls of a batch that are sampled, by their number in it.

    Timers and tasks that were begun while it was answered have it for theirs, and go on long after: `over` ends that.
    """

    def __init__(self, tracer: Tracer, spans: Mapping[int, Span], parents: Sequence[Context | None]) -> None:
        self.tracer = tracer
        self.spans = spans
        self._parents = parents

    def over(self) -> None:
        """All its calls have their answers."""
        self.spans, self._parents = {}, ()

    @property
    def is_of_one_call(self) -> bool:
        return len(self._parents) == 1

    def asked(self, number: int, outline: Outline) -> None:
        if (span := self.spans.get(number)) is not None:
            span.set_attribute("ratelimit.domain", outline.domain)
            span.set_attribute("ratelimit.descriptors", len(outline.slots))

    def decided(self, number: int, decision: Decision) -> None:
        """A refusal is no error: saying no is what the service is for."""
        span = self.spans.get(number)
        if span is None:
            return
        span.set_attribute("ratelimit.limited", decision.code is Code.OVER_LIMIT)
        refusing = next((status for status in decision.statuses if status.code is Code.OVER_LIMIT), None)
        if decision.outline.refusal is not None:
            span.set_attribute("ratelimit.reason", decision.outline.refusal.reason)
        elif refusing is not None:
            span.set_attribute("ratelimit.rule", told_as(refusing.slot.rule))
        source = "fallback" if decision.without_store is not None else "cache" if decision.remembered else "store"
        span.set_attribute("ratelimit.source", source)

    def ended(self, number: int, status: str = "OK", message: str = "", in_s: float = 0.0) -> None:
        """`status` is the name of a gRPC status code; `in_s` is how long the answer is held from now."""
        span = self.spans.get(number)
        if span is None:
            return
        span.set_attribute("rpc.status_code", status)
        if status != "OK":
            from opentelemetry.trace import Status, StatusCode

            span.set_attribute("error.type", status)
            span.set_status(Status(StatusCode.ERROR, message))
        span.end(time_ns() + int(in_s * 1e9))

    def ids(self, number: int) -> Ids | None:
        """Of a call's span, or of the parent it came with if it is not sampled."""
        from opentelemetry.trace import get_current_span

        span = self.spans.get(number)
        if span is None and (parent := self._parents[number]) is not None:
            span = get_current_span(parent)
        if span is None or not span.get_span_context().is_valid:
            return None
        context = span.get_span_context()
        return Ids(f"{context.trace_id:032x}", f"{context.span_id:016x}")


class StoreSpan(Protocol):
    def end(self, error: str | None) -> None:
        """`error` is the type of what went wrong."""
        ...


def store_span(store: str, calls: int) -> StoreSpan | None:
    """The span of a batch that a store is asked now; None if none of the calls it is asked for is sampled."""
    traced = _current.get()
    return _BatchSpan(traced, store, calls) if traced is not None and traced.spans else None


def current_ids() -> Ids | None:
    """Of the call that is being worked on. Of several in one batch nobody can say which it is."""
    traced = _current.get()
    return traced.ids(0) if traced is not None and traced.is_of_one_call else None


class _BatchSpan:
    def __init__(self, traced: TracedBatch, store: str, calls: int) -> None:
        from opentelemetry.trace import Link, SpanKind, set_span_in_context

        first, *others = traced.spans.values()
        is_redis = store == "redis"
        attributes: dict[str, str | int] = {"ratelimit.store": store, "ratelimit.calls": calls}
        if is_redis:
            attributes |= {
                "db.system.name": "redis",
                "db.operation.name": "EVALSHA",
                "db.stored_procedure.name": "decide",
            }
        self._span = traced.tracer.start_span(
            "EVALSHA decide" if is_redis else "decide",
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


def _server_span(tracer: Tracer, method: str, parent: Context | None, received_ns: int) -> Span:
    from opentelemetry.context import Context
    from opentelemetry.trace import SpanKind

    # An empty context, and not the current one: what came before on this loop is no parent.
    return tracer.start_span(
        method.removeprefix("/"),
        context=parent if parent is not None else Context(),
        kind=SpanKind.SERVER,
        attributes={"rpc.system.name": "grpc", "rpc.method": method.removeprefix("/")},
        start_time=received_ns,
    )
