"""Blocking client."""

from __future__ import annotations

from typing import Any, Self

import grpc

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


class RateLimiterClient:
    """Blocking client with one connection; it is thread-safe. Close it, or use `with`."""

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
        """Create a client.

        `target` is host:port or unix:/path. `domain` selects the rules; empty means the service's default. `token` is
        an admin token, needed for `reset`.
        """
        self._domain = domain
        self._timeout_s = timeout_s
        self._error_policy = ErrorPolicy(on_error)
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
    ) -> CheckResult:
        """Decide whether a call is allowed, and count it.

        A cost of 0 counts nothing. If the service does not respond, `on_error` determines the result. Retries with the
        same `idempotency_key` are counted once, if the service is configured to read it.
        """
        request = build_check_request(identifier, dimension, endpoint, cost, domain or self._domain)
        try:
            return parse_check(self._call(CHECK, request, timeout_s, idempotency_metadata(idempotency_key)))
        except grpc.RpcError as fault:
            return self._error_policy.of(to_error(fault))

    def remaining(
        self,
        identifier: str,
        dimension: Dimension = "user",
        *,
        endpoint: str = "",
        domain: str = "",
        timeout_s: float | None = None,
    ) -> Remaining:
        """Return every limit that a check would apply, without counting. Raises RateLimiterError."""
        request = build_request(QUOTA, identifier, dimension, endpoint, domain or self._domain)
        try:
            return parse_remaining(self._call(QUOTA, request, timeout_s))
        except grpc.RpcError as fault:
            raise to_error(fault) from fault

    def reset(
        self,
        identifier: str,
        dimension: Dimension = "user",
        *,
        endpoint: str = "",
        domain: str = "",
        timeout_s: float | None = None,
    ) -> int:
        """Reset the counters and return how many had been used. Raises RateLimiterError."""
        request = build_request(RESET, identifier, dimension, endpoint, domain or self._domain)
        try:
            return int(self._call(RESET, request, timeout_s, authorization_metadata(self._token)).counters)
        except grpc.RpcError as fault:
            raise to_error(fault) from fault

    def _call(self, method: Method, request: Any, timeout_s: float | None, metadata: Metadata = ()) -> Any:
        call_timeout_s = self._timeout_s if timeout_s is None else timeout_s
        return self._methods[method](request, timeout=call_timeout_s, metadata=metadata)

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
