"""`python -m bench.keys_soak`: what a million callers cost a Redis, in every kind of state, and that all of it expires.

Every kind has a new server to itself. Callers are planned by real rules and decided by the store that the service uses;
what the server's `used_memory` grew by is divided by their number. Then nobody comes any more, and the server must be
empty soon after the last state was due to expire.
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
from ratelimit_rls.store.batch import record_key
from ratelimit_rls.store.redis.new import redis_store
from ratelimit_rls.store.redis.node import Terms
from ratelimit_rls.store.redis.store import form
from tests.servers import RedisServer, redis_binaries

CALLERS = 1_000_000
SERVERS = ("redis-6.2", "valkey-9")
CALLS_PER_SECOND = 8_000
"""At least, on a busy machine: the window must not end before all of them are there."""

SHORTEST_WINDOW_S = 3
LATE_S = 120.0
"""Redis looks for what has expired at its leisure: a million states that are due at once take it 10 to 30 s."""

EXPIRING_MEANWHILE = 4
"""Servers at once: one is filled while others become empty."""

BATCH = 512


class Visit(NamedTuple):
    """What every caller does once."""

    hits: int = 1
    times: int = 1
    with_id: bool = False


@dataclass(frozen=True, slots=True)
class Kind:
    """A state: what has it written. With several visits, those before the last write what is not counted for it."""

    name: str
    rule: str  # `…` is the window
    visits: tuple[Visit, ...]
    keys: int = 1  # that a caller has in the end, this one included


def _bucket(algorithm: str) -> Kind:
    return Kind(algorithm, f"rate_limit: {{…, requests_per_unit: 10, algorithm: {algorithm}}}", (Visit(10),))


KINDS = (
    Kind("fixed_window", "rate_limit: {…, requests_per_unit: 10}", (Visit(),)),
    Kind("sliding_window", "rate_limit: {…, requests_per_unit: 10, algorithm: sliding_window}", (Visit(),)),
    Kind("sliding_log, 1 hit", "rate_limit: {…, requests_per_unit: 10, algorithm: sliding_log}", (Visit(),)),
    Kind("sliding_log, 10 hits", "rate_limit: {…, requests_per_unit: 10, algorithm: sliding_log}", (Visit(times=10),)),
    _bucket("token_bucket"),
    _bucket("leaky_bucket"),
    _bucket("gcra"),
    Kind(
        "penalty, 1 violation",
        "rate_limit: {…, requests_per_unit: 1}, penalty: {within: …, after: 1, multipliers: [1]}",
        (Visit(), Visit()),
        keys=2,
    ),
    Kind("warning", "rate_limit: {…, requests_per_unit: 10}, warn_at: 0.5", (Visit(), Visit(6)), keys=2),
    Kind("request id", "rate_limit: {…, requests_per_unit: 10}", (Visit(), Visit(with_id=True)), keys=2),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """One kind of state on one server."""

    server: str
    kind: str
    bytes_each: float
    window_s: int
    empty_after_s: float  # from the last write
    late_s: float  # from when the last state was due

    @property
    def well(self) -> bool:
        return self.late_s <= LATE_S

    def __str__(self) -> str:
        empty = f"empty {self.empty_after_s:.1f} s after the last write, {self.late_s:.1f} s after the last was due"
        return f"{self.server:11}{self.kind:22}{self.bytes_each:6.0f} bytes each   window {self.window_s} s: {empty}"


class TooSlow(Exception):
    """The first states had expired before the last were there."""


class Filling:
    """One server and one kind: every caller makes all of its visits, and the server's memory is read in between."""

    def __init__(self, kind: Kind, server: RedisServer, callers: int, window_s: int) -> None:
        self._kind = kind
        self._server = server
        self._callers = callers
        self._once_s = window_s
        rule = kind.rule.replace("{…", f"{{unit: second, unit_multiplier: {window_s}").replace("…", f"{window_s}s")
        text = f"domain: edge\ndescriptors: [{{key: remote_address, {rule}}}]\n"
        self._planner = Planner(compile_documents({"soak.yaml": text.encode()}).tree, Policy())

    def bytes_each(self) -> float:
        """Of the state that the last visit has written. Raises TooSlow."""
        self._visit(Visit(), callers=1)  # the script is there from now on
        self._server.cli("FLUSHALL", "SYNC")  # Valkey would free what an attempt before has left in its own time
        used_bytes = [self._used_bytes()]
        for visit in self._kind.visits:
            self._visit(visit, self._callers)
            used_bytes.append(self._used_bytes())
        if self._server.cli("DBSIZE") != self._callers * self._kind.keys:
            raise TooSlow
        return (used_bytes[-1] - used_bytes[-2]) / self._callers

    def due_s(self) -> float:
        """Until the last state expires, be it of one who came early or late."""
        return max(int(self._server.cli("PTTL", key)) for key in self._some_keys()) / 1000

    def _some_keys(self) -> Iterator[bytes]:
        for number in (0, self._callers // 2, self._callers - 1):
            plan = self._plan(number, self._kind.visits[-1].hits)
            yield from plan.keys
            yield record_key(plan.keys, form(plan.outline).asked, _id(number))

    def _visit(self, visit: Visit, callers: int) -> None:
        """On a connection that is closed again: its buffers are not states."""
        asyncio.run(self._spend(visit, callers))
        while self._clients() > 1:
            time.sleep(0.01)

    async def _spend(self, visit: Visit, callers: int) -> None:
        address = RedisServers("single", (RedisAddress("127.0.0.1", self._server.port),))
        store = redis_store(address, None, Terms(timeout_s=60.0, once_s=self._once_s))
        await store.start()
        try:
            numbers = iter(range(callers))
            while some := list(islice(numbers, BATCH)):
                asked = [store.prepare(self._plan(number, visit.hits)) for number in some]
                if visit.with_id:
                    asked = [one.once(_id(number)) for number, one in zip(some, asked, strict=True)]
                for _ in range(visit.times):
                    for answer in await store.spend(asked):
                        if isinstance(answer, Exception):
                            raise answer
        finally:
            await store.close()

    def _plan(self, number: int, hits: int) -> Plan:
        number *= max(1, CALLERS // self._callers)  # however few there are, their keys are as long as those of many
        address = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
        return self._planner.plan(Request("edge", (Descriptor((Entry("remote_address", address),)),), hits))

    def _clients(self) -> int:
        return int(self._server.cli("INFO", "clients")["connected_clients"])

    def _used_bytes(self) -> int:
        return int(self._server.cli("INFO", "memory")["used_memory"])


def _id(number: int) -> bytes:
    """As long as a UUID."""
    return b"%036d" % number


def window_s(calls: int, now_s: float) -> int:
    """Long enough for all to come within it, and just begun: windows begin at multiples of their length."""
    least = max(SHORTEST_WINDOW_S, calls // CALLS_PER_SECOND)
    return min(range(least, 3 * least), key=lambda length: (now_s % length, length))


def measure(server_name: str, kind: Kind, callers: int, filling: Lock) -> Measured:
    """Fill a server, then see it empty; `filling` is held meanwhile, so that no two are filled at once."""
    with RedisServer(redis_binaries()[server_name]) as server:
        with filling:
            length_s, bytes_each, due_s = _filled(server, kind, callers)
            written_s = time.monotonic()
        time.sleep(due_s)
        while server.cli("DBSIZE") and time.monotonic() < written_s + due_s + 2 * LATE_S:
            time.sleep(0.05)
        empty_after_s = time.monotonic() - written_s
        return Measured(server_name, kind.name, bytes_each, length_s, empty_after_s, empty_after_s - due_s)


def _filled(server: RedisServer, kind: Kind, callers: int) -> tuple[int, float, float]:
    """The window, bytes each, and when the last state is due to expire."""
    calls = callers * sum(visit.times for visit in kind.visits)
    while True:
        length_s = window_s(calls, time.time())
        attempt = Filling(kind, server, callers, length_s)
        try:
            return length_s, attempt.bytes_each(), attempt.due_s()
        except TooSlow:
            calls *= 2


def soak(
    callers: int, servers: Sequence[str], kinds: Sequence[Kind], at_once: int = EXPIRING_MEANWHILE
) -> Iterator[Measured]:
    """In order, with so many servers at once; of kinds for which everybody must come ten times, a tenth of the callers.

    The fewer there are, the less it matters how many servers hold them.
    """
    filling = Lock()
    pairs = [(server, kind) for server in servers for kind in kinds]

    def measured(pair: tuple[str, Kind]) -> Measured:
        server, kind = pair
        return measure(server, kind, callers // max(visit.times for visit in kind.visits), filling)

    with ThreadPoolExecutor(at_once) as pool:
        yield from pool.map(measured, pairs)


def table(figures: Sequence[Measured]) -> Iterator[str]:
    """As docs/operations.md has it."""
    servers = list(dict.fromkeys(one.server for one in figures))
    yield f"| state | {' | '.join(servers)} |"
    yield "|---" * (1 + len(servers)) + "|"
    for kind in dict.fromkeys(one.kind for one in figures):
        each = [f"{one.bytes_each:.0f}" for one in figures if one.kind == kind]
        yield f"| {kind} | {' | '.join(each)} |"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.keys_soak", description=__doc__)
    parser.add_argument("--callers", type=int, default=CALLERS, help="each with keys of its own (default: a million)")
    parser.add_argument("--servers", nargs="+", choices=list(redis_binaries()), default=SERVERS)
    parser.add_argument("--kinds", nargs="+", choices=[kind.name for kind in KINDS], help="of states (default: all)")
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
