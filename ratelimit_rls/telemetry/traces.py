"""Traces: a span for each call that is sampled, and one for each batch that the store is asked.

    Envoy's span ─► envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit ─► EVALSHA decide

Calls travel in batches, so a batch has one span of the store: a child of the first sampled call, with links to the
others. Who is sampled is Envoy's to say; calls without a parent are sampled by TRACING_SAMPLING_RATE. With tracing off
nothing here is reached but one look at a variable per batch of the store.

Most calls are not sampled, and the SDK would make a span of each to find that out: 6 µs of a call without a parent, 14
with one. So it is only asked for spans that there will be, and read are only the parents of those.
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

from ratelimit_rls.core.model import Code, Decision, Outline
from ratelimit_rls.telemetry.rule_names import told_as

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.propagators.textmap import TextMapPropagator
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

Metadata = Sequence[tuple[str, str | bytes]]
"""A call's, keys in lower case."""

Carrier = Mapping[str, str]
"""What of it may name a parent."""

_HEADERS = frozenset({"traceparent", "tracestate", "b3", "x-b3-traceid", "x-b3-spanid", "x-b3-sampled", "x-b3-flags"})
"""What says whose child a call is: W3C's and Zipkin's, in one header or in several."""

_NOT_SAMPLED = re.compile("00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f][02468ace]")
"""A `traceparent` that says no. What B3 says beside it does not count."""

CLOSE_S = 3.0

_current: ContextVar[TracedBatch | None] = ContextVar("traced_batch", default=None)


class Ids(NamedTuple):
    """In hexadecimal, as logs have them."""

    trace_id: str
    span_id: str


class Traces:
    """Makes the spans of a process."""

    def __init__(
        self, provider: TracerProvider, sampling_rate: float = 1.0, draw: Callable[[], float] = random
    ) -> None:
        """`provider` must sample whatever has no parent: who of those is sampled is drawn here, by a number under 1."""
        from opentelemetry.propagators.b3 import B3MultiFormat
        from opentelemetry.propagators.composite import CompositePropagator
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._sampling_rate = sampling_rate
        self._draw = draw
        self._tracer = provider.get_tracer("ratelimit_rls")
        # Where both are there, what is read last wins. B3's reader knows its one-header form, too.
        self._propagator: TextMapPropagator = CompositePropagator([B3MultiFormat(), TraceContextTextMapPropagator()])

    def batch(self, method: str, metadata: Sequence[Metadata], received_ns: int) -> TracedBatch:
        """Begin the spans of a batch of calls, by the metadata of each; in the task that is to answer them."""
        spans: dict[int, Span] = {}
        carriers: list[Carrier] = []
        for number, sent in enumerate(metadata):
            carrier = {name: value for name, value in sent if name in _HEADERS and isinstance(value, str)}
            carriers.append(carrier)
            if not carrier and self._draw() >= self._sampling_rate:
                continue
            if not carrier or not _says_no(carrier):
                span = self._span(method, carrier, received_ns)
                if span is not None:
                    spans[number] = span
        traced = TracedBatch(self._tracer, spans, carriers, self._propagator)
        _current.set(traced)
        return traced

    def _span(self, method: str, carrier: Carrier, received_ns: int) -> Span | None:
        """None: its parent is not sampled, or it has none that can be read and was not drawn."""
        from opentelemetry.trace import get_current_span

        parent = self._propagator.extract(carrier) if carrier else None
        if parent is not None and not get_current_span(parent).get_span_context().is_valid:
            parent = None
            if self._draw() >= self._sampling_rate:
                return None
        span = _server_span(self._tracer, method, parent, received_ns)
        return span if span.is_recording() else None

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

    def __init__(
        self, tracer: Tracer, spans: Mapping[int, Span], carriers: Sequence[Carrier], propagator: TextMapPropagator
    ) -> None:
        self.tracer = tracer
        self.spans = spans
        self._carriers = carriers
        self._propagator = propagator

    def over(self) -> None:
        """All its calls have their answers."""
        self.spans, self._carriers = {}, ()

    @property
    def is_of_one_call(self) -> bool:
        return len(self._carriers) == 1

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
        if span is None and (carrier := self._carriers[number]):
            span = get_current_span(self._propagator.extract(carrier))
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


def _says_no(carrier: Carrier) -> bool:
    """Without a look at the parent, which is another 10 µs; False: perhaps."""
    if _NOT_SAMPLED.fullmatch(carrier.get("traceparent", "")):
        return True
    # No parent, and yet a decision.
    return carrier.get("b3") == "0" or (carrier.get("x-b3-sampled") == "0" and "x-b3-traceid" not in carrier)


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
