"""Traces as the settings want them: sampled as Envoy says, sent by OTLP from a thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratelimit_rls.settings import Settings
from ratelimit_rls.telemetry.export_errors import warn_rarely
from ratelimit_rls.telemetry.resource import resource
from ratelimit_rls.telemetry.traces import Traces

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter


def new_traces(settings: Settings) -> Traces:
    """Where they go to is said by OTEL_EXPORTER_OTLP_…, which the exporters read. Imported here: it takes a while."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased

    warn_rarely()
    # The process ends as we say, and not as soon as the interpreter does.
    provider = TracerProvider(resource=resource(settings), sampler=ParentBased(ALWAYS_ON), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(_exporter(settings.tracing_exporter_protocol)))
    return Traces(provider, settings.tracing_sampling_rate)


def _exporter(protocol: str) -> SpanExporter:
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as OverGrpc

        return OverGrpc()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as OverHttp

    return OverHttp()
