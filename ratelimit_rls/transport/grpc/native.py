"""The native transport: HTTP/2 spoken by this process itself, in the loop that decides, and batches in between.

    connections ─► one turn's calls ─► door ─► connections        the methods that have a door
    connections ─► Unix socket ─► grpc.aio                        everything else

No thread, task, future or wake-up belongs to a single call: that is where the time would go.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path

from grpc import aio

from ratelimit_rls.transport.grpc.certificates import TlsFiles
from ratelimit_rls.transport.grpc.connection import Connection, greeting
from ratelimit_rls.transport.grpc.deadlines import Deadlines
from ratelimit_rls.transport.grpc.door import Door, Failure
from ratelimit_rls.transport.grpc.drain import until_none
from ratelimit_rls.transport.grpc.head import Arrived, Head, HeadReader
from ratelimit_rls.transport.grpc.limiter_door import MOST_MESSAGE_BYTES
from ratelimit_rls.transport.grpc.observed import ObservedBatch, Observer
from ratelimit_rls.transport.grpc.relay import Relay, Relayed
from ratelimit_rls.transport.grpc.services import Ordinary, OrdinaryServices
from ratelimit_rls.transport.grpc.tls import TlsListener
from ratelimit_rls.transport.grpc.waiting import WaitingRoom
from ratelimit_rls.transport.health import Health
from ratelimit_rls.transport.listen import listening_socket

SETTLE_S = 0.1
"""Which clients have to hear that no more calls are taken, and to be told what is still under way."""

_Caller = tuple[Connection, int]
"""Who is answered: a connection, and a stream of it."""


class _Batch:
    """One door's calls of one turn of the loop."""

    __slots__ = ("connections", "deadlines_s", "heads", "messages", "observed", "received_s", "settled", "stream_ids")

    def __init__(self, calls: Sequence[Arrived]) -> None:
        self.connections, self.stream_ids, self.messages, at_s, self.heads = zip(*calls, strict=True)
        self.deadlines_s = [at + head.allowed_s for at, head in zip(at_s, self.heads, strict=True)]
        self.received_s: float = at_s[0]  # the first of its calls
        self.observed: ObservedBatch | None = None  # once it is being answered
        self.settled = 0  # calls that have their answers while others wait


