"""gRPC services that grpc.aio serves: health, reflection, and methods that have no pipeline.

They are called rarely, so they need no batching. Health/Check is answered in the event loop instead (health_check.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol

from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_reflection.v1alpha.reflection import aio as reflection_aio

from ratelimit_rls.protos import messages
from ratelimit_rls.telemetry.line_limits import limit_lines
from ratelimit_rls.transport.grpc.health_check import HEALTH, status
from ratelimit_rls.transport.health import SERVICE, Health

_REFLECTION = "grpc.reflection.v1alpha.ServerReflection"

GRPC_LOGGER = "grpc._cython.cygrpc"
"""Logger that writes a traceback for every message that is not the expected protobuf."""

MAX_REFLECTION_MESSAGES = 100
"""Maximum messages of a reflection call. A client that asks for every file and every service once sends 28."""

MAX_MESSAGES: Mapping[str, int] = {
    f"/{HEALTH}/Watch": 1,
    f"/{_REFLECTION}/ServerReflectionInfo": MAX_REFLECTION_MESSAGES,
    messages.RESET_LIMIT: 1,
}
"""Maximum messages of a proxied call, by method path. Calls of other methods are rejected without being forwarded."""


class StandardService(Protocol):
    """A service or method that can be attached to a grpc.aio server."""

    def attach(self, server: aio.Server) -> None: ...


class StandardServices:
    """Attaches the services to a server, and keeps the health service up to date with `Health` until `close`."""

    def __init__(self, health: Health, services: Sequence[StandardService] = ()) -> None:
        self._health = health
        self._services = services
        self._servicer = health_aio.HealthServicer()
        self._publishing: set[asyncio.Task[None]] = set()

    async def attach(self, server: aio.Server) -> None:
        """Register the services. Call this before the server starts, so that it never reports wrong health."""
        limit_lines(GRPC_LOGGER)
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(_reflection(), server)
        for service in self._services:
            service.attach(server)
        self._health.subscribe(self._changed)
        await self._publish()

    async def close(self) -> None:
        self._health.unsubscribe(self._changed)
        await asyncio.gather(*self._publishing)

    def _changed(self) -> None:
        task = asyncio.get_running_loop().create_task(self._publish())
        self._publishing.add(task)
        task.add_done_callback(self._publishing.discard)

    async def _publish(self) -> None:
        await self._servicer.set("", status(self._health.alive))
        await self._servicer.set(SERVICE, status(self._health.serving))


def _reflection() -> reflection_aio.ReflectionServicer:
    pool = messages.new_pool()
    for module in (health_pb2, reflection_pb2):
        pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
    return reflection_aio.ReflectionServicer((*messages.SERVICES, HEALTH, _REFLECTION), pool)
