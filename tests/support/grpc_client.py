"""Clients of the servers under test: an HTTP GET, a POST, and one ShouldRateLimit call.

The gRPC messages are those of envoy-data-plane, an independent implementation of the protocol.
"""

from __future__ import annotations

import http.client
import warnings
from dataclasses import dataclass
from urllib.parse import urlsplit

import grpc

with warnings.catch_warnings():
    # The package declares its validators in a deprecated way.
    warnings.simplefilter("ignore")
    from envoy_data_plane.envoy.extensions.common.ratelimit.v3 import RateLimitDescriptor, RateLimitDescriptorEntry
    from envoy_data_plane.envoy.service.ratelimit.v3 import RateLimitRequest, RateLimitResponse

__all__ = ["Http", "RateLimitResponse", "Reply", "ask", "get", "rate_limit_request"]

METHOD = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit"


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    headers: dict[str, str]  # names in lower case
    body: str


class Http:
    """One keep-alive connection."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=10)

    def get(self, path: str, **headers: str) -> Reply:
        """Send a GET; `x_user="a"` becomes the header `x-user: a`."""
        return self._send("GET", path, None, headers)

    def post(self, path: str, body: str, **headers: str) -> Reply:
        """Send a POST."""
        return self._send("POST", path, body, headers)

    def _send(self, method: str, path: str, body: str | None, headers: dict[str, str]) -> Reply:
        self._connection.request(method, path, body, {name.replace("_", "-"): v for name, v in headers.items()})
        answer = self._connection.getresponse()
        text = answer.read().decode(errors="replace")
        return Reply(answer.status, {name.lower(): value for name, value in answer.getheaders()}, text)

    def __enter__(self) -> Http:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()


def get(url: str, path: str, **headers: str) -> Reply:
    """Send a GET on a new connection."""
    with Http(url) as client:
        return client.get(path, **headers)


def rate_limit_request(domain: str, *descriptors: dict[str, str], hits: int = 0) -> RateLimitRequest:
    """Return a request with one descriptor per dict, whose items are its entries."""
    return RateLimitRequest(
        domain=domain,
        descriptors=[
            RateLimitDescriptor(entries=[RateLimitDescriptorEntry(key=k, value=v) for k, v in descriptor.items()])
            for descriptor in descriptors
        ],
        hits_addend=hits,
    )


def ask(
    address: str,
    request: RateLimitRequest,
    credentials: grpc.ChannelCredentials | None = None,
    options: tuple[tuple[str, str], ...] = (),
) -> RateLimitResponse:
    """Make a ShouldRateLimit call on a new channel; raises grpc.RpcError with the server's status."""
    channel = (
        grpc.secure_channel(address, credentials, options) if credentials else grpc.insecure_channel(address, options)
    )
    with channel:
        call = channel.unary_unary(METHOD, request_serializer=bytes, response_deserializer=RateLimitResponse.parse)
        answer: RateLimitResponse = call(request, timeout=5)
        return answer
