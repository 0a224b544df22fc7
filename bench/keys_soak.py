"""`python -m bench.keys_soak`: Redis memory of a million callers for every kind of state, and its expiry.

Every kind has its own new server. Calls are planned with real rules and decided by the store of the service; the growth
of `used_memory` is divided by their number. Then there are no more calls, and the server must be empty soon after the
last state was due to expire.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from threading import Lock
from typing import NamedTuple

from ratelimit_rls.core.model import Descriptor, Entry, Plan, Request
from ratelimit_rls.core.plan import Planner, Policy
from ratelimit_rls.rules.compile import compile_documents
from ratelimit_rls.settings.redis_address import RedisAddress, RedisServers
from ratelimit_rls.store.redis.factory import redis_store
from ratelimit_rls.store.redis.script_node import RedisOptions
from ratelimit_rls.store.redis.store import layout
from ratelimit_rls.store.script_codec import make_idempotency_key
from tests.support.servers import RedisServer, redis_binaries

CALLERS = 1_000_000
SERVERS = ("redis-6.2", "valkey-9")
CALLS_PER_SECOND = 8_000
"""Minimum rate on a busy machine: the window must not end before all calls were made."""

MIN_WINDOW_S = 3
MAX_LATE_S = 120.0
"""Maximum delay of expiry: Redis expires lazily, and takes 10 to 30 s for a million states."""

EXPIRING_MEANWHILE = 4
"""Number of concurrent servers: one is filled while others expire."""

BATCH = 512
READINGS, READING_INTERVAL_S = 5, 0.03


class SpendStep(NamedTuple):
    """One call, or several equal ones, of every caller."""

    hits: int = 1
    times: int = 1
    with_id: bool = False


@dataclass(frozen=True, slots=True)
class StateKind:
    """A kind of state and the calls that write it. Only the state written by the last step is measured."""

    name: str
    rule: str  # `…` is replaced by the window
    steps: tuple[SpendStep, ...]
    keys: int = 1  # keys per caller at the end, including this one


def _bucket(algorithm: str) -> StateKind:
    return StateKind(algorithm, f"rate_limit: {{…, requests_per_unit: 10, algorithm: {algorithm}}}", (SpendStep(10),))


KINDS = (
    StateKind("fixed_window", "rate_limit: {…, requests_per_unit: 10}", (SpendStep(),)),
    StateKind("sliding_window", "rate_limit: {…, requests_per_unit: 10, algorithm: sliding_window}", (SpendStep(),)),
    StateKind("sliding_log, 1 hit", "rate_limit: {…, requests_per_unit: 10, algorithm: sliding_log}", (SpendStep(),)),
    StateKind(
        "sliding_log, 10 hits", "rate_limit: {…, requests_per_unit: 10, algorithm: sliding_log}", (SpendStep(times=10),)
    ),
    _bucket("token_bucket"),
    _bucket("leaky_bucket"),
    _bucket("gcra"),
    StateKind(
        "penalty, 1 violation",
        "rate_limit: {…, requests_per_unit: 1}, penalty: {within: …, after: 1, multipliers: [1]}",
        (SpendStep(), SpendStep()),
        keys=2,
    ),
    StateKind("warning", "rate_limit: {…, requests_per_unit: 10}, warn_at: 0.5", (SpendStep(), SpendStep(6)), keys=2),
    StateKind("request id", "rate_limit: {…, requests_per_unit: 10}", (SpendStep(), SpendStep(with_id=True)), keys=2),
)


@dataclass(frozen=True, slots=True)
class StateMeasurement:
    """Result of one kind of state on one server."""

    server: str
    kind: str
    bytes_each: float
    window_s: int
    empty_after_s: float  # seconds from the last write
    late_s: float  # seconds from when the last state was due

    @property
    def well(self) -> bool:
        return self.late_s <= MAX_LATE_S

    def __str__(self) -> str:
        empty = f"empty {self.empty_after_s:.1f} s after the last write, {self.late_s:.1f} s after the last was due"
        return f"{self.server:11}{self.kind:22}{self.bytes_each:6.0f} bytes each   window {self.window_s} s: {empty}"


class TooSlow(Exception):
    """The first states expired before the last were written."""


class KeyspaceFill:
    """Fills one server with one kind of state: every caller makes its calls, and memory is read in between."""

    def __init__(self, kind: StateKind, server: RedisServer, callers: int, window_s: int) -> None:
        self._kind = kind
        self._server = server
        self._callers = callers
        self._once_s = window_s
        rule = kind.rule.replace("{…", f"{{unit: second, unit_multiplier: {window_s}").replace("…", f"{window_s}s")
        text = f"domain: edge\ndescriptors: [{{key: remote_address, {rule}}}]\n"
        self._planner = Planner(compile_documents({"soak.yaml": text.encode()}).tree, Policy())

    def bytes_each(self) -> float:
        """Return the bytes per state written by the last step. Raises TooSlow."""
        for step in self._kind.steps:  # loads the script, and has Lua allocate what the largest runs need
            self._spend_and_close(step, min(self._callers, BATCH))
        self._server.cli("FLUSHALL", "SYNC")  # SYNC: Valkey would free earlier data asynchronously
        used_bytes = [self._used_bytes()]
        for step in self._kind.steps:
            self._spend_and_close(step, self._callers)
            used_bytes.append(self._used_bytes())
        if self._server.cli("DBSIZE") != self._callers * self._kind.keys:
            raise TooSlow
        return (used_bytes[-1] - used_bytes[-2]) / self._callers

    def due_s(self) -> float:
        """Return when the last state is due to expire."""
        return max(int(self._server.cli("PTTL", key)) for key in self._some_keys()) / 1000

    def _some_keys(self) -> Iterator[bytes]:
        for number in (0, self._callers // 2, self._callers - 1):
            plan = self._plan(number, self._kind.steps[-1].hits)
            yield from plan.keys
            yield make_idempotency_key(plan.keys, layout(plan.template).operation, _id(number))

    def _spend_and_close(self, step: SpendStep, callers: int) -> None:
        """Make the calls on a connection that is closed afterwards, so that its buffers are not measured."""
        asyncio.run(self._spend(step, callers))
        while self._clients() > 1:
            time.sleep(0.01)

    async def _spend(self, step: SpendStep, callers: int) -> None:
        address = RedisServers("single", (RedisAddress("127.0.0.1", self._server.port),))
        store = redis_store(address, None, RedisOptions(timeout_s=60.0, idempotency_s=self._once_s))
        await store.start()
        try:
            numbers = iter(range(callers))
            while some := list(islice(numbers, BATCH)):
                requested = [store.prepare(self._plan(number, step.hits)) for number in some]
                if step.with_id:
                    requested = [one.idempotent(_id(number)) for number, one in zip(some, requested, strict=True)]
                for _ in range(step.times):
                    for answer in await store.spend(requested):
                        if isinstance(answer, Exception):
                            raise answer
        finally:
            await store.close()

    def _plan(self, number: int, hits: int) -> Plan:
        number *= max(1, CALLERS // self._callers)  # keys are equally long for any number of callers
        address = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
        return self._planner.plan(Request("edge", (Descriptor((Entry("remote_address", address),)),), hits))

    def _clients(self) -> int:
        return int(self._server.cli("INFO", "clients")["connected_clients"])

    def _used_bytes(self) -> int:
        """Return the least of a few readings: buffers of the connection that was closed are freed a little later."""
        readings = []
        for _ in range(READINGS):
            readings.append(int(self._server.cli("INFO", "memory")["used_memory"]))
            time.sleep(READING_INTERVAL_S)
        return min(readings)


def _id(number: int) -> bytes:
    """Return a request id with the length of a UUID."""
    return b"%036d" % number


def window_s(calls: int, now_s: float) -> int:
    """Return a window that has just started and is long enough for all calls.

    Windows start at multiples of their length.
    """
    least = max(MIN_WINDOW_S, calls // CALLS_PER_SECOND)
    return min(range(least, 3 * least), key=lambda length: (now_s % length, length))


def measure(server_name: str, kind: StateKind, callers: int, filling: Lock) -> StateMeasurement:
    """Fill a server, then wait until it is empty. The lock `filling` prevents concurrent filling."""
    with RedisServer(redis_binaries()[server_name]) as server:
        with filling:
            length_s, bytes_each, due_s = _filled(server, kind, callers)
            written_s = time.monotonic()
        time.sleep(due_s)
        while server.cli("DBSIZE") and time.monotonic() < written_s + due_s + 2 * MAX_LATE_S:
            time.sleep(0.05)
        empty_after_s = time.monotonic() - written_s
        return StateMeasurement(server_name, kind.name, bytes_each, length_s, empty_after_s, empty_after_s - due_s)


def _filled(server: RedisServer, kind: StateKind, callers: int) -> tuple[int, float, float]:
    """Return the window, the bytes per state, and when the last state is due to expire."""
    calls = callers * sum(step.times for step in kind.steps)
    while True:
        length_s = window_s(calls, time.time())
        attempt = KeyspaceFill(kind, server, callers, length_s)
        try:
            return length_s, attempt.bytes_each(), attempt.due_s()
        except TooSlow:
            calls *= 2


def soak(
    callers: int, servers: Sequence[str], kinds: Sequence[StateKind], at_once: int = EXPIRING_MEANWHILE
) -> Iterator[StateMeasurement]:
    """Measure all kinds on all servers, several at once; kinds with ten calls per caller use a tenth of the callers.

    Results are in order. With fewer callers, the number of concurrent servers matters less.
    """
    filling = Lock()
    pairs = [(server, kind) for server in servers for kind in kinds]

    def measured(pair: tuple[str, StateKind]) -> StateMeasurement:
        server, kind = pair
        return measure(server, kind, callers // max(step.times for step in kind.steps), filling)

    with ThreadPoolExecutor(at_once) as pool:
        yield from pool.map(measured, pairs)


def table(figures: Sequence[StateMeasurement]) -> Iterator[str]:
    """Yield the rows of the table in docs/operations.md."""
    servers = list(dict.fromkeys(one.server for one in figures))
    yield f"| state | {' | '.join(servers)} |"
    yield "|---" * (1 + len(servers)) + "|"
    for kind in dict.fromkeys(one.kind for one in figures):
        each = [f"{one.bytes_each:.0f}" for one in figures if one.kind == kind]
        yield f"| {kind} | {' | '.join(each)} |"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.keys_soak", description=__doc__)
    parser.add_argument(
        "--callers", type=int, default=CALLERS, help="number of callers with their own keys (default: a million)"
    )
    parser.add_argument("--servers", nargs="+", choices=list(redis_binaries()), default=SERVERS)
    parser.add_argument(
        "--kinds", nargs="+", choices=[kind.name for kind in KINDS], help="kinds of state (default: all)"
    )
    chosen = parser.parse_args(arguments)
    kinds = [kind for kind in KINDS if chosen.kinds is None or kind.name in chosen.kinds]
    figures = []
    for measured in soak(chosen.callers, chosen.servers, kinds):
        print(measured, flush=True)
        figures.append(measured)
    print(*table(figures), sep="\n")
    well = all(one.well for one in figures)
    print(f"{chosen.callers:,} callers: every state expired: {'ok' if well else 'NOT OK'}")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
