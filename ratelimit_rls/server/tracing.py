"""Construction of tracing from the settings: sampled as the parent span says, exported by OTLP from a thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratelimit_rls.settings import Settings
from ratelimit_rls.telemetry.export_errors import throttle_export_warnings
from ratelimit_rls.telemetry.otel_resource import resource
from ratelimit_rls.telemetry.traces import Traces

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter


def new_traces(settings: Settings) -> Traces:
    """Construct tracing.

    The exporters read OTEL_EXPORTER_OTLP_…. OpenTelemetry is slow to import, so it is imported here.
    """
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased

    throttle_export_warnings()
    # The server shuts the provider down itself, before the interpreter exits.
    provider = TracerProvider(resource=resource(settings), sampler=ParentBased(ALWAYS_ON), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(_exporter(settings.tracing_exporter_protocol)))
    return Traces(provider, settings.tracing_sampling_rate)


def _exporter(protocol: str) -> SpanExporter:
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as OverGrpc

        return OverGrpc()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as OverHttp

    return OverHttp()
