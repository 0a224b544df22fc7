"""`python -m tests.hostile.well_behaved_client`: a well-behaved client in its own process, which measures its waits.

Calls are due at fixed times, regardless of the responses, and a wait counts from the time when its call was due. Every
second, one of its connections is replaced by a new one. It runs in a separate process, because attackers in the same
interpreter would distort the measurement. Each line on its standard input requests a report: one line of JSON about
everything since the previous report.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import socket
import subprocess
import sys
import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Self

from bench import wire
from bench.connection import LoadError, Target
from bench.latency import TimedConnection, percentile
from tests.hostile.attacks import HIT

PER_S = 200.0
CONNECTIONS = 4
RENEW_S = 1.0
GIVE_UP_S = 30.0
"""Time after which a call without a response fails, together with its connection."""

SAMPLES = 50_000
"""Minimum number of starvation samples that are kept: more than GIVE_UP_S needs."""

_CALL = wire.data(HIT)


@dataclass(frozen=True, slots=True)
class Waits:
    """Waits of calls, in milliseconds."""

    calls: int
    failed: int
    p50_ms: float
    p95_ms: float
    p99_ms: float
    p99_9_ms: float
    longest_ms: float
    fair_p50_ms: float
    fair_p95_ms: float
    fair_p99_ms: float
    fair_p99_9_ms: float
    longest_fair_ms: float
    """Fair waits exclude the time in which the server or this client was runnable without a core."""

    faults: tuple[str, ...]
    """The first few errors of failed calls."""


@dataclass(frozen=True, slots=True)
class _From(Target):
    source: str = "127.0.0.1"

    def connect(self) -> socket.socket:
        assert isinstance(self.address, tuple)
        plain = socket.create_connection(self.address, timeout=10, source_address=(self.source, 0))
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return plain


class _Connection(TimedConnection):
    """Connection that sends its first call together with the preface."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.socket.setblocking(False)

    def call(self, due_s: float) -> None:
        self.send_calls(1, iter([_CALL]), due_s)

    @property
    def oldest_due_s(self) -> float:
        return next(iter(self._due.values()), time.perf_counter())


