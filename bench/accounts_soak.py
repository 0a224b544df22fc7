"""`python -m bench.accounts_soak`: 100,000 users with custom limits and a key each, compared with ten.

Measures start time, memory and CPU per decision, the time until a change takes effect, and latency while all users are
reloaded.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import grpc

from bench import callers, cpu
from bench.connection import Target
from bench.cpu import resident_bytes
from bench.load import Load
from bench.workload import TENANTS
from ratelimit_rls.core.model import Limit, Unit
from ratelimit_rls.database.change_follower import ChangeFollower
from ratelimit_rls.database.configuration import Configuration
from ratelimit_rls.database.database import Database
from ratelimit_rls.database.repository import Actor, Repository
from ratelimit_rls.identity.accounts import Override, User
from ratelimit_rls.identity.directory import AccountIndex, Directory
from ratelimit_rls.protos.messages import SHOULD_RATE_LIMIT, RateLimitRequest, RateLimitResponse
from tests.support.databases import PostgresServer
from tests.support.ports import free_port
from tests.support.servers import Service

USERS = 100_000
FEW = 10
SETS = 100
"""Number of different limit sets: those of a price list, and individual agreements."""

CHANGES = 20
MAX_SLOWDOWN = 1.1
"""Maximum CPU of a call with many users, relative to the same call with few."""

ACTS_WITHIN_S = 1.0
RELOAD_S = 120.0
MIB = 2**20

_ACTOR = Actor("soak")


@dataclass(frozen=True, slots=True)
class StartMeasurement:
    """A service with that many users, before the first call."""

    users: int
    seconds: float
    resident_bytes: int


@dataclass(frozen=True, slots=True)
class PacedMeasurement:
    """CPU per call, per round."""

    users: int
    calls_per_s: tuple[float, ...]
    us: tuple[float, ...]
    resident_bytes: int


@dataclass(frozen=True, slots=True)
class Reload:
    """Reload of all users during sequential calls."""

    seconds: float  # until a change in it took effect
    usual_ms: tuple[float, float]  # 95th and 99th percentile of calls before, and during the reload
    during_ms: tuple[float, float]
    longest_ms: float
    read_gap_ms: float  # between two event loop iterations while rows are read
    taken_gap_ms: float  # while the new accounts replace the old ones


@dataclass(frozen=True, slots=True)
class Record:
    """Results of one database."""

    database: str
    started: tuple[StartMeasurement, StartMeasurement]
    paced: tuple[PacedMeasurement, PacedMeasurement]
    acted_s: tuple[float, ...]
    reload: Reload

    @property
    def slower(self) -> float:
        few, many = self.paced
        return median(one / other for one, other in zip(many.us, few.us, strict=True))

    @property
    def well(self) -> bool:
        return self.slower <= MAX_SLOWDOWN and max(self.acted_s) < ACTS_WITHIN_S

    def lines(self) -> Iterator[str]:
        few, many = self.started
        yield (
            f"{self.database}: {many.users:,} users with a key each, started in {many.seconds:.1f} s"
            f" ({few.users}: {few.seconds:.1f} s)"
        )
        each = (many.resident_bytes - few.resident_bytes) / (many.users - few.users)
        yield (
            f"  memory {many.resident_bytes / MIB:.0f} MiB ({few.users}: {few.resident_bytes / MIB:.0f}),"
            f" {each:.0f} bytes a user with its key"
        )
        for paced in self.paced:
            rate, us, resident_mib = median(paced.calls_per_s), median(paced.us), paced.resident_bytes / MIB
            yield f"  {paced.users:>7,} users: {rate:,.0f} calls/s, {us:.1f} µs, then {resident_mib:.0f} MiB"
        yield f"  a call among many ÷ among few: {self.slower:.2f} (at most {MAX_SLOWDOWN:g})"
        yield f"  a change acted after {median(self.acted_s):.3f} s, at most {max(self.acted_s):.3f} s"
        reload = self.reload
        yield (
            f"  all read anew in {reload.seconds:.1f} s; calls meanwhile: p95 {reload.during_ms[0]:.1f} ms (before: "
            f"{reload.usual_ms[0]:.1f}), p99 {reload.during_ms[1]:.1f} ({reload.usual_ms[1]:.1f}), "
            f"at most {reload.longest_ms:.0f} ms"
        )
        yield (
            f"  the longest gap between turns of a loop: {reload.read_gap_ms:.0f} ms while rows are read, "
            f"{reload.taken_gap_ms:.0f} ms when they take the place of the old"
        )


@contextmanager
def databases(name: str) -> Iterator[tuple[str, str]]:
    """Yield URLs of two empty databases."""
    if name == "postgresql":
        with PostgresServer() as server:
            yield server.url(server.new_database()), server.url(server.new_database())
        return
    with tempfile.TemporaryDirectory(prefix="accounts-") as directory:
        yield f"sqlite:///{directory}/few.db", f"sqlite:///{directory}/many.db"


def service(url: str, directory: str) -> Service:
    return Service(
        {
            "RLS_RULES": directory,
            "RLS_DATABASE_URL": url,
            "RLS_KEY_SECRET": callers.KEY_SECRET,
            "RLS_ADMIN_PORT": free_port(),
            "RLS_AUDIT_SAMPLE": "0",
            "LOG_LEVEL": "warn",
        }
    )


def soak(name: str, users: int, sets: int, rounds: int, seconds: float) -> Record:
    """Run the soak on one kind of database."""
    with ExitStack() as running:
        urls = running.enter_context(databases(name))
        directory = running.enter_context(tempfile.TemporaryDirectory(prefix="accounts-rules-"))
        callers.write_rules(Path(directory), of_database=True)
        services, started = [], []
        for url, count in zip(urls, (FEW, users), strict=True):
            callers.fill_now(url, count, sets, all_custom=True)
            one = service(url, directory)
            begun_s = time.monotonic()
            running.enter_context(one)
            started.append(StartMeasurement(count, time.monotonic() - begun_s, resident_bytes(one.pid)))
            services.append(one)
        few, many = services
        paced = _paced(services, (FEW, users), rounds, seconds)
        few.stop()
        acted = asyncio.run(_changes(urls[1], many, users))
        return Record(name, (started[0], started[1]), paced, acted, asyncio.run(_reload(urls[1], many)))


def _paced(
    services: Sequence[Service], users: Sequence[int], rounds: int, seconds: float
) -> tuple[PacedMeasurement, PacedMeasurement]:
    """Send the same calls of all users to both services in turn."""
    calls = callers.requests(max(users))
    figures: list[list[tuple[float, float]]] = [[], []]
    for number in range(rounds + 1):
        for service, of_it in zip(services, figures, strict=True):
            with Load(Target(("127.0.0.1", service.grpc_port)), calls, some_are_denied=True) as load:
                load.run(0, at_least_calls=len(calls) if number == 0 else 0)
                before = cpu.process_s(service.pid)
                tally = load.run(seconds)
                spent_s = cpu.process_s(service.pid) - before
                load.drain()
            if number:  # the first round fills the caches
                of_it.append((tally.calls / tally.seconds, spent_s / tally.calls * 1e6))
    few, many = (
        PacedMeasurement(
            count, tuple(rate for rate, _ in of_it), tuple(us for _, us in of_it), resident_bytes(service.pid)
        )
        for count, service, of_it in zip(users, services, figures, strict=True)
    )
    return few, many


class Caller:
    """One user, calling over gRPC."""

    def __init__(self, channel: grpc.Channel, number: int) -> None:
        self._call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(SHOULD_RATE_LIMIT)
        request = RateLimitRequest(domain=callers.DOMAIN)
        entries = request.descriptors.add().entries
        entries.add(key="tenant", value=f"tenant-{number % TENANTS:02}")
        entries.add(key="user", value=callers.user_id(number))
        self._message = request.SerializeToString()

    def limit(self) -> int:
        answer = RateLimitResponse.FromString(self._call(self._message, timeout=10))
        return int(answer.statuses[0].current_limit.requests_per_unit)


async def _changes(url: str, service: Service, users: int) -> tuple[float, ...]:
    """Measure the seconds from a change of a user by another process until it takes effect."""
    database = Database(url)
    acted = []
    try:
        with grpc.insecure_channel(service.grpc_address) as channel:
            for number in range(CHANGES):
                user = number * (users // CHANGES)
                caller = Caller(channel, user)
                caller.limit()
                limits = (Limit(1_000 + number, Unit.HOUR),)
                async with Repository(database).change(_ACTOR) as change:
                    await change.set_override(callers.user_id(user), Override(limits, time.time() + 3600))
                changed_s = time.monotonic()
                while caller.limit() != 1_000 + number:
                    if time.monotonic() - changed_s > RELOAD_S:
                        raise SystemExit("a change did not act at all")
                acted.append(time.monotonic() - changed_s)
    finally:
        await database.close()
    return tuple(acted)


async def _reload(url: str, service: Service) -> Reload:
    database = Database(url)
    try:
        with grpc.insecure_channel(service.grpc_address) as channel:
            caller = Caller(channel, 1)
            before = [_timed(caller)[0] for _ in range(1_000)]
            async with Repository(database).change(_ACTOR) as change:
                await change.put_users([User(callers.user_id(1), "", (Limit(77, Unit.HOUR),))])
            begun_s = time.monotonic()
            during = []
            while True:
                took_s, limit = _timed(caller)
                during.append(took_s)
                if limit == 77:
                    break
                if time.monotonic() - begun_s > RELOAD_S:
                    raise SystemExit("all users were not read anew")
            seconds = time.monotonic() - begun_s
            # The reload also has later effects: cached plans are invalid.
            during += [_timed(caller)[0] for _ in range(1_000)]
        gaps = await _gaps(database)
        return Reload(seconds, _tail_ms(before), _tail_ms(during), max(during) * 1e3, *gaps)
    finally:
        await database.close()


def _timed(caller: Caller) -> tuple[float, int]:
    begun_s = time.perf_counter()
    limit = caller.limit()
    return time.perf_counter() - begun_s, limit


def _tail_ms(times_s: Sequence[float]) -> tuple[float, float]:
    """Return the 95th and 99th percentiles in milliseconds."""
    ordered = sorted(times_s)
    return ordered[len(ordered) * 95 // 100] * 1e3, ordered[len(ordered) * 99 // 100] * 1e3


async def _gaps(database: Database) -> tuple[float, float]:
    """Measure blocking of an event loop in milliseconds, in our own loop, where the cause is known."""
    directory = Directory()
    taken_s: list[float] = []

    async def take(accounts: Configuration) -> None:
        index = await asyncio.to_thread(AccountIndex, accounts)
        begun_s = time.perf_counter()
        directory.load(index)
        taken_s.append(time.perf_counter() - begun_s)

    gaps_s = [0.0]

    async def turn() -> None:
        last_s = time.perf_counter()
        while True:
            await asyncio.sleep(0)
            now_s = time.perf_counter()
            gaps_s.append(now_s - last_s)
            last_s = now_s

    turning = asyncio.create_task(turn())
    follower = ChangeFollower(Repository(database), database, take, directory.apply, poll_s=60)
    try:
        await follower.start()
        await follower.close()
    finally:
        turning.cancel()
    longest = sorted(gaps_s)
    # The iteration that replaced the accounts is not one that read rows.
    while longest and longest[-1] >= taken_s[0]:
        longest.pop()
    return longest[-1] * 1e3, taken_s[0] * 1e3


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.accounts_soak", description=__doc__)
    parser.add_argument("--users", type=int, default=USERS)
    parser.add_argument("--sets", type=int, default=SETS, help="number of different limit sets (default: %(default)s)")
    parser.add_argument("--databases", nargs="+", choices=["sqlite", "postgresql"], default=["sqlite", "postgresql"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds of load per round (default: %(default)s)")
    chosen = parser.parse_args(arguments)
    well = True
    for name in chosen.databases:
        record = soak(name, chosen.users, chosen.sets, chosen.rounds, chosen.seconds)
        print(*record.lines(), sep="\n", flush=True)
        well = well and record.well
    print(f"load average {os.getloadavg()[0]:.1f}: {'ok' if well else 'NOT OK'}")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
