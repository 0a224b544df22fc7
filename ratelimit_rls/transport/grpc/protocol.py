"""asyncio protocol of the gRPC port: an HTTP/2 connection (h2) with a socket, timers and a share of the event loop.

A client that does not read its responses is not read from, and is eventually disconnected. Input that is slow to parse,
or much at once, is read in the slow lane (slow_lane.py), which all connections share by CPU time.
"""

from __future__ import annotations

import asyncio
from enum import StrEnum
from math import inf
from random import uniform
from time import monotonic
from typing import Protocol, cast

import structlog

from ratelimit_rls.h2.call_headers import CallHeaders
from ratelimit_rls.h2.config import Config
from ratelimit_rls.h2.connection import Connection
from ratelimit_rls.h2.frames import ErrorCode, Http2ConnectionError
from ratelimit_rls.h2.request_stream import StreamingCall
from ratelimit_rls.h2.status import RpcError
from ratelimit_rls.telemetry.abuse import Abuse, AbuseLog
from ratelimit_rls.transport.grpc.slow_lane import SlowLane
from ratelimit_rls.transport.peers import DISCONNECTED, has_peer_closed, peer_address, peer_group

SLOW_SLICE_S = 0.002
"""CPU time for slow input before the next connection is read. Ordinary calls are not slow, and few can be open."""

LARGE_READ_BYTES = 4096
"""Reads above this size share the time of slow input, whatever they contain: 40 ordinary calls. Otherwise a thousand
connections that send a thousand calls each would all be read before any other connection."""

CLOSE_POLL_S = 0.01
LINGER_S = 5.0
"""Time that a client has to read what was written before a closed connection is aborted."""

AGE_JITTER = 0.1
"""Fraction by which the maximum age varies, so that connections opened together do not all end together."""

_log = structlog.get_logger()

GrpcQueuedCall = tuple["GrpcProtocol", int, bytes, float, CallHeaders]
"""A call whose message has arrived: connection, stream id, message, time of arrival, headers."""


class ConnectionServer(Protocol):
    """Interface that a connection needs from its server."""

    config: Config
    abuse: AbuseLog
    slow_lane: SlowLane
    bulk_lane: SlowLane
    max_age_s: float
    max_age_grace_s: float
    unflushed: list[GrpcProtocol] | None
    """The connections to flush at the end of the batch that is being answered. None: no batch is being answered, and
    each connection is flushed in the next iteration of the event loop."""

    def admit(self, connection: GrpcProtocol) -> Abuse | None:
        """Count a new connection, or return why it must be rejected."""
        ...

    def on_connection_lost(self, connection: GrpcProtocol) -> None:
        """Stop counting an admitted connection, which was closed."""
        ...

    def on_buffered(self, more_bytes: int) -> None:
        """Add to (or subtract from) the bytes that a connection buffers: unfinished input and unsent responses."""
        ...

    def on_calls_queued(self) -> None:
        """Schedule the calls that were appended to the queues of their methods."""
        ...

    def on_cancelled(self, connection: GrpcProtocol, stream_id: int) -> bool:
        """Handle the cancellation of a queued call. Return True if the pipeline will still produce a response."""
        ...

    def proxy(self, connection: GrpcProtocol, stream_id: int, headers: CallHeaders) -> StreamingCall | RpcError:
        """Start a call of a method that has no pipeline, or return why it is rejected."""
        ...


