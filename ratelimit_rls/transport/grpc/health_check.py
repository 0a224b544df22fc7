"""grpc.health.v1.Health/Check, answered in the event loop.

Orchestrators restart a service that does not report its health, and Envoy stops using it. So no other client may delay
a check: budgets, the backlog and the limits on proxied calls do not apply to it. Answering one costs about as much as
reading it.
"""

from __future__ import annotations

from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from ratelimit_rls.h2.status import RpcError, StatusCode, message_too_large
from ratelimit_rls.transport.health import SERVICE, Health

HEALTH = "grpc.health.v1.Health"
HEALTH_CHECK = f"/{HEALTH}/Check"

MAX_CHECK_BYTES = 1024
"""Maximum size of a request message. The names of the known services are much shorter."""

_MALFORMED = RpcError(StatusCode.INVALID_ARGUMENT, "the message is not a grpc.health.v1.HealthCheckRequest")
_NOT_FOUND = RpcError(StatusCode.NOT_FOUND, "unknown service")


def status(is_healthy: bool) -> health_pb2.HealthCheckResponse.ServingStatus:
    return health_pb2.HealthCheckResponse.SERVING if is_healthy else health_pb2.HealthCheckResponse.NOT_SERVING


def _encoded(is_healthy: bool) -> bytes:
    return bytes(health_pb2.HealthCheckResponse(status=status(is_healthy)).SerializeToString())


_SERVING, _NOT_SERVING = _encoded(True), _encoded(False)


class HealthCheck:
    """Encodes responses to health checks from the current health."""

    def __init__(self, health: Health) -> None:
        self._health = health

    def respond(self, message: bytes) -> bytes | RpcError:
        if len(message) > MAX_CHECK_BYTES:
            return message_too_large(MAX_CHECK_BYTES)
        try:
            service = health_pb2.HealthCheckRequest.FromString(message).service
        except DecodeError:
            return _MALFORMED
        if service == "":
            return _SERVING if self._health.alive else _NOT_SERVING
        if service == SERVICE:
            return _SERVING if self._health.serving else _NOT_SERVING
        return _NOT_FOUND
