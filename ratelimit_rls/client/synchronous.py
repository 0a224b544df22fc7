"""The client for code that waits."""

from __future__ import annotations

from typing import Any, Self

import grpc

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


class RateLimiterClient:
    """One connection, for as many threads as like. To be closed, or used in a `with`."""

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
        """`target` is host:port or unix:/path. `domain` is whose rules decide; empty: the service's default. `token`
        is an administrator's, for `reset`."""
        self._domain = domain
        self._timeout_s = timeout_s
        self._instead = Instead(on_error)
        self._token = token
        if tls is None:
            self._channel = grpc.insecure_channel(target, options(None))
        else:
            self._channel = grpc.secure_channel(target, credentials(tls), options(tls))
        self._methods = {
            method: self._channel.unary_unary(
                method.path,
                request_serializer=method.request.SerializeToString,
                response_deserializer=method.response.FromString,
            )
            for method in (CHECK, QUOTA, RESET)
        }

    def check(
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
        """Whether a call may pass, and count it. With a cost of 0 it only looks. Where there is no answer, `on_error`
        says what becomes of it. A retry under the same `idempotency_key` is counted once, if the service is set so."""
        request = check_request(identifier, dimension, endpoint, cost, domain or self._domain)
        try:
            return answer_of(self._call(CHECK, request, timeout_s, idempotent(idempotency_key)))
        except grpc.RpcError as fault:
            return self._instead.of(error_of(fault))

    def remaining(
        self,
        identifier: str,
        dimension: Dimension = "user",
        *,
        endpoint: str = "",
        domain: str = "",
        timeout_s: float | None = None,
    ) -> Remaining:
        """Every limit that a check would meet. Nothing is counted. Raises RateLimiterError."""
        request = request_of(QUOTA, identifier, dimension, endpoint, domain or self._domain)
        try:
            return remaining_of(self._call(QUOTA, request, timeout_s))
        except grpc.RpcError as fault:
            raise error_of(fault) from fault

    def reset(
        self,
        identifier: str,
        dimension: Dimension = "user",
        *,
        endpoint: str = "",
        domain: str = "",
        timeout_s: float | None = None,
    ) -> int:
        """Forget what was counted; returns how many counters that were. Raises RateLimiterError."""
        request = request_of(RESET, identifier, dimension, endpoint, domain or self._domain)
        try:
            return int(self._call(RESET, request, timeout_s, authorized(self._token)).counters)
        except grpc.RpcError as fault:
            raise error_of(fault) from fault

    def _call(self, method: Method, request: Any, timeout_s: float | None, metadata: Metadata = ()) -> Any:
        within_s = self._timeout_s if timeout_s is None else timeout_s
        return self._methods[method](request, timeout=within_s, metadata=metadata)

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
