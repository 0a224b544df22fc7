"""The native transport: HTTP/2 and gRPC in Rust, outside the interpreter's lock, and batches in between.

    front ─► thread ─► loop: one turn's calls ─► door ─► front        ShouldRateLimit
    front ─► Unix socket ─► grpc.aio                                  everything else

No task, future or wake-up belongs to a single call: that is where the time would go.
"""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from grpc import aio
from pygrpc_native import EVENT_CALL, NativeGrpcFront

from ratelimit_rls.errors import SettingsError
from ratelimit_rls.transport.grpc.drain import until_none
from ratelimit_rls.transport.grpc.messages import SHOULD_RATE_LIMIT
from ratelimit_rls.transport.grpc.rls import Failure, RlsDoor
from ratelimit_rls.transport.grpc.services import OrdinaryServices
from ratelimit_rls.transport.health import Health

if TYPE_CHECKING:
    from pygrpc_native._native import DetailedEvent

MOST_EVENTS = 512
"""Taken from the front at once. Only a bound: what is there is taken without waiting for more."""

SETTLE_S = 0.1
"""The front cuts connections when it closes, written answers or not: this is how long the last ones have to get out."""


class NativeServer:
    def __init__(
        self,
        door: RlsDoor,
        health: Health,
        *,
        directory: Path,
        reuse_port: bool = False,
        io_threads: int = 1,
        max_concurrent_streams: int = 1024,
    ) -> None:
        self._door = door
        self._services = OrdinaryServices(health)
        self._fallback = aio.server()
        self._fallback_path = directory / "fallback.sock"
        self._new_front = partial(
            NativeGrpcFront,
            methods=[(SHOULD_RATE_LIMIT, False)],
            io_threads=io_threads,
            max_concurrent_streams=max_concurrent_streams,
            reuse_port=reuse_port,
            call_details=True,
        )
        self._front: NativeGrpcFront | None = None
        self._call_ids: list[int] = []
        self._messages: list[bytes] = []
        self._batches: set[asyncio.Task[None]] = set()
        self.in_flight = 0

    async def start(self, target: str) -> int:
        """Listen on host:port or unix:path; returns the port, which is the kernel's choice if 0 was asked for."""
        try:
            front = self._new_front(target)
        except OSError as error:
            raise SettingsError(f"cannot listen on {error.strerror}") from error
        self._front = front
        await self._services.attach(self._fallback)
        self._fallback.add_insecure_port(f"unix:{self._fallback_path}")
        await self._fallback.start()
        front.set_fallback(str(self._fallback_path))
        front.start()
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._dispatch, args=(front, loop), name="grpc-front", daemon=True).start()
        return int(front.bound_port)

    async def drain(self, timeout_s: float) -> None:
        """Wait until every call has its answer, at most so long. Whoever still comes is still served."""
        await until_none(lambda: self.in_flight, timeout_s)

    async def close(self) -> None:
        if self._front is None:
            return
        await asyncio.sleep(SETTLE_S)
        await asyncio.to_thread(self._front.close)
        await self._services.close()
        await self._fallback.stop(None)

    def _dispatch(self, front: NativeGrpcFront, loop: asyncio.AbstractEventLoop) -> None:
        """The thread's whole life: carry batches to the loop until the front is closed."""
        while (events := front.recv_batch_details(MOST_EVENTS)) is not None:
            try:
                loop.call_soon_threadsafe(self._received, events)
            except RuntimeError:  # the loop is gone, and with it everybody who could answer
                front.close()
                return

    def _received(self, events: list[DetailedEvent]) -> None:
        """Add to the batch that leaves at the end of this turn.

        A cancellation needs no care: its call may be counted already, and the front drops an answer nobody waits for.
        """
        had_company = bool(self._call_ids)
        for kind, call_id, _method, message, _client, _details in events:
            if kind == EVENT_CALL and message is not None:
                self._call_ids.append(call_id)
                self._messages.append(message)
                self.in_flight += 1
        if self._call_ids and not had_company:
            asyncio.get_running_loop().call_soon(self._leave)

    def _leave(self) -> None:
        call_ids, self._call_ids = self._call_ids, []
        messages, self._messages = self._messages, []
        batch = asyncio.get_running_loop().create_task(self._answer(call_ids, messages))
        self._batches.add(batch)
        batch.add_done_callback(self._batches.discard)

    async def _answer(self, call_ids: list[int], messages: list[bytes]) -> None:
        front = self._front
        assert front is not None
        try:
            for call_id, answer in zip(call_ids, await self._door.answer(messages), strict=True):
                if isinstance(answer, Failure):
                    front.fail(call_id, answer.code, answer.message)
                else:
                    front.respond(call_id, answer)
        finally:
            self.in_flight -= len(call_ids)
