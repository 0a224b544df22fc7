"""The portable transport: everything on grpc.aio. The same answers as native, at some twenty times the cost a call.

grpc.aio gives every call a task of its own; here it drops its message into the current batch and awaits its answer.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc import aio

from ratelimit_rls.errors import SettingsError
from ratelimit_rls.transport.grpc.drain import until_none
from ratelimit_rls.transport.grpc.messages import SHOULD_RATE_LIMIT
from ratelimit_rls.transport.grpc.rls import MOST_MESSAGE_BYTES, Failure, RlsDoor
from ratelimit_rls.transport.grpc.services import OrdinaryServices
from ratelimit_rls.transport.health import Health
from ratelimit_rls.transport.listen import listening_socket

_CODES = {code.value[0]: code for code in grpc.StatusCode}

GRACE_S = 0.1
"""In which what is under way may still end. Not longer: somebody who watches the health service would use all of it."""

Waiting = asyncio.Future[bytes | Failure]


class GrpcioServer:
    def __init__(
        self,
        door: RlsDoor,
        health: Health,
        *,
        reuse_port: bool = False,
        max_concurrent_streams: int = 1024,
        max_connection_age_s: float | None = None,
        max_connection_age_grace_s: float | None = None,
    ) -> None:
        self._door = door
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
        self._messages: list[bytes] = []
        self._waiting: list[Waiting] = []
        self._batches: set[asyncio.Task[None]] = set()
        self.in_flight = 0

    async def start(self, target: str) -> int:
        """Listen on host:port or unix:path; returns the port, which is the kernel's choice if 0 was asked for."""
        await self._services.attach(self._server)
        self._server.add_generic_rpc_handlers((_OneMethod(self._should_rate_limit),))
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

    async def _should_rate_limit(self, message: bytes, context: aio.ServicerContext[bytes, bytes]) -> bytes:
        loop = asyncio.get_running_loop()
        if not self._messages:
            loop.call_soon(self._leave)
        waiting: Waiting = loop.create_future()
        self._messages.append(message)
        self._waiting.append(waiting)
        self.in_flight += 1
        try:
            answer = await waiting
        finally:
            self.in_flight -= 1
        if isinstance(answer, Failure):
            await context.abort(_CODES[answer.code], answer.message)
        return answer

    def _leave(self) -> None:
        messages, self._messages = self._messages, []
        waiting, self._waiting = self._waiting, []
        batch = asyncio.get_running_loop().create_task(self._answer(messages, waiting))
        self._batches.add(batch)
        batch.add_done_callback(self._batches.discard)

    async def _answer(self, messages: list[bytes], waiting: list[Waiting]) -> None:
        for one, answer in zip(waiting, await self._door.answer(messages), strict=True):
            if not one.done():  # done: the caller gave up
                one.set_result(answer)


class _OneMethod(grpc.GenericRpcHandler):
    """ShouldRateLimit with bytes for messages."""

    def __init__(self, behaviour: Any) -> None:
        self._handler: grpc.RpcMethodHandler[Any, Any] = grpc.unary_unary_rpc_method_handler(behaviour)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        return self._handler if handler_call_details.method == SHOULD_RATE_LIMIT else None
