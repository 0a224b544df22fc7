"""`python -m bench.distinct_callers`: memory and latencies over a million callers, each of whom calls once.

Calls are those of an edge (bench/edge.py), come at a fixed rate over four connections, and are decided with the default
settings on a Redis. RSS must stay below 250 MB, and p99 must be flat. Memory per cached request is the growth of RSS
over the first callers, all of whose requests fit into the cache.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median

from bench import cpu, edge, wire
from bench.connection import Target
from bench.fleet import LOAD_CORE, SERVICE_CORE
from bench.latency import Latencies
from bench.measure import PrebuiltCalls
from bench.pace import PacedLoad
from bench.servers import Servers

CALLERS, SECONDS, INTERVALS = 1_000_000, 600.0, 10
WARM_UP_CALLS = 2_000
CACHED_CALLS = 20_000
"""Calls over which memory per cached request is measured, if there are four times as many callers."""

CACHED_SHARE = 4
MAX_RSS_BYTES = 250_000_000
MAX_P99_GROWTH = 1.25
"""Maximum median p99 of the second half of the intervals ÷ that of the first half."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Latencies of a part of the calls, and memory at its end."""

    latencies: Latencies
    rss_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.latencies.calls:,} callers at {self.latencies.per_s:,.0f} calls/s: {self.latencies},"
            f" {self.latencies.late_share:.1%} sent late by the load itself; RSS {self.rss_bytes / 1e6:.0f} MB"
        )


@dataclass(frozen=True, slots=True)
class CallersMeasurement:
    """Result of a run."""

    start_bytes: int  # RSS before the first call
    cached_request_bytes: float
    callers: int
    intervals: tuple[Interval, ...]

    @property
    def end_bytes(self) -> int:
        return self.intervals[-1].rss_bytes

    @property
    def most_bytes(self) -> int:
        return max(one.rss_bytes for one in self.intervals)

    @property
    def p99_growth(self) -> float:
        """Median p99 of the second half ÷ that of the first half."""
        p99s = [one.latencies.p99_us for one in self.intervals]
        middle = len(p99s) // 2
        return median(p99s[middle:]) / median(p99s[:middle] or p99s)

    @property
    def is_within_target(self) -> bool:
        return self.most_bytes <= MAX_RSS_BYTES and self.p99_growth <= MAX_P99_GROWTH

    def lines(self) -> list[str]:
        """Return the verdicts."""
        rss = "met" if self.most_bytes <= MAX_RSS_BYTES else "MISSED"
        p99 = "met" if self.p99_growth <= MAX_P99_GROWTH else "MISSED"
        return [
            f"{self.callers:,} distinct callers: RSS {self.start_bytes / 1e6:.0f} MB at start,"
            f" {self.end_bytes / 1e6:.0f} at the end, never more than {self.most_bytes / 1e6:.0f}"
            f" (at most {MAX_RSS_BYTES / 1e6:.0f}: {rss}), {self.cached_request_bytes:,.0f} bytes per cached request",
            f"  p99 of the second half ÷ the first: {self.p99_growth:.2f} (at most {MAX_P99_GROWTH:g}: {p99});"
            f" ms: {', '.join(f'{one.latencies.p99_us / 1e3:.1f}' for one in self.intervals)}",
        ]


def distinct_calls(first: int = 0, seed: int = 1) -> Iterator[bytes]:
    """Yield a DATA frame of each user of the edge in turn."""
    random = Random(seed)
    user = first
    while True:
        path = edge.drawn_rank(random.random(), edge.PATHS)
        yield wire.data(edge.request(user, path, random.choice(edge.METHODS), random.randrange(4)))
        user += 1


def measure(
    directory: Path, callers: int, seconds: float, intervals: int, progress: Callable[[str], None]
) -> CallersMeasurement:
    """Start a service and a Redis, and make one call of each caller. `progress` receives each interval."""
    servers = Servers(directory, SERVICE_CORE, LOAD_CORE)
    os.sched_setaffinity(0, {LOAD_CORE})
    try:
        edge.write_rules(directory, of_database=False)
        service = servers.service("distinct-callers", directory, servers.redis().url, {})
        start_bytes = cpu.resident_bytes(service.pid)
        calls, per_s = PrebuiltCalls(distinct_calls()), callers / seconds
        with PacedLoad(Target(service.address), calls) as load:
            load.run(per_s, WARM_UP_CALLS / per_s)
            warm_bytes, cached = cpu.resident_bytes(service.pid), min(CACHED_CALLS, callers // CACHED_SHARE)
            load.run(per_s, cached / per_s)
            cached_request_bytes = (cpu.resident_bytes(service.pid) - warm_bytes) / cached
            measured = []
            rest = callers - WARM_UP_CALLS - cached
            for _ in range(intervals):
                calls.build(rest // intervals)
                latencies = load.run(per_s, rest / intervals / per_s)
                measured.append(Interval(latencies, cpu.resident_bytes(service.pid)))
                progress(str(measured[-1]))
        return CallersMeasurement(start_bytes, cached_request_bytes, callers, tuple(measured))
    finally:
        servers.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.distinct_callers", description=__doc__)
    parser.add_argument("--callers", type=int, default=CALLERS, help="number of callers (default: a million)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time for all calls (default: ten minutes)")
    parser.add_argument("--intervals", type=int, default=INTERVALS, help="parts that are reported (default: 10)")
    chosen = parser.parse_args(arguments)
    if chosen.callers <= 2 * WARM_UP_CALLS or chosen.seconds <= 0 or chosen.intervals < 1:
        parser.error(f"more than {2 * WARM_UP_CALLS} callers, some time and an interval are needed")
    gc.disable()  # a garbage collection in the load would look like a pause of the service
    with tempfile.TemporaryDirectory(prefix="distinct-callers-") as directory:
        measured = measure(
            Path(directory), chosen.callers, chosen.seconds, chosen.intervals, lambda text: print(text, flush=True)
        )
    print(*measured.lines(), sep="\n")
    return 0 if measured.is_within_target else 1


if __name__ == "__main__":
    sys.exit(main())
