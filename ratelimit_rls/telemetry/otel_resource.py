"""OpenTelemetry resource that identifies this process in traces and metrics sent by OTLP."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import TYPE_CHECKING
from uuid import uuid4

from ratelimit_rls import __version__
from ratelimit_rls.settings import Settings

if TYPE_CHECKING:  # slow to import, and not needed where nothing is sent
    from opentelemetry.sdk.resources import Resource


def resource(settings: Settings) -> Resource:
    """Return the resource: the same for traces and metrics of a process, and different for each worker.

    TRACING_SERVICE_… take precedence over OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME, and these over our defaults.
    """
    from opentelemetry.sdk.resources import (
        SERVICE_INSTANCE_ID,
        SERVICE_NAME,
        SERVICE_NAMESPACE,
        SERVICE_VERSION,
        OTELResourceDetector,
        Resource,
    )

    found = OTELResourceDetector().detect().attributes
    attributes = {SERVICE_NAME: settings.tracing_service_name, SERVICE_VERSION: __version__}
    if not settings.given("tracing_service_name") and found.get(SERVICE_NAME):
        attributes.pop(SERVICE_NAME)
    if settings.tracing_service_namespace:
        attributes[SERVICE_NAMESPACE] = settings.tracing_service_namespace
    instance = settings.tracing_service_instance_id or str(found.get(SERVICE_INSTANCE_ID, ""))
    if not instance:
        instance = _random_id(os.getpid())
    elif (
        settings.rls_workers > 1
    ):  # with a shared id, the counters of all workers would be one series going up and down
        instance = f"{instance}-{os.getpid()}"
    return Resource.create({**attributes, SERVICE_INSTANCE_ID: instance})


@lru_cache(maxsize=1)
def _random_id(_process_id: int) -> str:
    return str(uuid4())
