"""The client for asyncio."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import grpc
from grpc import aio

from ratelimit_rls.client.answers import Answer, Instead, OnError, Remaining, answer_of, error_of, remaining_of
from ratelimit_rls.client.calls import (
    CHECK,
    QUOTA,
    RESET,
    Dimension,
    Metadata,
    Method,
    authorized,
    check_request,
    idempotent,
    request_of,
)
from ratelimit_rls.client.channel import DEFAULT_TIMEOUT_S, Tls, credentials, options


class AsyncRateLimiterClient:
    """As RateLimiterClient, for the tasks of one loop. It connects with the first call, so that it can be made before
    there is a loop. To be closed, or used in an `async with`."""

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
        """As RateLimiterClient's."""
        self._target = target
        self._domain = domain
        self._timeout_s = timeout_s
        self._instead = Instead(on_error)
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
    ) -> Answer:
        """As RateLimiterClient.check."""
        request = check_request(identifier, dimension, endpoint, cost, domain or self._domain)
        try:
            return answer_of(await self._call(CHECK, request, timeout_s, idempotent(idempotency_key)))
        except grpc.RpcError as fault:
            return self._instead.of(error_of(fault))

    async def remaining(
        self,
        identifier: str,
        dimension: Dimension = "user",
        *,
        endpoint: str = "",
        domain: str = "",
        timeout_s: float | None = None,
    ) -> Remaining:
        """As RateLimiterClient.remaining."""
        request = request_of(QUOTA, identifier, dimension, endpoint, domain or self._domain)
        try:
            return remaining_of(await self._call(QUOTA, request, timeout_s))
        except grpc.RpcError as fault:
            raise error_of(fault) from fault

    async def reset(
        self,
        identifier: str,
        dimension: Dimension = "user",
        *,
        endpoint: str = "",
        domain: str = "",
        timeout_s: float | None = None,
    ) -> int:
        """As RateLimiterClient.reset."""
        request = request_of(RESET, identifier, dimension, endpoint, domain or self._domain)
        try:
            return int((await self._call(RESET, request, timeout_s, authorized(self._token))).counters)
        except grpc.RpcError as fault:
            raise error_of(fault) from fault

    async def _call(self, method: Method, request: Any, timeout_s: float | None, metadata: Metadata = ()) -> Any:
        if self._channel is None:
            self._connect()
        within_s = self._timeout_s if timeout_s is None else timeout_s
        return await self._methods[method](request, timeout=within_s, metadata=metadata)

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
