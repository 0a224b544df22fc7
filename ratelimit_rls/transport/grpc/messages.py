"""Envoy's messages and our own, from small .proto files (proto/), in a descriptor pool of our own.

Another package in the process may bring Envoy's full API under the same names; in a private pool the two never meet.
`make docs` compiles descriptors.binpb, and a test fails when it is older than what it was made from.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

SERVICE = "envoy.service.ratelimit.v3.RateLimitService"
SHOULD_RATE_LIMIT = f"/{SERVICE}/ShouldRateLimit"

AUTHORIZATION = "envoy.service.auth.v3.Authorization"
CHECK = f"/{AUTHORIZATION}/Check"

KUADRANT = "kuadrant.service.ratelimit.v1.RateLimitService"
KUADRANT_CHECK = f"/{KUADRANT}/CheckRateLimit"
KUADRANT_REPORT = f"/{KUADRANT}/Report"

LIMITER = "ratelimit_rls.v1.RateLimiter"
CHECK_RATE_LIMIT = f"/{LIMITER}/CheckRateLimit"
GET_REMAINING_QUOTA = f"/{LIMITER}/GetRemainingQuota"
RESET_LIMIT = f"/{LIMITER}/ResetLimit"

SERVICES = (SERVICE, AUTHORIZATION, KUADRANT, LIMITER)
"""Those that are served, as reflection lists them."""

DISCOVERY = "envoy.service.discovery.v3.AggregatedDiscoveryService"
STREAM_RESOURCES = f"/{DISCOVERY}/StreamAggregatedResources"
"""Of management servers, whose client this service is."""


def new_pool() -> descriptor_pool.DescriptorPool:
    """A pool that holds the services and everything they mention."""
    pool = descriptor_pool.DescriptorPool()
    every = descriptor_pb2.FileDescriptorSet.FromString(files(__package__).joinpath("descriptors.binpb").read_bytes())
    for file in every.file:
        pool.AddSerializedFile(file.SerializeToString())
    return pool


POOL = new_pool()


def _message(name: str) -> Any:
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(name))


RateLimitRequest = _message("envoy.service.ratelimit.v3.RateLimitRequest")
RateLimitResponse = _message("envoy.service.ratelimit.v3.RateLimitResponse")
CheckRequest = _message("envoy.service.auth.v3.CheckRequest")
CheckResponse = _message("envoy.service.auth.v3.CheckResponse")
LimiterCheckRequest = _message("ratelimit_rls.v1.CheckRequest")
LimiterCheckResponse = _message("ratelimit_rls.v1.CheckResponse")
QuotaRequest = _message("ratelimit_rls.v1.QuotaRequest")
QuotaResponse = _message("ratelimit_rls.v1.QuotaResponse")
ResetRequest = _message("ratelimit_rls.v1.ResetRequest")
ResetResponse = _message("ratelimit_rls.v1.ResetResponse")
DiscoveryRequest = _message("envoy.service.discovery.v3.DiscoveryRequest")
DiscoveryResponse = _message("envoy.service.discovery.v3.DiscoveryResponse")
RateLimitConfig = _message("ratelimit.config.ratelimit.v3.RateLimitConfig")
