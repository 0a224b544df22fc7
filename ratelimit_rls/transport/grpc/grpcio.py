"""The portable transport: everything on grpc.aio. The same answers as native, at some twenty times the cost a call.

grpc.aio gives every call a task of its own; here it drops its message into the current batch and awaits its answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import grpc
from grpc import aio

from ratelimit_rls.errors import SettingsError
from ratelimit_rls.transport.grpc.door import Door, Failure, Held
from ratelimit_rls.transport.grpc.drain import until_none
from ratelimit_rls.transport.grpc.limiter_door import MOST_MESSAGE_BYTES
from ratelimit_rls.transport.grpc.services import OrdinaryServices
from ratelimit_rls.transport.grpc.waiting import WaitingRoom
from ratelimit_rls.transport.health import Health
from ratelimit_rls.transport.listen import listening_socket

_CODES = {code.value[0]: code for code in grpc.StatusCode}

GRACE_S = 0.1
"""In which what is under way may still end. Not longer: somebody who watches the health service would use all of it."""

Waiting = asyncio.Future[bytes | Failure]


class GrpcioServer:
    def __init__(
        self,
        doors: Mapping[str, Door],
        room: WaitingRoom,
        health: Health,
        *,
        reuse_port: bool = False,
        max_concurrent_streams: int = 1024,
        max_connection_age_s: float | None = None,
        max_connection_age_grace_s: float | None = None,
    ) -> None:
        self._methods = {method: _Method(door, room) for method, door in doors.items()}
        self._services = OrdinaryServices(health)
        options = [
            ("grpc.so_reuseport", int(reuse_port)),
            ("grpc.max_concurrent_streams", max_concurrent_streams),
            ("grpc.max_receive_message_length", MOST_MESSAGE_BYTES),
        ]
        if max_connection_age_s is not None:
            options.append(("grpc.max_connection_age_ms", int(max_connection_age_s * 1000)))
        if max_connection_age_grace_s is not None:
            options.append(("grpc.max_connection_age_grace_ms", int(max_connection_age_grace_s * 1000)))
        self._server = aio.server(options=options)

    @property
    def in_flight(self) -> int:
        return sum(method.in_flight for method in self._methods.values())

    async def start(self, target: str) -> int:
        """Listen on host:port or unix:path; returns the port, which is the kernel's choice if 0 was asked for."""
        await self._services.attach(self._server)
        self._server.add_generic_rpc_handlers((_Handlers(self._methods),))
        try:
            port = self._server.add_insecure_port(target)
        except RuntimeError as error:
            # gRPC does not say why; the same attempt made by us raises with the kernel's word for it.
            listening_socket(target).close()
            raise SettingsError(f"cannot listen on {target}: {error}") from error
        await self._server.start()
        return port

    async def drain(self, timeout_s: float) -> None:
        """Wait until every call has its answer, at most so long. Whoever still comes is still served."""
        await until_none(lambda: self.in_flight, timeout_s)

    async def close(self) -> None:
        # Once, and with all its grace: a second stop beside the first can bring the whole process down (grpcio 1.85).
        await self._server.stop(GRACE_S)
        await self._services.close()


class _Method:
    """One door's calls: those of one turn of the loop leave together."""

    def __init__(self, door: Door, room: WaitingRoom) -> None:
        self._door = door
        self._room = room
        self._messages: list[bytes] = []
        self._time_left_s: list[float | None] = []
        self._waiting: list[Waiting] = []
        self._batches: set[asyncio.Task[None]] = set()
        self.in_flight = 0

    async def ask(self, message: bytes, context: aio.ServicerContext[bytes, bytes]) -> bytes:
        loop = asyncio.get_running_loop()
        if not self._messages:
            loop.call_soon(self._leave)
        waiting: Waiting = loop.create_future()
        self._messages.append(message)
        self._time_left_s.append(context.time_remaining())
        self._waiting.append(waiting)
        self.in_flight += 1
        try:
            answer = await waiting
        finally:
            self.in_flight -= 1
            self._room.leave(waiting)  # held, and the caller gave up
        if isinstance(answer, Failure):
            await context.abort(_CODES[answer.code], answer.message)
        return answer

    def _leave(self) -> None:
        messages, self._messages = self._messages, []
        time_left_s, self._time_left_s = self._time_left_s, []
        waiting, self._waiting = self._waiting, []
        batch = asyncio.get_running_loop().create_task(self._answer(messages, time_left_s, waiting))
        self._batches.add(batch)
        batch.add_done_callback(self._batches.discard)

    async def _answer(self, messages: list[bytes], time_left_s: list[float | None], waiting: list[Waiting]) -> None:
        for one, answer in zip(waiting, await self._door.answer(messages, time_left_s), strict=True):
            if not isinstance(answer, Held):
                _deliver(one, answer)
            elif one.done():
                self._room.decline(answer)
            else:
                self._room.hold(one, answer, _deliver)


def _deliver(waiting: Waiting, answer: bytes | Failure) -> None:
    if not waiting.done():  # done: the caller gave up
        waiting.set_result(answer)


class _Handlers(grpc.GenericRpcHandler):
    """The methods, with bytes for messages."""

    def __init__(self, methods: Mapping[str, _Method]) -> None:
        self._handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            name: grpc.unary_unary_rpc_method_handler(method.ask) for name, method in methods.items()
        }

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        return self._handlers.get(handler_call_details.method)
