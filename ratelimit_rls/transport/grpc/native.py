"""The native transport: HTTP/2 and gRPC in Rust, outside the interpreter's lock, and batches in between.

    front ─► thread ─► loop: one turn's calls ─► door ─► front        the methods that have a door
    front ─► Unix socket ─► grpc.aio                                  everything else

No task, future or wake-up belongs to a single call: that is where the time would go.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from grpc import aio
from pygrpc_native import EVENT_CALL, NativeGrpcFront

from ratelimit_rls.errors import SettingsError
from ratelimit_rls.telemetry.traces import Metadata
from ratelimit_rls.transport.grpc.deadlines import Deadlines, deadline_s
from ratelimit_rls.transport.grpc.door import Door, Failure
from ratelimit_rls.transport.grpc.drain import until_none
from ratelimit_rls.transport.grpc.observed import ObservedBatch, Observer
from ratelimit_rls.transport.grpc.request_id import sent_along
from ratelimit_rls.transport.grpc.services import Ordinary, OrdinaryServices
from ratelimit_rls.transport.grpc.waiting import WaitingRoom
from ratelimit_rls.transport.health import Health

if TYPE_CHECKING:
    from pygrpc_native._native import DetailedEvent

MOST_EVENTS = 512
"""Taken from the front at once. Only a bound: what is there is taken without waiting for more."""

SETTLE_S = 0.1
"""The front cuts connections when it closes, written answers or not: this is how long the last ones have to get out."""


class _Batch:
    """One door's calls of one turn of the loop."""

    __slots__ = (
        "call_ids",
        "deadlines_s",
        "door",
        "messages",
        "metadata",
        "observed",
        "observer",
        "received_s",
        "request_ids",
    )

    def __init__(self, door: Door, observer: Observer) -> None:
        self.door = door
        self.observer = observer
        self.observed: ObservedBatch | None = None  # once it is being answered
        self.received_s = 0.0  # the first of its calls
        self.metadata: list[Metadata] = []  # none at all, if nobody looks for it
        self.call_ids: list[int] = []
        self.messages: list[bytes] = []
        self.deadlines_s: list[float] = []
        self.request_ids: list[bytes | None] = []  # none at all, if nobody looks for them


