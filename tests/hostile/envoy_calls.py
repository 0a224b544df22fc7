"""Calls as an Envoy makes them for its clients, over a real connection: Check and ShouldRateLimit."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Self

import grpc

from ratelimit_rls.protos.messages import (
    CHECK,
    SHOULD_RATE_LIMIT,
    CheckRequest,
    CheckResponse,
    RateLimitRequest,
    RateLimitResponse,
)
from tests.support.service_process import ServiceProcess

TIMEOUT_S = 10
Entry = tuple[str, str]

_REASON = re.compile(r'reason="(\w+)"')


class Checked(NamedTuple):
    """The response to a client, and the headers for its upstream."""

    status: int
    """HTTP status of the response to the client; 200: the request passes."""

    headers: Mapping[str, str]
    """Headers of the response to the client."""

    upstream: Mapping[str, str]
    """Headers that are set on the request and replace those of the client."""

    removed: frozenset[str] = frozenset()
    """Headers that are removed from the request."""

    @property
    def remaining(self) -> int:
        return int(self.headers["x-ratelimit-remaining"])


class EnvoyCalls:
    """One connection; every call has to be answered, or the test fails."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address)
        self._check: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(CHECK)
        self._should_rate_limit: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(
            SHOULD_RATE_LIMIT
        )

    def check(
        self,
        headers: Mapping[str, str] | None = None,
        *,
        peer: str = "192.0.2.1",
        path: str = "/",
        domain: str = "",
        raw_headers: Iterable[tuple[str, bytes]] = (),
    ) -> Checked:
        """Send a CheckRequest. `raw_headers` are sent as with `encode_raw_headers`, and may repeat a name."""
        request = CheckRequest()
        request.attributes.source.address.socket_address.address = peer
        http = request.attributes.request.http
        http.method, http.path = "GET", path
        http.headers.update(headers or {})
        for name, value in raw_headers:
            http.header_map.headers.add(key=name, raw_value=value)
        if domain:
            request.attributes.context_extensions["ratelimit_domain"] = domain
        answer = CheckResponse.FromString(self._check(request.SerializeToString(), timeout=TIMEOUT_S))
        if answer.WhichOneof("http_response") == "denied_response":
            denied = answer.denied_response
            return Checked(denied.status.code or 429, _lines(denied.headers), {})
        passed = answer.ok_response
        removed = frozenset(passed.headers_to_remove)
        return Checked(200, _lines(passed.response_headers_to_add), _lines(passed.headers), removed)

    def should_rate_limit(self, domain: str, entries: Iterable[Entry], *, requests_per_year: int = 0) -> Any:
        """Send a RateLimitRequest; `requests_per_year` is a limit override."""
        request = RateLimitRequest(domain=domain)
        descriptor = request.descriptors.add()
        for key, value in entries:
            descriptor.entries.add(key=key, value=value)
        if requests_per_year:
            descriptor.limit.requests_per_unit, descriptor.limit.unit = requests_per_year, 6
        sent = self._should_rate_limit(request.SerializeToString(), timeout=TIMEOUT_S)
        return RateLimitResponse.FromString(sent)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()


def _lines(headers: Any) -> dict[str, str]:
    return {line.header.key: line.header.value for line in headers}


def counts_by_reason(service: ServiceProcess, metric: str) -> dict[str, int]:
    """Return the values of a counter in /metrics by its label `ratelimit_reason`."""
    counts = {}
    for line in service.debug("/metrics").body.splitlines():
        if line.startswith(metric + "{") and (reason := _REASON.search(line)):
            counts[reason[1]] = int(float(line.rpartition(" ")[2]))
    return counts


def series(service: ServiceProcess) -> set[str]:
    """Names and labels of every series in /metrics."""
    lines = service.debug("/metrics").body.splitlines()
    return {line.rpartition(" ")[0] for line in lines if line and not line.startswith("#")}
