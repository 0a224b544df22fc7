"""The portable transport: everything on grpc.aio. The same answers as native, at some twenty times the cost a call.

grpc.aio gives every call a task of its own; here it drops its message into the current batch and awaits its answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any

import grpc
from grpc import aio

from ratelimit_rls.errors import SettingsError
from ratelimit_rls.telemetry.traces import Metadata
from ratelimit_rls.transport.grpc.deadlines import Deadlines, deadline_s
from ratelimit_rls.transport.grpc.door import Door, Failure, Held
from ratelimit_rls.transport.grpc.drain import until_none
from ratelimit_rls.transport.grpc.limiter_door import MOST_MESSAGE_BYTES
from ratelimit_rls.transport.grpc.observed import ObservedBatch, Observer
from ratelimit_rls.transport.grpc.request_id import sent_along
from ratelimit_rls.transport.grpc.services import Ordinary, OrdinaryServices
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
        observers: Mapping[str, Observer],
        *,
        others: Sequence[Ordinary] = (),
        request_id_metadata: str = "",
        reuse_port: bool = False,
        max_concurrent_streams: int = 1024,
        max_connection_age_s: float | None = None,
        max_connection_age_grace_s: float | None = None,
    ) -> None:
        self._methods = {
            method: _Method(door, room, observers[method], request_id_metadata.lower())
            for method, door in doors.items()
        }
        self._services = OrdinaryServices(health, others)
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
        for method in self._methods.values():
            method.close()
        await self._services.close()


class _Batch:
    """One door's calls of one turn of the loop."""

    def __init__(self) -> None:
        self.waiting: list[Waiting] = []
        self.messages: list[bytes] = []
        self.deadlines_s: list[float] = []
        self.request_ids: list[bytes | None] = []  # none at all, if nobody looks for them
        self.received_s = 0.0  # the first of its calls
        self.metadata: list[Metadata] = []  # as the ids
        self.observed: ObservedBatch | None = None  # once it is being answered


class _Method:
    """One door's calls: those of one turn of the loop leave together."""

    def __init__(self, door: Door, room: WaitingRoom, observer: Observer, request_id_metadata: str) -> None:
        self._door = door
        self._room = room
        self._observer = observer
        self._request_id_metadata = request_id_metadata
        self._gathering = _Batch()
        self._batches: set[asyncio.Task[None]] = set()
        self._deadlines: Deadlines[_Batch] = Deadlines(_settle)
        self.in_flight = 0

    async def ask(self, message: bytes, context: aio.ServicerContext[bytes, bytes]) -> bytes:
        loop = asyncio.get_running_loop()
        batch = self._gathering
        if not batch.messages:
            batch.received_s = monotonic()
            loop.call_soon(self._leave)
        waiting: Waiting = loop.create_future()
        left_s = context.time_remaining()
        batch.messages.append(message)
        batch.deadlines_s.append(deadline_s(monotonic(), left_s))
        batch.waiting.append(waiting)
        if self._request_id_metadata:
            batch.request_ids.append(sent_along(context.invocation_metadata() or (), self._request_id_metadata))
        if self._observer.wants_metadata:
            batch.metadata.append(tuple(context.invocation_metadata() or ()))
        self.in_flight += 1
        try:
            answer = await waiting
        finally:
            self.in_flight -= 1
            self._room.leave(waiting)  # held, and the caller gave up
        if isinstance(answer, Failure):
            await context.abort(_CODES[answer.code], answer.message)
        return answer

    def close(self) -> None:
        self._deadlines.close()

    def _leave(self) -> None:
        batch, self._gathering = self._gathering, _Batch()
        task = asyncio.get_running_loop().create_task(self._answer(batch))
        self._batches.add(task)
        task.add_done_callback(self._batches.discard)

    async def _answer(self, batch: _Batch) -> None:
        batch.observed = observed = self._observer.batch(batch.received_s, batch.metadata)
        asked = self._door.ask(batch.messages, batch.deadlines_s, batch.request_ids or None, observed.traced)
        self._deadlines.watch(batch, asked)
        try:
            answers = await asked.answers()
        finally:
            self._deadlines.forget(batch)
        for waiting, answer in zip(batch.waiting, answers, strict=True):
            if answer is None:
                continue
            if not isinstance(answer, Held):
                _deliver(waiting, answer)
            elif waiting.done():
                self._room.decline(answer)
            else:
                self._room.hold(waiting, answer, _deliver)
        observed.answered(answers)


def _settle(batch: _Batch, number: int, answer: bytes | Failure) -> None:
    """Answer a call while the others of its batch wait on."""
    _deliver(batch.waiting[number], answer)
    assert batch.observed is not None
    batch.observed.answered_apart(number, answer)


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