class GrpcProtocol(Connection, asyncio.Protocol):
    """Connection of one gRPC client on a socket."""

    def __init__(self, server: ConnectionServer) -> None:
        super().__init__(server.config)
        self._server = server
        self.on_calls_queued = server.on_calls_queued  # type: ignore[method-assign]  # saves a Python call for each read
        self._loop = asyncio.get_running_loop()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._transport: asyncio.Transport
        self.peer = ""  # address of the client, without the port
        self.peer_group = ""  # the address, or the /64 network of an IPv6 address
        self.slow_s = 0.0  # CPU time spent on slow input, kept by the slow lane
        self.decided_weight = 0  # virtual time of this connection's last call, kept by the backlog
        self.queued_bytes = 0  # size of this connection's messages in the backlog
        self.is_backlogged = False  # reading is paused until more of them are decided
        self._is_admitted = False
        self._is_deferred = False  # reading waits in a lane
        self._is_bulk = False  # that lane is the one for much input
        self._is_in_lane = False  # a lane is reading
        self._deferred_since_s = 0.0  # since when input waits in lanes without having been read to its end
        self._had_turn = False  # a lane has read some of it
        self._slow_since_s = self._slow_until_s = 0.0  # when slow input of this read began, and its last frame ended
        self._is_write_paused = False  # writing is paused until the client reads
        self._write_paused_s = 0.0  # since when writing is paused

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are not instances of it
        self.peer = peer_address(transport)
        if self.peer == DISCONNECTED:
            self.terminate()
            self.abort()
            return
        self.peer_group = peer_group(self.peer)
        self.start(monotonic())
        rejection = self._server.admit(self)
        if rejection is not None:
            self.disconnect(rejection, "too many connections")
            return
        self._is_admitted = True
        self._timers["preface"] = self._loop.call_later(self._config.timeouts.preface_s, self._on_preface_timeout)
        if self._server.max_age_s < inf:
            age_s = self._server.max_age_s * uniform(1 - AGE_JITTER, 1 + AGE_JITTER)
            self._timers["age"] = self._loop.call_later(age_s, self._on_max_age)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self.terminate()
        self._release()

    def pause_writing(self) -> None:
        self._is_write_paused = True
        self._write_paused_s = monotonic()
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._is_write_paused = False
        self._defer_reading()

    def data_received(self, data: bytes) -> None:
        if self._is_deferred or self.is_backlogged:
            if not self._is_closed:
                self.keep_data(data)  # was in transit when reading was paused
            return
        now_s = monotonic()
        if len(data) > LARGE_READ_BYTES and not self._may_read_inline(now_s):
            self.keep_data(data)
            self._defer_reading()
            return
        self.receive_data(data, now_s)
        if len(data) > LARGE_READ_BYTES:
            self._slow_since_s, self._slow_until_s = now_s, monotonic()
        if self._slow_since_s:
            self._server.slow_lane.charge_inline(self._charge_slow_input())

    def _may_read_inline(self, now_s: float) -> bool:
        """Return True if much input can be read at once, without waiting for its turn."""
        return self._server.slow_lane.has_inline_time(now_s) and not self._server.bulk_lane.is_blocked()

    # Called by the server.

    def pause_for_backlog(self) -> None:
        """Read nothing more: too many bytes of this connection's messages wait to be decided."""
        self.is_backlogged = True
        self._deferred_since_s = 0.0  # from here on it waits for us
        if not self._is_closed:
            self._transport.pause_reading()

    def resume_from_backlog(self) -> None:
        self.is_backlogged = False
        if not self._is_closed:
            self._defer_reading()

    @property
    def waits_for_client(self) -> bool:
        """True if no call can go on before the client sends more of it, or reads its response."""
        return not self._is_deferred and super().waits_for_client

    def late_s(self, now_s: float) -> float:
        """Return for how long deferred input has not been read to its end, although the connection had a turn."""
        return now_s - self._deferred_since_s if self._deferred_since_s and self._had_turn else 0.0

    def close_idle(self) -> None:
        """Close this connection, which waits for its client, and release its place at once."""
        self._release()
        self.refuse_streams()

    def check_timeouts(self, now_s: float) -> None:
        """Close or reset whatever makes no progress. Called once a second."""
        if self._is_closed or not self._has_settings:
            return
        if self._is_write_paused:
            if now_s - self._write_paused_s > self._config.timeouts.write_s:
                self.on_abuse(Abuse.WRITE_TIMEOUT)
                self.abort()
        elif self._is_deferred or self.is_backlogged:
            if has_peer_closed(self._transport):  # reading what it sent would be wasted
                self.abort()
            elif self.late_s(now_s) > self._config.timeouts.frame_s:
                message = f"input of this connection could not be read within {self._config.timeouts.frame_s:g} s"
                self.disconnect(Abuse.SLOW_INPUT_TIMEOUT, message)
        elif not self.check_progress(now_s):
            self.abort()

    def abort(self) -> None:
        self._transport.abort()

    # Called by the slow lane.

    def continue_reading(self) -> None:
        """Read deferred input for one slice of time."""
        self._is_deferred = False
        if self._is_write_paused or self._is_closed or self.is_backlogged:
            return
        if not self._is_bulk and len(self._buffer) > LARGE_READ_BYTES and self._server.bulk_lane.is_blocked():
            self._defer_reading()
            return
        now_s = monotonic()
        self._is_in_lane = self._had_turn = True
        self.receive_data(b"", now_s)
        self._is_in_lane = False
        self._slow_since_s, self._slow_until_s = now_s, monotonic()
        self._charge_slow_input()
        if not (self._is_deferred or self._is_closed or self._is_write_paused or self.is_backlogged):
            self._deferred_since_s = 0.0
            self._transport.resume_reading()

    def _defer_reading(self) -> None:
        """Leave the rest of the input to a slow lane, and pause reading until then."""
        if not self._is_deferred and not self._is_closed:
            self._is_deferred = True
            if not self._deferred_since_s:
                self._deferred_since_s, self._had_turn = monotonic(), False
            self._transport.pause_reading()
            self._is_bulk = len(self._buffer) > LARGE_READ_BYTES
            (self._server.bulk_lane if self._is_bulk else self._server.slow_lane).enqueue(self)

    def _charge_slow_input(self) -> float:
        """Add the CPU time of slow input to the connection's, and return it."""
        spent_s = self._slow_until_s - self._slow_since_s
        self.slow_s += spent_s
        self._slow_since_s = 0.0
        return spent_s

    # Hooks of the connection.

    def on_output(self) -> None:
        unflushed = self._server.unflushed
        if unflushed is None:
            self._loop.call_soon(self.flush)
        else:
            unflushed.append(self)

    def on_cancelled(self, stream_id: int) -> bool:
        return self._server.on_cancelled(self, stream_id)

    def on_abuse(self, reason: StrEnum, times: int = 1) -> None:
        self._server.abuse.record(Abuse(reason), self.peer, times)

    def on_buffered(self, more_bytes: int) -> None:
        if self._is_admitted:
            self._server.on_buffered(more_bytes)

    def on_ready(self) -> None:
        self._timers.pop("preface").cancel()

    def on_draining(self) -> None:
        """Close once no stream is open. Polls, because a check after every response would cost more."""
        if not self._streams:
            self._close(None)
        elif not self._is_closed:
            self._timers["done"] = self._loop.call_later(CLOSE_POLL_S, self.on_draining)

    def on_close(self, error: Http2ConnectionError | None) -> None:
        if error is not None:
            _log.debug("grpc_connection_closed", error=str(error), code=error.code.name)
        self.flush()
        self._transport.close()
        self._timers["linger"] = self._loop.call_later(LINGER_S, self.abort)

    def open_stream(self, stream_id: int, headers: CallHeaders) -> StreamingCall | RpcError:
        return self._server.proxy(self, stream_id, headers)

    def begin_slow_input(self) -> bool:
        now_s = monotonic()
        if not (self._is_in_lane or self._server.slow_lane.has_inline_time(now_s)):
            self._defer_reading()
            return False
        self._slow_since_s = self._slow_until_s = now_s
        return True

    def defer_slow_input(self) -> bool:
        self._slow_until_s = monotonic()
        if self._slow_until_s - self._slow_since_s <= SLOW_SLICE_S:
            return False
        self._defer_reading()
        return True

    # Closing.

    def flush(self) -> None:
        """Write what there is to send."""
        data = self._outbound.take()
        if data and not self._transport.is_closing():
            self._transport.write(data)

    def _release(self) -> None:
        """Release what the server counts for this connection."""
        if self._is_admitted:
            self._is_admitted = False
            self._server.on_buffered(-self.buffered_bytes)
            self.buffered_bytes = 0
            self._server.on_connection_lost(self)

    def _on_preface_timeout(self) -> None:
        if self._is_deferred:  # it has sent something, which waits to be read
            self._timers["preface"] = self._loop.call_later(self._config.timeouts.preface_s, self._on_preface_timeout)
            return
        message = f"no connection preface within {self._config.timeouts.preface_s:g} s"
        self.disconnect(Abuse.IDLE_TIMEOUT, message, ErrorCode.SETTINGS_TIMEOUT)

    def _on_max_age(self) -> None:
        self.drain()
        if self._server.max_age_grace_s < inf:
            self._timers["grace"] = self._loop.call_later(self._server.max_age_grace_s, self.close)
