"""`python -m bench.attack_soak`: all attacks at random on 50 connections, next to 500 legitimate calls per second.

First the legitimate clients run alone, then with attackers, on the same server with a SQLite database and one change by
an administrator per second. Requirements: no legitimate call fails, p99.9 is at most 100 ms above that of the calm
phase, memory is flat, and no change fails. The caches are small, so that they are full early and other growth is
visible. The server has its own core, and all clients share another. Legitimate clients are a separate process, whose
latency is measured from the due time. Attackers run with lower priority and limited bandwidth, so that the server is
measured, not the clients.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import NamedTuple, Self

from bench.cpu import process_s, resident_bytes
from tests.hostile.attackers import Attacker, Attackers
from tests.hostile.attacks import ATTACKS, Port
from tests.hostile.harness import MIB, UnderAttack
from tests.hostile.well_behaved_client import Waits, WellBehavedClient
from tests.support.ports import free_port

CONNECTIONS = 50
PER_S = 500.0
MAX_LATER_MS = 100.0
MAX_GROWTH_MIB = 16.0
"""Maximum memory growth from the second to the last quarter: about a tenth of the process, its normal fluctuation."""

CACHE_BYTES = 16 * MIB
"""Budget of the request cache and of the embedded store: full within the first minutes of an attack."""

ATTACK_S = (0.5, 10.0)
"""Minimum and maximum duration of one attack on a connection."""

SERVER_CORE, CLIENT_CORE = 0, 1
LOOK_S = 0.25
WARM_UP_S = 3.0
TOKEN = "the-admin-token-of-the-soak"
WELL_BEHAVED_ADDRESS = "127.0.0.1"
ATTACKER = "127.0.0.2"


@dataclass(slots=True)
class Changes:
    """Changes made by the administrator."""

    done: int = 0
    failed: list[str] = field(default_factory=list)
    longest_s: float = 0.0


class Administrator:
    """Blocks or unblocks a user once per second, in a thread."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._changes = Changes()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def report(self) -> Changes:
        """Return the changes since the last report."""
        report, self._changes = self._changes, Changes()
        return report

    def _run(self) -> None:
        number = -1
        while not self._over.wait(1.0):
            number += 1
            begun_s = time.monotonic()
            try:
                status = self._change(number)
                fault = "" if status < 300 else f"status {status}"
            except OSError as error:
                fault = repr(error)
            changes = self._changes
            changes.longest_s = max(changes.longest_s, time.monotonic() - begun_s)
            if fault:
                changes.failed.append(fault)
            else:
                changes.done += 1

    def _change(self, number: int) -> int:
        connection = http.client.HTTPConnection(
            "127.0.0.1", self._port, timeout=20, source_address=(WELL_BEHAVED_ADDRESS, 0)
        )
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
        method, what = [("PUT", ""), ("PUT", "/block"), ("DELETE", "/block")][number % 3]
        body = json.dumps({}) if method == "PUT" else None
        try:
            connection.request(method, f"/api/v1/users/user-{number // 3 % 100}{what}", body, headers=headers)
            answer = connection.getresponse()
            answer.read()
            return answer.status
        finally:
            connection.close()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


