"""The ordinary gRPC services, on a grpc.aio server: health, reflection, and methods that have no door.

They are asked rarely, so they are written the ordinary way and served by grpc.aio on both transports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_reflection.v1alpha.reflection import aio as reflection_aio

from ratelimit_rls.transport.grpc import messages
from ratelimit_rls.transport.health import SERVICE, Health

_HEALTH = "grpc.health.v1.Health"
_REFLECTION = "grpc.reflection.v1alpha.ServerReflection"


class Ordinary(Protocol):
    """A service, or a method of one, that is asked rarely."""

    def attach(self, server: aio.Server) -> None: ...


class OrdinaryServices:
    """What `Health` says, kept published until `close`."""

    def __init__(self, health: Health, others: Sequence[Ordinary] = ()) -> None:
        self._health = health
        self._others = others
        self._servicer = health_aio.HealthServicer()
        self._publishing: set[asyncio.Task[None]] = set()

    async def attach(self, server: aio.Server) -> None:
        """To be called before the server starts: it must not tell anybody that it serves before it does."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(_reflection(), server)
        for other in self._others:
            other.attach(server)
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
        await self._servicer.set("", _status(self._health.alive))
        await self._servicer.set(SERVICE, _status(self._health.serving))


def _status(well: bool) -> health_pb2.HealthCheckResponse.ServingStatus:
    return health_pb2.HealthCheckResponse.SERVING if well else health_pb2.HealthCheckResponse.NOT_SERVING


def _reflection() -> reflection_aio.ReflectionServicer:
    pool = messages.new_pool()
    for module in (health_pb2, reflection_pb2):
        pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
    return reflection_aio.ReflectionServicer((*messages.SERVICES, _HEALTH, _REFLECTION), pool)