class _Starvation:
    """Time in which main threads were runnable without a core, sampled with every call."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._paths = [f"/proc/{pid}/task/{pid}/schedstat" for pid in pids]
        self._at_s: list[float] = []
        self._waited_s: list[float] = []

    def sample(self, now_s: float) -> None:
        waited_ns = 0
        for path in self._paths:
            with open(path) as stat:
                waited_ns += int(stat.read().split()[1])
        self._at_s.append(now_s)
        self._waited_s.append(waited_ns / 1e9)
        if len(self._at_s) > 2 * SAMPLES:
            del self._at_s[:SAMPLES], self._waited_s[:SAMPLES]

    def between_s(self, since_s: float, until_s: float) -> float:
        first = max(0, bisect_right(self._at_s, since_s) - 1)
        last = min(len(self._at_s) - 1, bisect_left(self._at_s, until_s))
        return self._waited_s[last] - self._waited_s[first]


@dataclass(slots=True)
class _Seen:
    waits_s: list[float] = field(default_factory=list)
    fair_s: list[float] = field(default_factory=list)
    longest_s: float = 0.0
    longest_fair_s: float = 0.0
    failed: int = 0
    faults: list[str] = field(default_factory=list)

    def fail(self, count: int, fault: str) -> None:
        self.failed += count
        if len(self.faults) < 3:
            self.faults.append(fault)

    def report(self) -> Waits:
        p50, p95, p99, p99_9 = _percentiles_ms(self.waits_s)
        fair_p50, fair_p95, fair_p99, fair_p99_9 = _percentiles_ms(self.fair_s)
        return Waits(
            calls=len(self.waits_s),
            failed=self.failed,
            p50_ms=p50,
            p95_ms=p95,
            p99_ms=p99,
            p99_9_ms=p99_9,
            longest_ms=self.longest_s * 1e3,
            fair_p50_ms=fair_p50,
            fair_p95_ms=fair_p95,
            fair_p99_ms=fair_p99,
            fair_p99_9_ms=fair_p99_9,
            longest_fair_ms=self.longest_fair_s * 1e3,
            faults=tuple(self.faults),
        )


def _percentiles_ms(waits_s: list[float]) -> tuple[float, float, float, float]:
    ordered = sorted(waits_s) or [0.0]
    p50, p95, p99, p99_9 = (percentile(ordered, per_mille) * 1e3 for per_mille in (500, 950, 990, 999))
    return p50, p95, p99, p99_9


class Calls:
    """Main loop of the process."""

    def __init__(self, target: Target, per_s: float, connections: int, starvation: _Starvation) -> None:
        self._target = target
        self._per_s = per_s
        self._starvation = starvation
        self._poll = select.epoll()
        self._connections: deque[_Connection] = deque()
        self._leaving: list[_Connection] = []
        self._wanted = connections
        self._renewed_s = time.perf_counter()
        self._seen = _Seen()

    def run(self) -> None:
        self._poll.register(sys.stdin.fileno(), select.EPOLLIN)
        begun_s = time.perf_counter()
        sent = 0
        while True:
            self._connect()
            now_s = time.perf_counter()
            self._starvation.sample(now_s)
            while (due_s := begun_s + sent / self._per_s) <= now_s:
                self._send(due_s)
                sent += 1
            # epoll would round the timeout up to a whole millisecond.
            select.select([self._poll], [], [], max(0.0, due_s - time.perf_counter()))
            for number, _ in self._poll.poll(0):
                if number == sys.stdin.fileno():
                    if not self._report():
                        return
                else:
                    self._receive(number)
            self._look_after()

    def _connect(self) -> None:
        while len(self._connections) < self._wanted:
            try:
                connection = _Connection(self._target)
            except OSError as error:
                self._seen.fail(1, f"no connection: {error}")
                return
            self._connections.append(connection)
            self._poll.register(connection.socket.fileno(), select.EPOLLIN)

    def _send(self, due_s: float) -> None:
        self._connections.rotate()
        connection = next((one for one in self._connections if one.can_send), None)
        if connection is None:
            self._seen.fail(1, "no connection has room for a call")
            return
        try:
            connection.call(due_s)
        except OSError as error:
            self._drop(connection, str(error))

    def _receive(self, number: int) -> None:
        connection = next(one for one in (*self._connections, *self._leaving) if one.socket.fileno() == number)
        try:
            connection.receive()
        except (LoadError, OSError) as error:
            self._drop(connection, str(error))
            return
        if connection.denied:
            self._seen.fail(connection.denied, "a call was denied")
            connection.denied = 0
        if connection.latencies_s:
            now_s = time.perf_counter()
            self._starvation.sample(now_s)
            for wait_s in connection.latencies_s:
                self._seen.fair_s.append(self._note_longest(now_s, wait_s))
            self._seen.waits_s += connection.latencies_s
            connection.latencies_s.clear()

    def _note_longest(self, now_s: float, wait_s: float) -> float:
        """Record a wait, also of calls that still wait. Return the fair wait."""
        seen = self._seen
        fair_s = max(0.0, wait_s - self._starvation.between_s(now_s - wait_s, now_s))
        seen.longest_s = max(seen.longest_s, wait_s)
        seen.longest_fair_s = max(seen.longest_fair_s, fair_s)
        return fair_s

    def _look_after(self) -> None:
        now_s = time.perf_counter()
        for connection in [*self._connections, *self._leaving]:
            if now_s - connection.oldest_due_s > GIVE_UP_S:
                self._drop(connection, f"no answer for {GIVE_UP_S:g} s")
        if now_s - self._renewed_s > RENEW_S and self._connections:
            self._renewed_s = now_s
            self._leaving.append(self._connections.popleft())
        for connection in [one for one in self._leaving if not one.in_flight]:
            self._forget(connection)

    def _drop(self, connection: _Connection, fault: str) -> None:
        self._seen.fail(max(1, connection.in_flight), fault)
        self._forget(connection)

    def _forget(self, connection: _Connection) -> None:
        (self._leaving if connection in self._leaving else self._connections).remove(connection)
        self._poll.unregister(connection.socket.fileno())
        connection.close()

    def _report(self) -> bool:
        """Send a report. Return whether there will be more."""
        lines = os.read(sys.stdin.fileno(), 4096)
        if lines:
            now_s = time.perf_counter()
            for connection in (*self._connections, *self._leaving):
                self._note_longest(now_s, now_s - connection.oldest_due_s)
            print(json.dumps(asdict(self._seen.report())), flush=True)
            self._seen = _Seen()
        return bool(lines)


class WellBehavedClient:
    """Handle of the process in its parent."""

    def __init__(
        self,
        port: int,
        server_pid: int,
        *,
        per_s: float = PER_S,
        connections: int = CONNECTIONS,
        source: str = "127.0.0.1",
        core: int | None = None,
    ) -> None:
        command = [
            sys.executable,
            "-m",
            "tests.hostile.well_behaved_client",
            f"--port={port}",
            f"--server={server_pid}",
        ]
        command += [f"--per-s={per_s}", f"--connections={connections}", f"--source={source}"]
        if core is not None:
            command.append(f"--core={core}")
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._requests, self._reports = self._child.stdin, self._child.stdout
        self.pid = self._child.pid

    def report(self) -> Waits:
        """Return the results since the last report."""
        self._requests.write("report\n")
        line = self._reports.readline()
        assert line, f"the well-behaved client died with {self._child.wait()}"
        reported = json.loads(line)
        return Waits(**{**reported, "faults": tuple(reported["faults"])})

    def close(self) -> None:
        self._requests.close()
        self._reports.close()
        self._child.kill()
        self._child.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile.well_behaved_client", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--server", type=int, required=True, help="its process id")
    parser.add_argument("--per-s", type=float, default=PER_S)
    parser.add_argument("--connections", type=int, default=CONNECTIONS)
    parser.add_argument("--source", default="127.0.0.1", help="the address that it calls from")
    parser.add_argument("--core", type=int, help="the only one that it may use")
    chosen = parser.parse_args(arguments)
    if chosen.core is not None:
        os.sched_setaffinity(0, {chosen.core})
    target = _From(("127.0.0.1", chosen.port), source=chosen.source)
    starvation = _Starvation([chosen.server, os.getpid()])
    Calls(target, chosen.per_s, chosen.connections, starvation).run()


if __name__ == "__main__":
    main()
