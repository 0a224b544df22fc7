"""`python -m bench.soak`: hours of load on both stores, to see that memory stays where it is and no call fails.

Requests come from more callers than any cache holds and over new connections every minute, so what could pile up does.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from bench import cpu, workload
from bench.connection import LoadError, Target
from bench.load import Load
from tests.servers import RedisServer, Service

CALLERS = 400_000
STRETCH_S = 30.0
MOST_GROWTH = 1.10


def resident_bytes(pid: int) -> int:
    """Memory of a process and those it started, as the kernel counts it."""
    pages = [int(Path(f"/proc/{one}/statm").read_text().split()[1]) for one in cpu.family(pid)]
    return sum(pages) * 4096


def stretch(service: Service, calls: list[bytes], seconds: float) -> tuple[float, int]:
    """One connection's life: calls per second, and what the service held at its end."""
    with Load(Target(("127.0.0.1", service.grpc_port)), calls, in_flight=64, connections=4) as load:
        tally = load.run(seconds)
        load.drain()
    return tally.calls / tally.seconds, resident_bytes(service.pid)


def soak(minutes: float, directory: Path) -> int:
    workload.write_rules(directory)
    calls = workload.requests(2, CALLERS)
    with ExitStack() as running:
        redis = running.enter_context(RedisServer())
        rules = {"RLS_RULES": directory, "RLS_EMBEDDED_MEMORY_BYTES": 64 << 20}
        services = {
            "embedded": running.enter_context(Service(rules)),
            "redis": running.enter_context(Service({**rules, "REDIS_URL": redis.address})),
        }
        held: dict[str, list[int]] = {name: [] for name in services}
        rounds = max(3, round(minutes * 60 / (STRETCH_S * len(services))))
        seconds = min(STRETCH_S, minutes * 60 / rounds / len(services))
        for number in range(1, rounds + 1):
            for name, service in services.items():
                rate, memory = stretch(service, calls, seconds)
                held[name].append(memory)
                print(f"{number:4}/{rounds}  {name:9}{rate:9,.0f} calls/s  {memory >> 20:5} MiB", flush=True)
        return verdict(held)


def verdict(held: dict[str, list[int]]) -> int:
    """The first third fills the caches; from then on memory may not grow by more than a tenth."""
    grew = 0
    for name, memory in held.items():
        settled, last = max(memory[: len(memory) // 3 + 1]), memory[-1]
        within = last <= settled * MOST_GROWTH
        grew += not within
        print(
            f"{name}: {settled >> 20} MiB when settled, {last >> 20} MiB at the end: {'ok' if within else 'IT GROWS'}"
        )
    return 1 if grew else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long in all (default: 60)")
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        try:
            return soak(parser.parse_args().minutes, Path(directory))
        except LoadError as error:
            print(f"a call failed: {error}", file=sys.stderr)
            return 1


if __name__ == "__main__":
    sys.exit(main())
