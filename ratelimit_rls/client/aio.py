"""Client for asyncio."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import grpc
from grpc import aio

from ratelimit_rls.client.channel import DEFAULT_TIMEOUT_S, Tls, credentials, options
from ratelimit_rls.client.methods import (
    CHECK,
    QUOTA,
    RESET,
    Dimension,
    Metadata,
    Method,
    authorization_metadata,
    build_check_request,
    build_request,
    idempotency_metadata,
)
from ratelimit_rls.client.results import (
    CheckResult,
    ErrorPolicy,
    OnError,
    Remaining,
    parse_check,
    parse_remaining,
    to_error,
)


class AsyncRateLimiterClient:
    """Client for the tasks of one event loop, with the interface of RateLimiterClient.

    It connects on the first call, so that it can be constructed before the loop runs. Close it, or use `async with`.
    """

    def __init__(
        self,
        target: str,
        *,
        domain: str = "",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        on_error: OnError = "raise",
        tls: Tls | None = None,
        token: str = "",
    ) -> None:
        """Take the arguments of RateLimiterClient."""
        self._target = target
        self._domain = domain
        self._timeout_s = timeout_s
        self._error_policy = ErrorPolicy(on_error)
        self._token = token
        self._options = options(tls)
        self._credentials = credentials(tls) if tls is not None else None
        self._channel: aio.Channel | None = None
        self._methods: dict[Method, Callable[..., Any]] = {}

    async def check(
        self,
        identifier: str,
        dimension: Dimension = "user",
        *,
        endpoint: str = "",
        cost: int = 1,
        domain: str = "",
        idempotency_key: str = "",
        timeout_s: float | None = None,
    ) -> CheckResult:
        """Check and count a call; see RateLimiterClient.check."""
        request = build_check_request(identifier, dimension, endpoint, cost, domain or self._domain)
        try:
            return parse_check(await self._call(CHECK, request, timeout_s, idempotency_metadata(idempotency_key)))
        except grpc.RpcError as fault:
            return self._error_policy.of(to_error(fault))

    async def remaining(
        self,
        identifier: str,
        dimension: Dimension = "user",
        *,
        endpoint: str = "",
        domain: str = "",
        timeout_s: float | None = None,
    ) -> Remaining:
        """Return the remaining quota; see RateLimiterClient.remaining."""
        request = build_request(QUOTA, identifier, dimension, endpoint, domain or self._domain)
        try:
            return parse_remaining(await self._call(QUOTA, request, timeout_s))
        except grpc.RpcError as fault:
            raise to_error(fault) from fault

    async def reset(
        self,
        identifier: str,
        dimension: Dimension = "user",
        *,
        endpoint: str = "",
        domain: str = "",
        timeout_s: float | None = None,
    ) -> int:
        """Reset counters; see RateLimiterClient.reset."""
        request = build_request(RESET, identifier, dimension, endpoint, domain or self._domain)
        try:
            return int((await self._call(RESET, request, timeout_s, authorization_metadata(self._token))).counters)
        except grpc.RpcError as fault:
            raise to_error(fault) from fault

    async def _call(self, method: Method, request: Any, timeout_s: float | None, metadata: Metadata = ()) -> Any:
        if self._channel is None:
            self._connect()
        call_timeout_s = self._timeout_s if timeout_s is None else timeout_s
        return await self._methods[method](request, timeout=call_timeout_s, metadata=metadata)

    def _connect(self) -> None:
        channel = (
            aio.insecure_channel(self._target, self._options)
            if self._credentials is None
            else aio.secure_channel(self._target, self._credentials, self._options)
        )
        self._channel = channel
        self._methods = {
            method: channel.unary_unary(
                method.path,
                request_serializer=method.request.SerializeToString,
                response_deserializer=method.response.FromString,
            )
            for method in (CHECK, QUOTA, RESET)
        }

    async def close(self) -> None:
        if self._channel is not None:
            channel, self._channel = self._channel, None
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
