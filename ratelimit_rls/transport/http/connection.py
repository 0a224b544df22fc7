"""Connection of an HTTP port: uvicorn's h11 protocol with limits on time, bytes and number of connections.

    HEAD ──► BODY ──► RESPONSE ──► HEAD …           each phase has a time limit
               └────► DRAIN ─────► HEAD …           the response was sent before the end of the body
                                                    ENDED: rejected, or about to be closed

The server checks every connection once a tick. On the request path, only bytes are counted.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto
from itertools import islice
from random import randrange
from typing import TYPE_CHECKING, cast

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from ratelimit_rls.telemetry.abuse import Abuse, AbuseLog
from ratelimit_rls.transport.http.limits import (
    FREE_BYTES,
    MAX_COMPARED_CONNECTIONS,
    MAX_DRAINED_BYTES,
    MAX_REJECTED_CONNECTIONS,
    BufferBudget,
    HttpLimits,
)
from ratelimit_rls.transport.http.loop_share import BYTES_PER_READ, LoopShare
from ratelimit_rls.transport.http.parser import RequestParser
from ratelimit_rls.transport.peers import ConnectionLimits, peer_address, peer_group

if TYPE_CHECKING:
    import uvicorn
    from uvicorn.server import ServerState

CLIENT_CERTIFICATE = "client_certificate"
"""Key in the state of a request: True if its client presented an accepted certificate."""

_logger = logging.getLogger("uvicorn.error.connection")
_logger.setLevel(logging.ERROR)  # a warning for every malformed request could fill the disk; AbuseLog counts them

_TOO_MANY_CONNECTIONS = "this port has too many connections; try again later\n"
_BUFFERS_FULL = "the server has too many unfinished requests; try again later\n"
_TIMED_OUT = "the request took too long to arrive\n"


class Phase(Enum):
    """Phase of a connection; see the diagram above."""

    HEAD = auto()
    BODY = auto()
    DRAIN = auto()
    RESPONSE = auto()
    ENDED = auto()


class Eviction(IntEnum):
    """Order in which connections are closed to admit new ones; the lowest first."""

    ENDED = auto()  # the last response was sent
    IDLE = auto()  # no byte of a request has arrived
    HEAD = auto()  # unfinished request head
    BODY = auto()  # unfinished request body
    RECENT = auto()  # in its phase for less than a tick: the request of a new connection may be in transit


@dataclass(slots=True)
class HttpPort:
    """State shared by all connections of one port."""

    limits: HttpLimits
    abuse: AbuseLog
    buffer_budget: BufferBudget
    share: LoopShare
    admitted: ConnectionLimits = field(init=False)
    rejected: int = 0  # rejected connections that are still open

    def __post_init__(self) -> None:
        self.admitted = ConnectionLimits(self.limits.max_connections, self.limits.max_connections_per_peer)


class HttpConnection(H11Protocol):
    """One client connection."""

    def __init__(self, config: uvicorn.Config, server_state: ServerState, port: HttpPort) -> None:
        super().__init__(config, server_state, {})
        self.conn: RequestParser = RequestParser()
        self.logger = _logger
        self._port = port
        self._peer = self._peer_group = ""
        self._is_admitted = self._is_rejected = self._has_ended = self._is_queued = False
        self._buffered = 0  # bytes, including FREE_BYTES
        self._read = 0  # bytes in total
        self._drained = 0  # bytes of a body whose response was sent
        # As of the last tick:
        self._step: tuple[Phase, int] | None = None  # phase and number of the request
        self._step_s = self._progress_s = self._tick_s = 0.0
        self._progress = 0  # bytes received, or bytes not sent yet

    # Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast("asyncio.Transport", transport))  # uvloop's are not instances of it
        self._peer = peer_address(transport)
        self._peer_group = peer_group(self._peer)
        self._progress_s = self.loop.time()
        if transport.get_extra_info("peercert"):
            self.app_state = {CLIENT_CERTIFICATE: True}
        reason = self._admit()
        if reason is not None:
            self._reject_connection(reason)

    def connection_lost(self, exc: Exception | None) -> None:
        self._release()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def data_received(self, data: bytes) -> None:
        size = len(data)
        self._read += size
        if self._has_ended:
            self._drain(size)
            return
        if self.conn.their_state is h11.SEND_BODY and self.cycle.response_complete:
            self._drain(size)
        if not self._buffer(size):
            self._end(503, _BUFFERS_FULL, Abuse.UNFINISHED_BYTES)
            return
        super().data_received(data)

    # Called by uvicorn

    def handle_events(self) -> None:
        """Process received data now, or defer it if the event loop's share for HTTP is used up."""
        if self._is_queued:
            return
        if self._port.share.take(self._reads()):
            self._handle_now()
            return
        self._is_queued = True
        self.flow.pause_reading()
        self._port.share.wait(self)

    def _handle_now(self) -> None:
        super().handle_events()
        if self._buffered and (self.cycle is None or self.cycle.response_complete):
            self._recount_buffered()

    def send_400_response(self, msg: str) -> None:
        """Send an error response that, unlike uvicorn's, says what was wrong."""
        error = self.conn.error
        status = error.error_status_hint if error is not None else 400
        self._end(status, f"not a valid HTTP request: {error or msg}\n", Abuse.MALFORMED_REQUEST)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._buffered:
            self._recount_buffered()

    def shutdown(self) -> None:
        if self._has_ended:
            self.abort()
        else:
            super().shutdown()

    # Called by LoopShare

    def continue_reading(self) -> int:
        self._is_queued = False
        if self._has_ended or self.transport.is_closing():
            return 0
        reads = self._reads()
        self.flow.resume_reading()
        self._handle_now()
        return reads

    def _reads(self) -> int:
        return 1 + self._buffered // BYTES_PER_READ

    # Called by the server

    def tick(self, now_s: float) -> None:
        """Enforce the time limits. Called once a tick."""
        phase = self._phase()
        step = phase, self.conn.requests
        unsent = self.transport.get_write_buffer_size()
        progress = unsent if phase in (Phase.RESPONSE, Phase.ENDED) else self._read
        if step != self._step:
            self._step, self._step_s, self._progress_s = step, now_s, now_s
        elif progress != self._progress:
            self._progress_s = now_s
        elif self.flow.read_paused and phase in (Phase.HEAD, Phase.BODY):  # reading is paused on our side
            self._progress_s += now_s - self._tick_s
            self._step_s += now_s - self._tick_s
        self._progress, self._tick_s = progress, now_s
        self._enforce(phase, now_s - self._step_s, now_s - self._progress_s, has_unsent=unsent > 0)

    # Called by a new connection when a limit is reached

    def eviction_order(self) -> tuple[Eviction, int, float] | None:
        """Sort key for eviction, lowest first; None if the connection must stay open.

        Among equal kinds, the peer with the most connections loses the one that made no progress for longest.
        """
        eviction = self._eviction()
        if eviction is None:
            return None
        return eviction, -self._port.admitted.count(self._peer_group), self._progress_s

    def _eviction(self) -> Eviction | None:
        phase = self._phase()
        if not self._is_admitted or phase is Phase.RESPONSE:
            return None
        if phase is Phase.ENDED:
            return Eviction.ENDED if not self.transport.get_write_buffer_size() else None
        if self._step != (phase, self.conn.requests):
            return Eviction.RECENT
        if phase is not Phase.HEAD:
            return Eviction.BODY
        return Eviction.HEAD if self._buffered else Eviction.IDLE

    def evict(self, reason: Abuse) -> None:
        self._port.abuse.record(reason, self._peer)
        self.abort()

    def abort(self) -> None:
        self._has_ended = True
        self._release()
        self.transport.abort()

    # Phases

    def _phase(self) -> Phase:
        if self._has_ended or self.transport.is_closing():
            return Phase.ENDED
        if self.conn.their_state is h11.SEND_BODY:
            return Phase.DRAIN if self.cycle.response_complete else Phase.BODY
        return Phase.HEAD if self.conn.their_state is h11.IDLE else Phase.RESPONSE

    def _enforce(self, phase: Phase, lasted_s: float, idle_s: float, *, has_unsent: bool) -> None:
        limits = self._port.limits
        match phase:
            case Phase.ENDED if lasted_s >= limits.linger_s and not has_unsent:
                self.abort()
            case Phase.ENDED | Phase.RESPONSE if has_unsent and idle_s >= limits.write_stall_s:
                self._port.abuse.record(Abuse.HTTP_TIMEOUT, self._peer)
                self.abort()
            case Phase.HEAD if lasted_s >= limits.head_s and not self._read:
                self._port.abuse.record(Abuse.IDLE_TIMEOUT, self._peer)
                self.transport.close()
            case Phase.HEAD if lasted_s >= limits.head_s:
                self._end(408, _TIMED_OUT, Abuse.HTTP_TIMEOUT)
            case Phase.DRAIN if lasted_s >= limits.drain_s:
                self._end(408, _TIMED_OUT, Abuse.HTTP_TIMEOUT)
            case Phase.BODY if idle_s >= limits.body_idle_s or lasted_s >= limits.body_s:
                self._end(408, _TIMED_OUT, Abuse.HTTP_TIMEOUT)

    # Limits

    def _admit(self) -> Abuse | None:
        admitted = self._port.admitted
        reason = admitted.admit(self._peer)
        if reason is not None and self._evict_another(reason):
            reason = admitted.admit(self._peer)
        self._is_admitted = reason is None
        return reason

    def _evict_another(self, reason: Abuse) -> bool:
        others = [one for one in self.connections if isinstance(one, HttpConnection)]
        if reason is Abuse.TOO_MANY_CONNECTIONS_OF_PEER:
            others = [one for one in others if one._peer_group == self._peer_group]
        chosen = _select_for_eviction(others)
        if chosen is not None:
            chosen.evict(reason)
        return chosen is not None

    def _reject_connection(self, reason: Abuse) -> None:
        if self._port.rejected >= MAX_REJECTED_CONNECTIONS:
            self._port.abuse.record(reason, self._peer)
            self.abort()
            return
        self._port.rejected += 1
        self._is_rejected = True
        self._end(503, _TOO_MANY_CONNECTIONS, reason)

    def _release(self) -> None:
        if self._is_admitted:
            self._is_admitted = False
            self._port.admitted.release(self._peer)
        if self._is_rejected:
            self._is_rejected = False
            self._port.rejected -= 1
        self._keep_buffered(0)

    def _buffer(self, size: int) -> bool:
        charged = max(0, self._buffered + size - FREE_BYTES) - max(0, self._buffered - FREE_BYTES)
        if charged and not self._port.buffer_budget.take(charged):
            return False
        self._buffered += size
        return True

    def _keep_buffered(self, size: int) -> None:
        self._port.buffer_budget.give_back(max(0, self._buffered - FREE_BYTES) - max(0, size - FREE_BYTES))
        self._buffered = size

    def _recount_buffered(self) -> None:
        """Stop counting answered requests. Pipelined requests and unfinished heads remain buffered."""
        if self.conn.their_state is not h11.SEND_BODY:
            self._drained = 0
        unread, _ = self.conn.trailing_data
        taken = len(self.cycle.body) if self.cycle is not None and not self.cycle.response_complete else 0
        self._keep_buffered(min(self._buffered, len(unread) + taken))

    def _drain(self, size: int) -> None:
        self._drained += size
        if self._drained > MAX_DRAINED_BYTES:
            self.abort()

    # Endings

    def _end(self, status: int, text: str, reason: Abuse) -> None:
        self._port.abuse.record(reason, self._peer)
        self._respond_and_end(status, text)

    def _respond_and_end(self, status: int, text: str) -> None:
        """Send a response, if that is still possible, and close after the client had time to read it."""
        self._has_ended = True
        self._unset_keepalive_if_required()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(_encode_response(status, text))
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._keep_buffered(0)
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:  # TLS connections cannot be half-closed
            self.transport.close()


def _select_for_eviction(connections: list[HttpConnection]) -> HttpConnection | None:
    """Return the first of MAX_COMPARED_CONNECTIONS connections, starting at a random position.

    Comparing all of them would cost a millisecond for each new connection.
    """
    start = randrange(len(connections))
    rotated = (connections[index - start] for index in range(len(connections)))
    ordered = ((order, one) for one in rotated if (order := one.eviction_order()) is not None)
    first = min(islice(ordered, MAX_COMPARED_CONNECTIONS), key=lambda pair: pair[0], default=None)
    return first[1] if first is not None else None


def _encode_response(status: int, text: str) -> bytes:
    body = text.encode()
    head = [
        b"HTTP/1.1 %d %s" % (status, STATUS_PHRASES[status]),
        b"Content-Type: text/plain; charset=utf-8",
        b"Content-Length: %d" % len(body),
        b"Connection: close",
    ]
    return b"\r\n".join([*head, b"", body])
