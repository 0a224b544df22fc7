"""Message classes of Envoy's APIs and of our own, from reduced .proto files, in a private descriptor pool.

Another package in the process may register Envoy's full API under the same names; the private pool avoids conflicts.
`make proto` compiles descriptors.binpb, and a test fails if it does not match the .proto files.
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
"""Services that are served, as listed by reflection."""

DISCOVERY = "envoy.service.discovery.v3.AggregatedDiscoveryService"
STREAM_RESOURCES = f"/{DISCOVERY}/StreamAggregatedResources"
"""Method of xDS management servers, which this service calls as a client."""


def new_pool() -> descriptor_pool.DescriptorPool:
    """Return a pool with the services and all messages that they use."""
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
