"""Open-loop load generator: calls are due at fixed times, independent of responses.

Latency is measured from when a call was due, not from when it was sent, so that a stalled server is charged for every
call it delayed, not only for the few in flight.
"""

from __future__ import annotations

import select
import time
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from types import TracebackType
from typing import Self

from bench.connection import LoadError, Target
from bench.latency import Latencies, TimedConnection
from bench.load import SAMPLES, STALL_S, Tally, each_of

LATE_S = 0.001


class PacedLoad:
    def __init__(
        self,
        targets: Target | Sequence[Target],
        calls: Sequence[bytes] | Iterator[bytes],
        connections: int = 4,
        *,
        some_are_denied: bool = False,
    ) -> None:
        """Connect. A sequence of calls is repeated; an iterator must be infinite.

        The connections are distributed evenly over the targets.
        """
        self._calls = calls if isinstance(calls, Iterator) else cycle(calls)
        self._some_are_denied = some_are_denied
        self._poll = select.epoll()
        self._connections: dict[int, TimedConnection] = {}
        self._quiet_since = 0.0
        for target in islice(cycle(each_of(targets)), connections):
            connection = TimedConnection(target)
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

    @property
    def samples(self) -> list[bytes]:
        """Return the messages of a few responses."""
        return [message for connection in self._connections.values() for message in connection.samples]

    @property
    def answered(self) -> int:
        """Return the total number of responses."""
        return sum(connection.answered for connection in self._connections.values())

    def tally(self, per_s: float, seconds: float) -> Tally:
        """Send calls like `run`; also return how many responses were read at once."""
        for connection in self._connections.values():
            connection.wants_samples = SAMPLES
        reads_before, start = self._reads(), time.perf_counter()
        latencies = self.run(per_s, seconds)
        took_s = time.perf_counter() - start
        denied = sum(connection.denied for connection in self._connections.values())
        return Tally(latencies.calls, took_s, self._reads() - reads_before, denied, latencies)

    def _reads(self) -> int:
        return sum(connection.reads for connection in self._connections.values())

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
        latencies_s = [took for connection in self._connections.values() for took in connection.latencies_s]
        if len(latencies_s) != calls:
            raise LoadError(f"{calls} calls, {len(latencies_s)} answers")
        # The last call is due one interval before the end, so an unhindered load ends early.
        return Latencies.of(latencies_s, calls / max(took_s, calls / per_s), late / calls)

    def _send(self, start: float, per_s: float, calls: int) -> int:
        """Send every call when it is due and can be sent; return how many were late although they could be sent."""
        sent = late = 0
        blocked_until = start
        while sent < calls:
            # Calls that become due meanwhile wait for the next iteration: responses are received in between.
            now = time.perf_counter()
            while sent < calls and (due := start + sent / per_s) <= now:
                connection = self._sendable()
                if connection is None:
                    self._turn()
                    blocked_until = time.perf_counter()
                    break
                connection.send_calls(1, self._calls, due)
                connection.watch_writability(self._poll)
                late += time.perf_counter() - max(due, blocked_until) > LATE_S
                sent += 1
            else:
                self._turn(until=start + sent / per_s)
        return late

    def _sendable(self) -> TimedConnection | None:
        for _ in self._connections:
            connection = next(self._next)
            if connection.can_send:
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
                connection.send_calls(0, self._calls)
            connection.watch_writability(self._poll)
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
