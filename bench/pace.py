"""Open-loop load generator: calls are due at fixed times, independent of responses.

Latency is measured from when a call was due, not from when it was sent, so that a stalled server is charged for every
call it delayed, not only for the few in flight.
"""

from __future__ import annotations

import select
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from types import TracebackType
from typing import Self

from bench import wire
from bench.connection import FRAME_HEADER_BYTES, MAX_REQUEST_BYTES, Connection, LoadError, Target
from bench.load import STALL_S

LATE_S = 0.001

_HEADER = struct.Struct(">IBI")


@dataclass(frozen=True, slots=True)
class Latencies:
    """Latencies of calls, from their due time to the response.

    A call is late if it was sent more than 1 ms after it was due although the server could accept it: if there are more
    than a few, the latencies are those of the load generator. Waiting for the server to accept calls counts as latency.
    """

    calls: int
    per_s: float  # responses per second, up to the last one
    p50_us: float
    p99_us: float
    p99_9_us: float
    max_us: float
    late_share: float


class PacedConnection(Connection):
    """Connection that records the due time and the latency of each call."""

    def __init__(self, target: Target) -> None:
        self.latencies_s: list[float] = []
        self._due: dict[int, float] = {}  # due times of the calls in flight, by stream id
        super().__init__(target)

    @property
    def has_room(self) -> bool:
        """True if a call can be sent now and the server accepts it."""
        return not self.blocked and self.in_flight < self._most_streams and self._may_send_bytes >= MAX_REQUEST_BYTES

    def ask(self, count: int, calls: Iterator[bytes], due: float = 0.0) -> int:
        """Send calls that are due at the same time; priming calls have no due time."""
        first = self._stream_id
        requested = super().ask(count, calls)
        for stream_id in range(first, self._stream_id, 2):
            self._due[stream_id] = due
        return requested

    def _take(self, buffer: bytes) -> int:
        now = time.perf_counter()
        at, end = 0, len(buffer)
        while end - at >= FRAME_HEADER_BYTES:
            word, flags, stream_id = _HEADER.unpack_from(buffer, at)
            at += FRAME_HEADER_BYTES + (word >> 8)
            if word & 0xFF == wire.HEADERS and flags & wire.END_STREAM and at <= end:
                due = self._due.pop(stream_id, None)
                if due is None:
                    raise LoadError(f"the server answered call {stream_id}, which was not in flight")
                self.latencies_s.append(now - due)
        return super()._take(buffer)


class PacedLoad:
    def __init__(
        self, target: Target, calls: Sequence[bytes], connections: int = 4, *, some_are_denied: bool = False
    ) -> None:
        self._calls: Iterator[bytes] = cycle(calls)
        self._some_are_denied = some_are_denied
        self._poll = select.epoll()
        self._connections: dict[int, PacedConnection] = {}
        self._quiet_since = 0.0
        for _ in range(connections):
            connection = PacedConnection(target)
            connection.prime(self._calls, 1)
            self._connections[connection.socket.fileno()] = connection
            self._poll.register(connection.socket.fileno(), select.EPOLLIN)
        self._next = cycle(self._connections.values())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for connection in self._connections.values():
            connection.close()
        self._poll.close()

    def run(self, per_s: float, seconds: float) -> Latencies:
        """Send calls at this rate for the given time, and wait for the last responses."""
        calls = max(1, round(per_s * seconds))
        for connection in self._connections.values():
            connection.latencies_s.clear()
        start = self._quiet_since = time.perf_counter()
        try:
            late = self._send(start, per_s, calls)
            while self._in_flight():
                self._turn()
        except OSError as error:
            raise LoadError(f"a connection broke with {self._in_flight()} calls in flight: {error}") from error
        took_s = time.perf_counter() - start
        self._check()
        latencies_s = sorted(took for connection in self._connections.values() for took in connection.latencies_s)
        if len(latencies_s) != calls:
            raise LoadError(f"{calls} calls, {len(latencies_s)} answers")
        return Latencies(
            calls=calls,
            # The last call is due one interval before the end, so an unhindered load ends early.
            per_s=calls / max(took_s, calls / per_s),
            p50_us=percentile(latencies_s, 500) * 1e6,
            p99_us=percentile(latencies_s, 990) * 1e6,
            p99_9_us=percentile(latencies_s, 999) * 1e6,
            max_us=latencies_s[-1] * 1e6,
            late_share=late / calls,
        )

    def _send(self, start: float, per_s: float, calls: int) -> int:
        """Send every call when it is due and can be sent; return how many were late although they could be sent."""
        sent = late = 0
        no_room_until = start
        while sent < calls:
            # Calls that become due meanwhile wait for the next iteration: responses are received in between.
            now = time.perf_counter()
            while sent < calls and (due := start + sent / per_s) <= now:
                connection = self._with_room()
                if connection is None:
                    self._turn()
                    no_room_until = time.perf_counter()
                    break
                connection.ask(1, self._calls, due)
                connection.watch_for_room(self._poll)
                late += time.perf_counter() - max(due, no_room_until) > LATE_S
                sent += 1
            else:
                self._turn(until=start + sent / per_s)
        return late

    def _with_room(self) -> PacedConnection | None:
        for _ in self._connections:
            connection = next(self._next)
            if connection.has_room:
                return connection
        return None

    def _turn(self, until: float | None = None) -> None:
        """Receive responses until a time; without one, wait for the first."""
        now = time.perf_counter()
        wait_s = STALL_S if until is None else min(STALL_S, max(0.0, until - now))
        answered = 0
        # epoll rounds waits up to a whole millisecond. Busy polling would be on time, but would take the core from
        # other processes on it, such as Redis.
        select.select([self._poll], [], [], wait_s)
        for fd, _ in self._poll.poll(0):
            connection = self._connections[fd]
            answered += connection.receive()
            if connection.blocked:
                connection.ask(0, self._calls)
            connection.watch_for_room(self._poll)
        now = time.perf_counter()
        if answered or (until is not None and not self._in_flight()):
            self._quiet_since = now
        elif now - self._quiet_since > STALL_S:
            raise LoadError(f"no answer for {STALL_S:g} s with {self._in_flight()} calls in flight")

    def _in_flight(self) -> int:
        return sum(connection.in_flight for connection in self._connections.values())

    def _check(self) -> None:
        answered = sum(connection.answered for connection in self._connections.values())
        denied = sum(connection.denied for connection in self._connections.values())
        if denied and not self._some_are_denied:
            raise LoadError(f"{denied} of {answered} calls were not answered OK")


def percentile(ordered: Sequence[float], per_mille: int) -> float:
    """Return the smallest value that `per_mille` thousandths of all values do not exceed."""
    return ordered[-(-len(ordered) * per_mille // 1000) - 1]
