"""Instructions of Redis per call, counted by callgrind: what lone calls and one batch cost, whatever the machine does.

Unlike times, counts are repeatable, and they do not contain the kernel. Redis runs under callgrind with one client at a
time: this service, envoyproxy/ratelimit, or a connection that sends INCRBY and EXPIRE as the latter does.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from redis import Redis

from bench import wire
from bench.connection import Connection, LoadError, Target
from bench.fleet import LOAD_CORE, SERVICE_CORE
from bench.instructions import exchange
from bench.servers import Servers, StartedRedis
from bench.workload import BUCKET_AND_DAY, SUBDIRECTORY

SCRIPT_RUNS = ("fcall", "evalsha", "eval")
"""Commands that run the script."""

DOMAIN = "instructions"
CALLERS = 32
CALLS, WARM_UP_CALLS = 320, 96
"""After the warm-up, every caller has its counters and is in the request cache of the service."""

ENOUGH_S = "60s"
"""Time for a command: Redis is about fifty times slower under callgrind."""

DUMP_TIMEOUT_S = 30.0

_TOTALS = re.compile(r"^totals: (\d+)$", re.MULTILINE)
"""The last line of a dump."""


@dataclass(frozen=True, slots=True)
class InstructionCase:
    """Calls whose instructions are counted."""

    name: str
    keys: tuple[str, ...]  # entry keys, each a descriptor with a rule of its own
    batch: int = 1  # calls that are sent together
    client: str = "redis"  # or "peer" or "commands"


def _lone(name: str, *keys: str, client: str = "redis") -> InstructionCase:
    return InstructionCase(f"instructions-{name}", keys, client=client)


RULES = {
    "user": "rate_limit: {unit: hour, requests_per_unit: 1000000000}",
    "route": "rate_limit: {unit: hour, requests_per_unit: 1000000000}",
    "sliding_window": "rate_limit: {unit: hour, requests_per_unit: 1000000000, algorithm: sliding_window}",
    "sliding_log": "rate_limit: {unit: hour, requests_per_unit: 10000, algorithm: sliding_log}",
    "token_bucket": "rate_limit: {unit: hour, requests_per_unit: 1000, algorithm: token_bucket}",
    "leaky_bucket": "rate_limit: {unit: hour, requests_per_unit: 1000, algorithm: leaky_bucket}",
    "gcra": "rate_limit: {unit: hour, requests_per_unit: 1000, algorithm: gcra}",
    "plan": BUCKET_AND_DAY,
}
"""Rule of each entry key. Those of the first two can be read by envoyproxy/ratelimit. Buckets are so slow that they are
not full again when their caller's next call comes, since a full one has no state."""

PEER_KEYS = ("user", "route")
FIXED_WINDOW, TWO_FIXED_WINDOWS = _lone("1-fixed_window", "user"), _lone("2-fixed_window", "user", "route")
OWN_CASES = [
    FIXED_WINDOW,
    TWO_FIXED_WINDOWS,
    *(_lone(f"1-{name}", name) for name in ("token_bucket", "gcra", "sliding_window", "leaky_bucket", "sliding_log")),
    _lone("token_bucket-and-day", "plan"),
    InstructionCase("instructions-2-fixed_window-8-calls", ("user", "route"), batch=8),
]
COMMANDS = [
    _lone("1-incrby-expire", "user", client="commands"),
    _lone("2-incrby-expire", *PEER_KEYS, client="commands"),
]
PEER_CASES = [_lone("1-peer", "user", client="peer"), _lone("2-peer", *PEER_KEYS, client="peer")]


def offered(*, peer: bool) -> list[InstructionCase]:
    """Return all cases, optionally with those of envoyproxy/ratelimit."""
    return [*OWN_CASES, *COMMANDS, *(PEER_CASES if peer else [])]


def available() -> bool:
    """Return True if valgrind is installed."""
    return all(shutil.which(program) for program in ("valgrind", "callgrind_control"))


@dataclass(frozen=True, slots=True)
class Counted:
    """Instructions of Redis per call, and the mean number of calls that shared a script run (0: without script)."""

    instructions: float
    calls_per_run: float