@dataclass(slots=True)
class AttackResult:
    """Actions of the attackers."""

    attacks: Counter[str] = field(default_factory=Counter)
    """Number of connections per attack."""

    endings: Counter[str] = field(default_factory=Counter)
    sent_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Phase:
    """Results of a phase with or without attackers."""

    name: str
    seconds: float
    waits: Waits
    changes: Changes
    memory_bytes: Sequence[int]
    cpu_s: float
    abuse: Mapping[str, int] = field(default_factory=dict)
    played: AttackResult = field(default_factory=AttackResult)

    @property
    def growth_bytes(self) -> int:
        """Growth of the median from the second to the last quarter.

        Not of the peak: unfinished input and queued calls, which have limits of their own, come and go.
        """
        quarter = max(1, len(self.memory_bytes) // 4)
        before = self.memory_bytes[quarter : 2 * quarter] or self.memory_bytes
        return int(median(self.memory_bytes[-quarter:]) - median(before))

    def lines(self) -> Iterator[str]:
        waits, memory_mib = self.waits, [one / MIB for one in self.memory_bytes]
        yield (
            f"{self.name}, {self.seconds:.0f} s: {waits.calls:,} calls, {waits.failed} failed; p50 {waits.p50_ms:.2f}, "
            f"p95 {waits.p95_ms:.1f}, p99 {waits.p99_ms:.1f}, p99.9 {waits.p99_9_ms:.1f}, "
            f"longest {waits.longest_ms:.0f} ms"
        )
        yield (
            f"  without waiting for a core: p50 {waits.fair_p50_ms:.2f}, p95 {waits.fair_p95_ms:.1f}, "
            f"p99 {waits.fair_p99_ms:.1f}, p99.9 {waits.fair_p99_9_ms:.1f}, longest {waits.longest_fair_ms:.0f} ms"
        )
        for fault in waits.faults:
            yield f"  {fault}"
        marks = " ".join(f"{memory_mib[len(memory_mib) * at // 12]:.0f}" for at in range(12))
        yield (
            f"  memory {marks} {memory_mib[-1]:.0f} MiB, at most {max(memory_mib):.0f}, "
            f"grown by {self.growth_bytes / MIB:.0f}; CPU {self.cpu_s / self.seconds:.0%}"
        )
        yield (
            f"  {self.changes.done} changes, {len(self.changes.failed)} failed, longest {self.changes.longest_s:.2f} s"
            f"{': ' + self.changes.failed[0] if self.changes.failed else ''}"
        )
        if self.played.attacks:
            count, kinds = self.played.attacks.total(), len(self.played.attacks)
            yield f"  {count:,} attacks of {kinds} kinds, {self.played.sent_bytes / MIB:,.0f} MiB sent"
            yield f"  ended: {', '.join(f'{how} {times:,}' for how, times in sorted(self.played.endings.items()))}"
            yield f"  counted: {', '.join(f'{reason} {times:,}' for reason, times in sorted(self.abuse.items()))}"


def violations(
    calm: Phase,
    attacked: Phase,
    max_later_ms: float = MAX_LATER_MS,
    max_growth_mib: float = MAX_GROWTH_MIB,
    *,
    fair: bool = False,
) -> list[str]:
    """Return the violations. With `fair`, the time that clients and server waited for a core is not counted."""
    waits = calm.waits, attacked.waits
    before_ms, after_ms = (one.fair_p99_9_ms if fair else one.p99_9_ms for one in waits)
    later_ms = after_ms - before_ms
    found = []
    for phase in (calm, attacked):
        if phase.waits.failed or not phase.waits.calls:
            found.append(f"{phase.name}: {phase.waits.failed} well-behaved calls failed")
        if phase.changes.failed or not phase.changes.done:
            found.append(f"{phase.name}: {len(phase.changes.failed)} changes failed")
    if later_ms > max_later_ms:
        found.append(f"p99.9 is {later_ms:.0f} ms above that of the calm run")
    if attacked.growth_bytes > max_growth_mib * MIB:
        found.append(f"memory grew by {attacked.growth_bytes / MIB:.0f} MiB")
    return found


class Plan(NamedTuple):
    """Configuration of the attackers."""

    addresses: Mapping[Port, tuple[str, int]]
    source: str
    bytes_per_s: float
    seed: int
    seconds: float
    connections: int
    core: int | None


def run_attack(plan: Plan) -> AttackResult:
    """Run the attackers in a process with lower priority than the legitimate clients."""
    os.nice(19)
    if plan.core is not None:
        os.sched_setaffinity(0, {plan.core})
    chance = random.Random(plan.seed)
    played = AttackResult()
    until_s: dict[Attacker, float] = {}

    def attack() -> None:
        chosen = chance.choice(ATTACKS)
        played.attacks[chosen.name] += 1
        until_s[attackers.connect(chosen)] = time.monotonic() + chance.uniform(*ATTACK_S)

    def renew(over: Attacker) -> None:
        del until_s[over]
        played.endings[over.ending or "by the client"] += 1
        played.sent_bytes += over.sent_bytes
        attack()

    def look() -> None:
        now_s = time.monotonic()
        for one, at_s in until_s.items():
            one.is_done = one.is_done or now_s > at_s

    with Attackers(plan.addresses, source=plan.source, bytes_per_s=plan.bytes_per_s, chance=chance) as attackers:
        for _ in range(plan.connections):
            attack()
        attackers.play(plan.seconds, renew=renew, meanwhile=look)
    return played


class Soak:
    """One server and its clients."""

    def __init__(
        self,
        service: UnderAttack,
        calls: WellBehavedClient,
        admin: Administrator,
        *,
        source: str,
        bytes_per_s: float,
        seed: int,
        core: int | None,
    ) -> None:
        self._service = service
        self._calls = calls
        self._admin = admin
        self._source = source
        self._bytes_per_s = bytes_per_s
        self._seed = seed
        self._core = core

    def calm(self, seconds: float) -> Phase:
        return self._phase("calm", seconds, None)

    def attacked(self, seconds: float, connections: int) -> Phase:
        plan = Plan(
            self._service.addresses, self._source, self._bytes_per_s, self._seed, seconds, connections, self._core
        )
        return self._phase("attacked", seconds, plan)

    def _phase(self, name: str, seconds: float, plan: Plan | None) -> Phase:
        before, before_s = self._service.abuse(), process_s(self._service.pid)
        self._calls.report()
        self._admin.report()
        memory = [resident_bytes(self._service.pid)]
        begun_s = time.monotonic()
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            playing = pool.submit(run_attack, plan) if plan is not None else None
            while not playing.done() if playing is not None else time.monotonic() - begun_s < seconds:
                time.sleep(LOOK_S)
                memory.append(resident_bytes(self._service.pid))
            played = playing.result() if playing is not None else AttackResult()
        took_s = time.monotonic() - begun_s
        waits, changes = self._calls.report(), self._admin.report()
        after = self._service.abuse()
        return Phase(
            name=name,
            seconds=took_s,
            waits=waits,
            changes=changes,
            memory_bytes=memory,
            cpu_s=process_s(self._service.pid) - before_s,
            abuse={reason.value: n - before.get(reason, 0) for reason, n in after.items() if n > before.get(reason, 0)},
            played=played,
        )


def pin(pid: int, core: int) -> None:
    """Pin all threads of a process to one core."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), {core})


def soak(
    seconds: float, calm_s: float, *, source: str, connections: int, per_s: float, bytes_per_s: float, seed: int
) -> tuple[Phase, Phase]:
    with ExitStack() as running:
        directory = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="attack-soak-")))
        admin_port = free_port()
        environment = {
            "RLS_DATABASE_URL": f"sqlite:///{directory}/records.db",
            "RLS_ADMIN_PORT": admin_port,
            "RLS_ADMIN_TOKEN": TOKEN,
            "RLS_PLAN_CACHE_BYTES": CACHE_BYTES,
            "RLS_EMBEDDED_MEMORY_BYTES": CACHE_BYTES,
        }
        service = running.enter_context(UnderAttack(directory, environment))
        cores = os.sched_getaffinity(0)
        pins = {SERVER_CORE, CLIENT_CORE} <= cores
        if pins:
            pin(service.pid, SERVER_CORE)
            os.sched_setaffinity(0, {CLIENT_CORE})
            running.callback(os.sched_setaffinity, 0, cores)
        core = CLIENT_CORE if pins else None
        calls = running.enter_context(
            WellBehavedClient(service.grpc_port, service.pid, per_s=per_s, source=WELL_BEHAVED_ADDRESS, core=core)
        )
        admin = running.enter_context(Administrator(admin_port))
        time.sleep(WARM_UP_S)
        soaked = Soak(service, calls, admin, source=source, bytes_per_s=bytes_per_s, seed=seed, core=core)
        calm = soaked.calm(calm_s)
        attacked = soaked.attacked(seconds, connections)
        if not service.running:
            sys.exit(f"the server died:\n{service.log()[-2000:]}")
        return calm, attacked


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.attack_soak", description=__doc__)
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="duration of the phase with attackers (default: %(default)s)"
    )
    parser.add_argument(
        "--calm-minutes", type=float, default=2.0, help="duration of the calm phase before it (default: %(default)s)"
    )
    parser.add_argument(
        "--addresses",
        choices=["different", "same"],
        default="different",
        help="source addresses of attackers and legitimate clients (default: %(default)s)",
    )
    parser.add_argument(
        "--connections", type=int, default=CONNECTIONS, help="connections of the attackers (default: %(default)s)"
    )
    parser.add_argument(
        "--per-second", type=float, default=PER_S, help="legitimate calls per second (default: %(default)s)"
    )
    parser.add_argument(
        "--send-mib", type=float, default=32.0, help="bandwidth of all attackers in MiB/s (default: %(default)s)"
    )
    parser.add_argument(
        "--max-later-ms", type=float, default=MAX_LATER_MS, help="maximum increase of p99.9 (default: %(default)s)"
    )
    parser.add_argument(
        "--max-growth-mib", type=float, default=MAX_GROWTH_MIB, help="maximum memory growth (default: %(default)s)"
    )
    parser.add_argument("--busy", action="store_true", help="the machine is busy: do not count waiting for a core")
    parser.add_argument("--seed", type=int, help="random seed of an earlier run")
    chosen = parser.parse_args(arguments)
    seed = random.randrange(2**32) if chosen.seed is None else chosen.seed
    calm, attacked = soak(
        chosen.minutes * 60,
        chosen.calm_minutes * 60,
        source=ATTACKER if chosen.addresses == "different" else WELL_BEHAVED_ADDRESS,
        connections=chosen.connections,
        per_s=chosen.per_second,
        bytes_per_s=chosen.send_mib * MIB,
        seed=seed,
    )
    print(*calm.lines(), *attacked.lines(), sep="\n")
    found = violations(calm, attacked, chosen.max_later_ms, chosen.max_growth_mib, fair=chosen.busy)
    verdict = "ok" if not found else f"NOT OK: {'; '.join(found)}"
    print(f"{chosen.addresses} addresses, seed {seed}, load average {os.getloadavg()[0]:.1f}: {verdict}", flush=True)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
