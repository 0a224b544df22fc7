"""HTTP/2 test client of a GrpcProtocol, on a fake socket and event loop.

Nothing here waits: the test controls the event loop iterations and the time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf
from typing import Any

from ratelimit_rls.h2.call_headers import CallHeaders, CallHeadersParser
from ratelimit_rls.h2.config import Config
from ratelimit_rls.telemetry.abuse import Abuse, AbuseLog
from ratelimit_rls.transport.grpc.protocol import GrpcProtocol, GrpcQueuedCall
from ratelimit_rls.transport.grpc.slow_lane import SlowLane
from tests.unit.h2 import client as h2_client
from tests.unit.h2.client import MAX_MESSAGE_BYTES, MAX_STREAMS, METHOD, FakeStreamingCall


class Timer:
    def __init__(self, loop: Loop, due_s: float, callback: Callable[[], object]) -> None:
        self.loop, self.due_s, self.callback = loop, due_s, callback

    def cancel(self) -> None:
        if self in self.loop.timers:
            self.loop.timers.remove(self)


class Loop:
    """Fake event loop with a manual clock."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.timers: list[Timer] = []
        self._soon: list[Callable[[], object]] = []

    def call_soon(self, callback: Callable[[], object]) -> None:
        self._soon.append(callback)

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> Timer:
        timer = Timer(self, self.now_s + delay_s, callback)
        self.timers.append(timer)
        return timer

    def turn(self) -> None:
        now, self._soon = self._soon, []
        for callback in now:
            callback()

    def run(self) -> None:
        """Run callbacks until none is scheduled."""
        while self._soon:
            self.turn()

    def wait(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while due := [timer for timer in self.timers if timer.due_s <= until_s]:
            first = min(due, key=lambda timer: timer.due_s)
            self.timers.remove(first)
            self.now_s = first.due_s
            first.callback()
            self.run()
        self.now_s = until_s


class Socket(asyncio.Transport):
    """Fake transport that records what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.reads = True
        self.is_closed = False
        self.is_aborted = False

    def write(self, data: Any) -> None:
        assert not self.is_closed
        self.writes.append(bytes(data))

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = self.is_aborted = True

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True


class FakeServer:
    """Fake server of a connection. It sends no responses by itself."""

    def __init__(self) -> None:
        self.queue: list[GrpcQueuedCall] = []
        self.config = Config(CallHeadersParser({METHOD: self.queue}), MAX_STREAMS, MAX_MESSAGE_BYTES)
        self.abuse = AbuseLog()
        self.slow_lane: SlowLane  # runs in the client's loop
        self.bulk_lane: SlowLane  # likewise
        self.blocks_bulk = False
        self.rejection: Abuse | None = None  # rejects every new connection, if set
        self.buffered_bytes = 0
        self.max_age_s = self.max_age_grace_s = inf
        self.unflushed: list[GrpcProtocol] | None = None
        self.connections: list[GrpcProtocol] = []
        self.queue_notifications = 0
        self.cancelled_ids: list[int] = []
        self.delays_all = False  # all queued calls are delayed
        self.proxied: dict[int, FakeStreamingCall] = {}

    def admit(self, connection: GrpcProtocol) -> Abuse | None:
        if self.rejection is None:
            self.connections.append(connection)
        return self.rejection

    def on_connection_lost(self, connection: GrpcProtocol) -> None:
        self.connections.remove(connection)

    def on_buffered(self, more_bytes: int) -> None:
        self.buffered_bytes += more_bytes

    def on_calls_queued(self) -> None:
        self.queue_notifications += 1

    def on_cancelled(self, connection: GrpcProtocol, stream_id: int) -> bool:
        self.cancelled_ids.append(stream_id)
        return not self.delays_all

    def proxy(self, connection: GrpcProtocol, stream_id: int, headers: CallHeaders) -> Any:
        self.proxied[stream_id] = FakeStreamingCall(headers)
        return self.proxied[stream_id]


class Client(h2_client.Client):
    """A client, with the connection, server, socket and loop it talks to."""

    connection: GrpcProtocol
    server: FakeServer  # type: ignore[assignment]

    def _connect(self, server: FakeServer | None) -> None:  # type: ignore[override]
        self.server = server or FakeServer()
        self.loop = Loop()
        self.server.slow_lane = SlowLane(self.loop.call_soon)
        self.server.bulk_lane = SlowLane(self.loop.call_soon, lambda: self.server.blocks_bulk)
        self.socket = Socket()
        running = asyncio._get_running_loop()
        asyncio._set_running_loop(self.loop)  # type: ignore[arg-type]
        try:
            self.connection = GrpcProtocol(self.server)
        finally:
            asyncio._set_running_loop(running)
        self.connection.connection_made(self.socket)

    @property
    def writes(self) -> list[bytes]:
        return self.socket.writes

    @property
    def is_closed(self) -> bool:
        return self.socket.is_closed

    def send(self, data: bytes) -> None:
        """Send data to the connection, and read its output."""
        self.connection.data_received(data)
        self.settle()

    def settle(self) -> None:
        self.loop.run()
        self._read()

    def disconnect(self) -> None:
        self.connection.connection_lost(None)
        self.loop.run()