class InstructionCounter:
    """Counts the cases of each kind of client on one Redis under callgrind."""

    def __init__(self, directory: Path, peer: Path | None) -> None:
        self._directory = directory
        self._peer = peer

    def count(self, cases: Sequence[InstructionCase]) -> Iterator[tuple[InstructionCase, Counted]]:
        for client in dict.fromkeys(case.client for case in cases):
            with self._servers() as servers:
                out = self._directory / f"callgrind-{client}"
                redis = servers.redis_under_callgrind(out)
                requested = [case for case in cases if case.client == client]
                address = None if client == "commands" else self._start(servers, client, redis)
                for number, case in enumerate(requested, 1):
                    yield case, self._count(case, redis, address, out.with_suffix(f".{number}"))

    @contextmanager
    def _servers(self) -> Iterator[Servers]:
        servers = Servers(self._directory, SERVICE_CORE, LOAD_CORE)
        try:
            yield servers
        finally:
            servers.close()

    def _start(self, servers: Servers, client: str, redis: StartedRedis) -> Target:
        rules = self._directory / client
        keys = PEER_KEYS if client == "peer" else tuple(RULES)
        config = rules / SUBDIRECTORY / "config"
        config.mkdir(parents=True, exist_ok=True)
        lines = [f"  - {{key: {key}, {RULES[key]}}}" for key in keys]
        (config / "rules.yaml").write_text("\n".join([f"domain: {DOMAIN}", "descriptors:", *lines, ""]))
        if client == "peer":
            assert self._peer is not None
            return Target(servers.peer(client, self._peer, rules, redis.url, {}).address)
        slow = {"RLS_STORE_TIMEOUT": ENOUGH_S, "REDIS_TIMEOUT": ENOUGH_S}
        return Target(servers.service("service", rules, redis.url, slow).address)

    def _count(self, case: InstructionCase, redis: StartedRedis, target: Target | None, dump: Path) -> Counted:
        client: _Commands | _Calls = _Commands(case, redis) if target is None else _Calls(case, target)
        with client:
            client.make(WARM_UP_CALLS)
            runs_before = _script_runs(redis)
            _control(redis, "--zero")
            client.make(CALLS)
            instructions = _dump(redis, dump)
            runs = _script_runs(redis) - runs_before
        return Counted(instructions / CALLS, CALLS / runs if runs else 0.0)


class _Calls:
    """A gRPC client whose calls have no deadline, since Redis is slow."""

    def __init__(self, case: InstructionCase, target: Target) -> None:
        self._batch = case.batch
        self._connection = Connection(target, timeout=None)
        messages = [
            wire.rate_limit_request(DOMAIN, [[(key, f"{key}-{number:06}")] for key in case.keys])
            for number in range(CALLERS)
        ]
        self._requests = cycle([wire.data(message) for message in messages])
        self._connection.prime(self._requests, case.batch)

    def make(self, calls: int) -> None:
        exchange(self._connection, self._batch, calls // self._batch, self._requests)
        if self._connection.denied:
            raise LoadError(f"{self._connection.denied} calls were not answered OK")

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._connection.close()


class _Commands:
    """The commands of envoyproxy/ratelimit for each limit, in one pipeline per call."""

    def __init__(self, case: InstructionCase, redis: StartedRedis) -> None:
        self._redis = Redis.from_url(f"redis://{redis.url}", socket_timeout=60)
        self._keys = cycle(
            [[f"{DOMAIN}_{key}_{key}-{number:06}_1795028400" for key in case.keys] for number in range(CALLERS)]
        )

    def make(self, calls: int) -> None:
        for _ in range(calls):
            with self._redis.pipeline(transaction=False) as pipeline:
                for key in next(self._keys):
                    pipeline.incrby(key, 1)
                    pipeline.expire(key, 3600)
                pipeline.execute()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._redis.close()


def _dump(redis: StartedRedis, path: Path) -> int:
    """Return the instructions since they were last set to zero, from the dump that callgrind writes to the path."""
    _control(redis, "--dump")
    until_s = time.monotonic() + DUMP_TIMEOUT_S
    while time.monotonic() < until_s:
        found = _TOTALS.search(path.read_text()) if path.exists() else None
        if found is not None:
            return int(found[1])
        time.sleep(0.05)
    raise LoadError(f"callgrind did not write {path}")


def _control(redis: StartedRedis, order: str) -> None:
    subprocess.run(["callgrind_control", order, str(redis.pids[0])], check=True, capture_output=True)


def _script_runs(redis: StartedRedis) -> int:
    with Redis.from_url(f"redis://{redis.url}", socket_timeout=60) as client:
        ran = client.info("commandstats")
    return sum(int(ran.get(f"cmdstat_{name}", {"calls": 0})["calls"]) for name in SCRIPT_RUNS)


def table(counted: dict[InstructionCase, Counted]) -> list[str]:
    """Return one line per case, with its ratio to the commands of envoyproxy/ratelimit for as many limits."""
    lines = []
    for case, one in counted.items():
        limits = 2 if case.keys == ("plan",) else len(case.keys)
        reference = counted.get(COMMANDS[limits - 1])
        ratio = f", {one.instructions / reference.instructions:.2f} × INCRBY and EXPIRE" if reference else ""
        shared = f", {one.calls_per_run:.1f} calls a script run" if one.calls_per_run else ""
        lines.append(f"{case.name}: {one.instructions:,.0f} instructions of Redis a call{ratio}{shared}")
    return lines
