"""`python -m bench.pairs --before DIRECTORY`: CPU per call of two checkouts, in interleaved pairs.

Both use the embedded store or, with --redis, a Redis each. Each runs on core 0 while it is measured, and is stopped
(SIGSTOP) while the other is. Both get the same calls, which `--traffic` chooses. The load and Redis have core 1. Within
a pair the two alternate in short slices, so that changes of the machine's speed affect both.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from bench.connection import Target, connected
from bench.cpu import process_s
from bench.instructions import TRAFFIC, Traffic
from bench.load import Load
from bench.servers import LOOPBACK, ROOT, run_redis
from tests.support.ports import free_port

START_S = 30.0
WARM_UP_S = 1.0


@dataclass(frozen=True, slots=True)
class Spent:
    """CPU time of a number of calls."""

    service_s: float
    redis_s: float
    calls: int

    @classmethod
    def total(cls, slices: Sequence[Spent]) -> Spent:
        return cls(
            sum(one.service_s for one in slices), sum(one.redis_s for one in slices), sum(one.calls for one in slices)
        )

    @property
    def service_us(self) -> float:
        return self.service_s / self.calls * 1e6

    @property
    def redis_us(self) -> float:
        return self.redis_s / self.calls * 1e6


class Service:
    """A running service of one checkout, with its load."""

    def __init__(self, pid: int, port: int, in_flight: int, redis_pid: int | None, calls: Iterator[bytes]) -> None:
        self._pid = pid
        self._redis_pid = redis_pid
        self._load = Load(Target((LOOPBACK, port)), calls, in_flight, connections=min(4, in_flight))
        self._load.run(WARM_UP_S)
        os.kill(pid, signal.SIGSTOP)

    def measure(self, seconds: float) -> Spent:
        """Return what one slice cost."""
        os.kill(self._pid, signal.SIGCONT)
        self._load.run(seconds / 10)
        service_before_s, redis_before_s = process_s(self._pid), self._redis_s()
        tally = self._load.run(seconds)
        spent = Spent(process_s(self._pid) - service_before_s, self._redis_s() - redis_before_s, tally.calls)
        os.kill(self._pid, signal.SIGSTOP)
        return spent

    def _redis_s(self) -> float:
        return 0.0 if self._redis_pid is None else process_s(self._redis_pid)


def measured_pair(before: Service, after: Service, seconds: float, slices: int) -> tuple[Spent, Spent]:
    """Return what the calls of the pair cost, before and after; the order alternates from slice to slice."""
    spent: dict[Service, list[Spent]] = {before: [], after: []}
    for number in range(slices):
        for service in (before, after) if number % 2 else (after, before):
            spent[service].append(service.measure(seconds / slices))
    return Spent.total(spent[before]), Spent.total(spent[after])


def comparison(name: str, sides: Sequence[tuple[float, float]]) -> str:
    """Return the line for the microseconds per call of all pairs."""
    ratios = sorted(after / before for before, after in sides)
    before_us, after_us = (statistics.median(side) for side in zip(*sides, strict=True))
    return (
        f"{name}: {before_us:.1f} → {after_us:.1f} µs a call, "
        f"after ÷ before {statistics.median(ratios):.3f} ({ratios[0]:.3f}..{ratios[-1]:.3f}, {len(ratios)} pairs)"
    )


@contextmanager
def run_service(
    package: Path, in_flight: int, directory: Path, redis: tuple[int, str] | None, traffic: Traffic
) -> Iterator[Service]:
    rules = directory / "rules"
    rules.mkdir()
    traffic.write_rules(rules)
    port = free_port()
    variables = {"RLS_RULES": str(rules), "GRPC_HOST": LOOPBACK, "GRPC_PORT": str(port), "PORT": "0", "DEBUG_PORT": "0"}
    if redis is not None:
        variables["REDIS_URL"] = redis[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "ratelimit_rls", "serve"],
        cwd=directory,
        env={**os.environ, **variables, "PYTHONPATH": str(package), "RLS_DRAIN_DELAY": "0s", "LOG_LEVEL": "error"},
        preexec_fn=lambda: os.sched_setaffinity(0, {0}),
    )
    try:
        until_s = time.monotonic() + START_S
        while True:
            with suppress(OSError):
                connected((LOOPBACK, port)).close()
                break
            if process.poll() is not None or time.monotonic() > until_s:
                raise SystemExit(f"the service of {package} did not start")
            time.sleep(0.05)
        yield Service(process.pid, port, in_flight, None if redis is None else redis[0], traffic.calls())
    finally:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGCONT)
        process.terminate()
        process.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.pairs", description=__doc__)
    parser.add_argument("--before", type=Path, required=True, help="checkout or unpacked wheel to compare with")
    parser.add_argument("--pairs", type=int, default=10, help="number of pairs (default: 10)")
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds of each half of a pair (default: 3)")
    parser.add_argument("--slices", type=int, default=10, help="slices of each side in a pair (default: 10)")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 256], help="concurrent calls (default: 1 256)")
    parser.add_argument("--redis", action="store_true", help="give each checkout a Redis (default: the embedded store)")
    parser.add_argument("--traffic", choices=list(TRAFFIC), default="seen", help="requests (default: seen)")
    chosen = parser.parse_args(arguments)
    traffic = TRAFFIC[chosen.traffic]
    os.sched_setaffinity(0, {1})
    for in_flight in chosen.in_flight:
        with ExitStack() as running:
            services = []
            for package in (chosen.before.resolve(), ROOT):
                directory = Path(running.enter_context(tempfile.TemporaryDirectory()))
                redis = running.enter_context(run_redis(directory)) if chosen.redis else None
                services.append(running.enter_context(run_service(package, in_flight, directory, redis, traffic)))
            pairs = [
                measured_pair(services[0], services[1], chosen.seconds, chosen.slices) for _ in range(chosen.pairs)
            ]
        print(f"{in_flight} in flight", flush=True)
        print(
            "  " + comparison("service", [(before.service_us, after.service_us) for before, after in pairs]), flush=True
        )
        if chosen.redis:
            print(
                "  " + comparison("Redis", [(before.redis_us, after.redis_us) for before, after in pairs]), flush=True
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