class _Method:
    """Where the calls of a door come together."""

    __slots__ = ("door", "gathering", "observer")

    def __init__(self, door: Door, observer: Observer) -> None:
        self.door = door
        self.observer = observer
        self.gathering: list[Arrived] = []


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
        tls: TlsFiles | None = None,
        reuse_port: bool = False,
        max_concurrent_streams: int = 1024,
        max_connection_age_s: float | None = None,
        max_connection_age_grace_s: float | None = None,
    ) -> None:
        """Raises SettingsError if the files of TLS cannot be used."""
        self.greeting = greeting(max_concurrent_streams)
        self.most_streams = max_concurrent_streams
        self.most_message_bytes = MOST_MESSAGE_BYTES
        self.max_age_s = inf if max_connection_age_s is None else max_connection_age_s
        self.max_age_grace_s = inf if max_connection_age_grace_s is None else max_connection_age_grace_s
        self._methods = {method: _Method(door, observers[method]) for method, door in doors.items()}
        self.heads = HeadReader({path: one.gathering for path, one in self._methods.items()}, request_id_metadata)
        self._has_ids = bool(request_id_metadata)
        self._room = room
        self._reuse_port = reuse_port
        self._tls = TlsListener(tls) if tls is not None else None
        self._listening: asyncio.Server | None = None
        self._unix_path = ""
        self._services = OrdinaryServices(health, others)
        self._fallback = aio.server()
        self._fallback_target = f"unix:{directory / 'fallback.sock'}"
        self._relay = Relay(self._fallback_target)
        self._connections: set[Connection] = set()
        self._will_leave = False
        self._under_way = 0
        self._held = 0
        self._batches: set[asyncio.Task[None]] = set()
        self._deadlines: Deadlines[_Batch] = Deadlines(self._settle)

    @property
    def in_flight(self) -> int:
        return self._under_way + self._held

    async def start(self, target: str) -> int:
        """Listen on host:port or unix:path; returns the port, which is the kernel's choice if 0 was asked for."""
        listening = listening_socket(target, reuse_port=self._reuse_port)
        port = 0 if target.startswith("unix:") else int(listening.getsockname()[1])
        self._unix_path = target.removeprefix("unix:") if target.startswith("unix:") else ""
        await self._services.attach(self._fallback)
        self._fallback.add_insecure_port(self._fallback_target)
        await self._fallback.start()
        if self._tls is not None:
            self._tls.start(listening, lambda: Connection(self))
        else:
            loop = asyncio.get_running_loop()
            self._listening = await loop.create_server(lambda: Connection(self), sock=listening)
        return port

    async def drain(self, timeout_s: float) -> None:
        """Wait until every call has its answer, at most so long. Whoever still comes is still served."""
        await until_none(lambda: self.in_flight, timeout_s)

    async def close(self) -> None:
        if self._listening is not None:
            self._listening.close()
        if self._tls is not None:
            await self._tls.close()
        if self._unix_path:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._unix_path)
        for connection in self._connections:
            connection.leave()
        await until_none(lambda: len(self._connections), SETTLE_S)
        self._deadlines.close()
        for connection in list(self._connections):
            connection.close()
        await self._relay.close()
        await self._services.close()
        await self._fallback.stop(None)
        await until_none(lambda: len(self._connections), SETTLE_S)
        for connection in list(self._connections):
            connection.abort()

    # ── what connections tell ──

    def made(self, connection: Connection) -> None:
        self._connections.add(connection)

    def lost(self, connection: Connection) -> None:
        self._connections.discard(connection)

    def relay(self, connection: Connection, stream_id: int, head: Head) -> Relayed:
        return self._relay.call(connection, stream_id, head)

    def gathered(self) -> None:
        """Have what is gathered leave at the end of this turn, with what else comes in it."""
        if not self._will_leave:
            self._will_leave = True
            asyncio.get_running_loop().call_soon(self._leave)

    def left(self, connection: Connection, stream_id: int) -> bool:
        """Whoever is held gives its slot back. Others need no care: their calls may be counted already, and a
        connection drops an answer that nobody waits for."""
        was_held = self._room.leave((connection, stream_id))
        if was_held:
            self._held -= 1
        return not was_held

    # ── answering ──

    def _leave(self) -> None:
        self._will_leave = False
        for method in self._methods.values():
            if method.gathering:
                batch = _Batch(method.gathering)
                method.gathering.clear()
                self._under_way += len(batch.messages)
                task = asyncio.get_running_loop().create_task(self._answer(batch, method))
                self._batches.add(task)
                task.add_done_callback(self._batches.discard)

    async def _answer(self, batch: _Batch, method: _Method) -> None:
        observer = method.observer
        metadata = [head.metadata for head in batch.heads] if observer.wants_metadata else ()
        request_ids = [head.request_id for head in batch.heads] if self._has_ids else None
        batch.observed = observed = observer.batch(batch.received_s, metadata)
        try:
            asked = method.door.ask(batch.messages, batch.deadlines_s, request_ids, observed.traced)
            self._deadlines.watch(batch, asked)
            answers = await asked.answers()
            for connection, stream_id, answer in zip(batch.connections, batch.stream_ids, answers, strict=True):
                if isinstance(answer, bytes):
                    connection.answer(stream_id, answer)
                elif isinstance(answer, Failure):
                    connection.fail(stream_id, answer)
                elif answer is None:
                    continue
                elif not connection.waits(stream_id):
                    connection.let_go()
                    self._room.decline(answer)
                else:
                    self._held += 1
                    self._room.hold((connection, stream_id), answer, self._answer_held)
            observed.answered(answers)
        finally:
            self._deadlines.forget(batch)
            self._under_way -= len(batch.messages) - batch.settled

    def _settle(self, batch: _Batch, number: int, answer: bytes | Failure) -> None:
        """Answer a call while the others of its batch wait on."""
        connection, stream_id = batch.connections[number], batch.stream_ids[number]
        assert batch.observed is not None
        batch.settled += 1
        self._under_way -= 1
        if isinstance(answer, bytes):
            connection.answer(stream_id, answer)
        else:
            connection.fail(stream_id, answer)
        batch.observed.answered_apart(number, answer)

    def _answer_held(self, caller: _Caller, answer: bytes) -> None:
        self._held -= 1
        connection, stream_id = caller
        connection.answer(stream_id, answer)
