"""The load generator with a pace of its own: calls are due at fixed moments, whatever the answers do.

Open loop: a latency counts from when the call was due, not from when it was sent, so a server that stands still is
charged for every call it kept waiting, and not for the few that were in flight.
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
from bench.connection import FRAME_HEADER_BYTES, MOST_REQUEST_BYTES, Connection, LoadError, Target
from bench.load import STALL_S

LATE_S = 0.001

_HEADER = struct.Struct(">IBI")


@dataclass(frozen=True, slots=True)
class Latencies:
    """How long calls took from when they were due to their answers.

    A call is late when it was sent over 1 ms after it was due and the server had room for it: where that is more than
    a few, the latencies are the load generator's. Waiting for room is the server's doing, and only counts as latency.
    """

    calls: int
    per_s: float  # answered, up to the last answer
    p50_us: float
    p99_us: float
    p99_9_us: float
    max_us: float
    late_share: float


class PacedConnection(Connection):
    """A connection that knows when each of its calls was due and how long after that it was answered."""

    def __init__(self, target: Target) -> None:
        self.latencies_s: list[float] = []
        self._due: dict[int, float] = {}  # of the calls in flight, by stream id
        super().__init__(target)

    @property
    def has_room(self) -> bool:
        """A call given now is sent now and is not more than the server takes."""
        return not self.blocked and self.in_flight < self._most_streams and self._may_send_bytes >= MOST_REQUEST_BYTES

    def ask(self, count: int, calls: Iterator[bytes], due: float = 0.0) -> int:
        """As the parent does, with calls that are all due at one moment, which those that only prime do not have."""
        first = self._stream_id
        asked = super().ask(count, calls)
        for stream_id in range(first, self._stream_id, 2):
            self._due[stream_id] = due
        return asked

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


class Paced:
    def __init__(
        self, target: Target, calls: Sequence[bytes], connections: int = 4, *, some_are_refused: bool = False
    ) -> None:
        self._calls: Iterator[bytes] = cycle(calls)
        self._some_are_refused = some_are_refused
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
        """Send calls at this pace for so long and wait for the last answers."""
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
            # The last call is due one gap before the end, so a load that was kept up ends early.
            per_s=calls / max(took_s, calls / per_s),
            p50_us=percentile(latencies_s, 500) * 1e6,
            p99_us=percentile(latencies_s, 990) * 1e6,
            p99_9_us=percentile(latencies_s, 999) * 1e6,
            max_us=latencies_s[-1] * 1e6,
            late_share=late / calls,
        )

    def _send(self, start: float, per_s: float, calls: int) -> int:
        """Send every call when it is due or can be sent; says how many were sent late though they could be sent."""
        sent = late = 0
        no_room_until = start
        while sent < calls:
            # Those that fall due meanwhile wait for the next round: answers are taken in between, however far behind.
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
        """Take the answers there are by then; without a moment, wait until there are some."""
        now = time.perf_counter()
        wait_s = STALL_S if until is None else min(STALL_S, max(0.0, until - now))
        answered = 0
        # epoll rounds a wait up to a whole millisecond. To ask it again and again until then would be on time, but
        # whoever shares the core, as Redis does, would wait for its turn with every call.
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
        refused = sum(connection.refused for connection in self._connections.values())
        if refused and not self._some_are_refused:
            raise LoadError(f"{refused} of {answered} calls were not answered OK")


def percentile(ordered: Sequence[float], per_mille: int) -> float:
    """The smallest value that so many thousandths of all do not exceed."""
    return ordered[-(-len(ordered) * per_mille // 1000) - 1]