class NativeServer:
    def __init__(
        self,
        doors: Mapping[str, Door],
        room: WaitingRoom,
        health: Health,
        observers: Mapping[str, Observer],
        *,
        directory: Path,
        others: Sequence[Ordinary] = (),
        request_id_metadata: str = "",
        reuse_port: bool = False,
        io_threads: int = 1,
        max_concurrent_streams: int = 1024,
    ) -> None:
        self._room = room
        self._request_id_metadata = request_id_metadata.lower()
        self._services = OrdinaryServices(health, others)
        self._fallback = aio.server()
        self._fallback_path = directory / "fallback.sock"
        self._new_front = partial(
            NativeGrpcFront,
            methods=[(method, False) for method in doors],
            io_threads=io_threads,
            max_concurrent_streams=max_concurrent_streams,
            reuse_port=reuse_port,
            call_details=True,
        )
        self._front: NativeGrpcFront | None = None
        # The front numbers methods as they are given.
        self._gathering = [_Batch(door, observers[method]) for method, door in doors.items()]
        self._notes_metadata = any(observer.wants_metadata for observer in observers.values())
        self._is_leaving = False
        self._unanswered: set[int] = set()  # calls under way or held
        self._gone: set[int] = set()  # those of them whose callers left while they were under way
        self._batches: set[asyncio.Task[None]] = set()
        self._deadlines: Deadlines[_Batch] = Deadlines(self._settle)

    @property
    def in_flight(self) -> int:
        return len(self._unanswered)

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
        self._deadlines.close()
        await asyncio.to_thread(self._front.close)
        await self._services.close()
        await self._fallback.stop(None)

    def _dispatch(self, front: NativeGrpcFront, loop: asyncio.AbstractEventLoop) -> None:
        """The thread's whole life: carry batches to the loop until the front is closed."""
        while (events := front.recv_batch_details(MOST_EVENTS)) is not None:
            try:
                loop.call_soon_threadsafe(self._received, events, monotonic())
            except RuntimeError:  # the loop is gone, and with it everybody who could answer
                front.close()
                return

    def _received(self, events: list[DetailedEvent], at_s: float) -> None:
        """Add to the batches that leave at the end of this turn. The time that calls have left was told at `at_s`."""
        gathering, unanswered = self._gathering, self._unanswered
        for kind, call_id, method, message, _client, details in events:
            if kind != EVENT_CALL:
                self._cancelled(call_id)
            elif message is not None and details is not None:
                batch = gathering[method]
                if not batch.call_ids:
                    batch.received_s = at_s
                batch.call_ids.append(call_id)
                batch.messages.append(message)
                left_s = details[2]
                batch.deadlines_s.append(deadline_s(at_s, left_s))
                unanswered.add(call_id)
        if self._request_id_metadata:
            self._note_request_ids(events)
        if self._notes_metadata:
            self._note_metadata(events)
        if not self._is_leaving:
            self._is_leaving = True
            asyncio.get_running_loop().call_soon(self._leave)

    def _note_request_ids(self, events: list[DetailedEvent]) -> None:
        for kind, _, method, message, _client, details in events:
            if kind == EVENT_CALL and message is not None and details is not None:
                self._gathering[method].request_ids.append(sent_along(details[0], self._request_id_metadata))

    def _note_metadata(self, events: list[DetailedEvent]) -> None:
        for kind, _, method, message, _client, details in events:
            if kind == EVENT_CALL and message is not None and details is not None:
                self._gathering[method].metadata.append(details[0])

    def _cancelled(self, call_id: int) -> None:
        """Whoever is held, or will be, gives its slot back. Others need no care: their calls may be counted already,
        and the front drops an answer that nobody waits for."""
        if self._room.leave(call_id):
            self._unanswered.discard(call_id)
        elif call_id in self._unanswered:
            self._gone.add(call_id)

    def _leave(self) -> None:
        self._is_leaving = False
        for method, batch in enumerate(self._gathering):
            if batch.call_ids:
                self._gathering[method] = _Batch(batch.door, batch.observer)
                task = asyncio.get_running_loop().create_task(self._answer(batch))
                self._batches.add(task)
                task.add_done_callback(self._batches.discard)

    async def _answer(self, batch: _Batch) -> None:
        front = self._front
        assert front is not None
        held: list[int] = []
        batch.observed = observed = batch.observer.batch(batch.received_s, batch.metadata)
        try:
            asked = batch.door.ask(batch.messages, batch.deadlines_s, batch.request_ids or None, observed.traced)
            self._deadlines.watch(batch, asked)
            answers = await asked.answers()
            for call_id, answer in zip(batch.call_ids, answers, strict=True):
                if isinstance(answer, bytes):
                    front.respond(call_id, answer)
                elif isinstance(answer, Failure):
                    front.fail(call_id, answer.code, answer.message)
                elif answer is None:
                    continue
                elif call_id in self._gone:
                    self._room.decline(answer)
                else:
                    self._room.hold(call_id, answer, self._answer_held)
                    held.append(call_id)
            observed.answered(answers)
        finally:
            self._deadlines.forget(batch)
            self._unanswered.difference_update(batch.call_ids)
            self._unanswered.update(held)
            if self._gone:
                self._gone.difference_update(batch.call_ids)

    def _settle(self, batch: _Batch, number: int, answer: bytes | Failure) -> None:
        """Answer a call while the others of its batch wait on."""
        call_id = batch.call_ids[number]
        self._unanswered.discard(call_id)
        assert self._front is not None
        assert batch.observed is not None
        if isinstance(answer, bytes):
            self._front.respond(call_id, answer)
        else:
            self._front.fail(call_id, answer.code, answer.message)
        batch.observed.answered_apart(number, answer)

    def _answer_held(self, call_id: int, answer: bytes) -> None:
        self._unanswered.discard(call_id)
        assert self._front is not None
        self._front.respond(call_id, answer)
