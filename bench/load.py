"""Closed-loop load generator: a fixed number of calls in flight over a few connections, with prebuilt requests.

Each response is followed by the next request. It counts requests and responses, and raises an error instead of
returning figures if a call failed, was denied or got lost.
"""

from __future__ import annotations

import select
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from types import TracebackType
from typing import Self

from bench.connection import Connection, LoadError, Target
from bench.latency import Latencies, TimedConnection

STALL_S = 10.0
SAMPLES = 2  # per connection and run: taken under load, decoded afterwards


@dataclass(frozen=True, slots=True)
class Tally:
    """Result of a period of load."""

    calls: int
    seconds: float
    reads: int
    denied: int
    latencies: Latencies | None = None  # of a load that measures them


class Load:
    def __init__(
        self,
        targets: Target | Sequence[Target],
        calls: Sequence[bytes] | Iterator[bytes],
        in_flight: int = 128,
        connections: int = 4,
        *,
        some_are_denied: bool = False,
        timed: bool = False,
    ) -> None:
        """Connect. A sequence of calls is repeated; an iterator must be infinite.

        The connections are distributed evenly over the targets, and the calls in flight over the connections. `timed`:
        measure latencies, at the cost of some CPU of the load.
        """
        self._calls = calls if isinstance(calls, Iterator) else cycle(calls)
        self._some_are_denied = some_are_denied
        self._each = max(1, in_flight // connections)
        self._poll = select.epoll()
        self._connections: dict[int, Connection] = {}
        self._answered = self._sent = 0
        for target in islice(cycle(each_of(targets)), connections):
            connection = TimedConnection(target) if timed else Connection(target)
            connection.prime(self._calls, self._each)
            self._answered += connection.answered
            self._sent += connection.sent
            self._connections[connection.socket.fileno()] = connection
            self._poll.register(connection.socket.fileno(), select.EPOLLIN)

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

    def run(self, seconds: float, at_least_calls: int = 0) -> Tally:
        """Run for at least the given time and number of calls; the last ones are still in flight afterwards."""
        start = time.perf_counter()
        before, reads_before, denied_before = self._answered, self._reads(), self._denied()
        for connection in self._connections.values():
            connection.wants_samples = SAMPLES
            if isinstance(connection, TimedConnection):
                connection.latencies_s.clear()
            self._top_up(connection)
        while (now := time.perf_counter()) - start < seconds or self._answered - before < at_least_calls:
            self._turn()
        reads, denied = self._reads() - reads_before, self._denied() - denied_before
        calls, seconds = self._answered - before, now - start
        return Tally(calls, seconds, reads, denied, self._latencies(calls / seconds))

    def drain(self) -> int:
        """Wait for the last responses; return the total number of responses, all of which were acceptable."""
        self._each = 0
        while self._answered < self._sent:
            self._turn()
        for connection in self._connections.values():
            if connection.denied and not self._some_are_denied:
                raise LoadError(f"{connection.denied} of {connection.answered} calls were not answered OK")
            if connection.sent != connection.answered:
                raise LoadError(f"{connection.sent} calls, {connection.answered} answers on one connection")
        return self._answered

    def _turn(self) -> None:
        events = self._poll.poll(STALL_S)
        if not events:
            raise LoadError(f"no answer for {STALL_S:g} s with {self._sent - self._answered} calls in flight")
        for fd, _ in events:
            connection = self._connections[fd]
            self._answered += connection.receive()
            self._top_up(connection)

    def _top_up(self, connection: Connection) -> None:
        self._sent += connection.send_calls(self._each - connection.in_flight, self._calls)
        connection.watch_writability(self._poll)

    def _reads(self) -> int:
        return sum(connection.reads for connection in self._connections.values())

    def _denied(self) -> int:
        return sum(connection.denied for connection in self._connections.values())

    def _latencies(self, per_s: float) -> Latencies | None:
        timed = [one for one in self._connections.values() if isinstance(one, TimedConnection)]
        latencies_s = [took_s for connection in timed for took_s in connection.latencies_s]
        return Latencies.of(latencies_s, per_s) if latencies_s else None


def each_of(targets: Target | Sequence[Target]) -> Sequence[Target]:
    """Return one or several targets as a sequence."""
    return (targets,) if isinstance(targets, Target) else targets
