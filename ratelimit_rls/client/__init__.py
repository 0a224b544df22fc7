"""A client for applications without Envoy, and a middleware on it.

    with RateLimiterClient("limiter:8081", domain="edge") as limiter:
        if not limiter.check("alice", endpoint="/search").allowed: ...

It imports grpc and the definitions of messages, and nothing else of the service.
"""

from __future__ import annotations

from ratelimit_rls.client.answers import Answer, OnError, Quota, RateLimiterError, Remaining
from ratelimit_rls.client.asynchronous import AsyncRateLimiterClient
from ratelimit_rls.client.calls import Dimension
from ratelimit_rls.client.channel import Tls
from ratelimit_rls.client.synchronous import RateLimiterClient

__all__ = [
    "Answer",
    "AsyncRateLimiterClient",
    "Dimension",
    "OnError",
    "Quota",
    "RateLimiterClient",
    "RateLimiterError",
    "Remaining",
    "Tls",
]
