"""Client library for applications without Envoy, and an ASGI middleware based on it.

    with RateLimiterClient("limiter:8081", domain="edge") as limiter:
        if not limiter.check("alice", endpoint="/search").allowed: ...

It imports grpc and the message definitions, and nothing else of the service.
"""

from __future__ import annotations

from ratelimit_rls.client.aio import AsyncRateLimiterClient
from ratelimit_rls.client.channel import Tls
from ratelimit_rls.client.methods import Dimension
from ratelimit_rls.client.results import CheckResult, OnError, Quota, RateLimiterError, Remaining
from ratelimit_rls.client.sync import RateLimiterClient

__all__ = [
    "AsyncRateLimiterClient",
    "CheckResult",
    "Dimension",
    "OnError",
    "Quota",
    "RateLimiterClient",
    "RateLimiterError",
    "Remaining",
    "Tls",
]
