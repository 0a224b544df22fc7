"""`python -m bench.pairs --before DIRECTORY`: CPU per call of two checkouts, in interleaved pairs.

Both use the embedded store. Each runs on core 0 while it is measured, and is stopped (SIGSTOP) while the other is. The
load has core 1. Within a pair the two alternate in short slices, so that changes of the machine's speed affect both.
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
from contextlib import contextmanager, suppress
from pathlib import Path

from bench.connection import Target, connected
from bench.cpu import process_s
from bench.instructions import RULES, calls
from bench.load import Load
from bench.servers import LOOPBACK, ROOT
from tests.support.ports import free_port

START_S = 30.0
WARM_UP_S = 1.0


class Service:
    """A running service of one checkout, with its load."""

    def __init__(self, pid: int, port: int, in_flight: int) -> None:
        self._pid = pid
        self._load = Load(Target((LOOPBACK, port)), calls(), in_flight, connections=min(4, in_flight))
        self._load.run(WARM_UP_S)
        os.kill(pid, signal.SIGSTOP)

    def measure(self, seconds: float) -> tuple[float, int]:
        """Return the CPU seconds of one slice and its number of responses."""
        os.kill(self._pid, signal.SIGCONT)
        self._load.run(seconds / 10)
        before_s = process_s(self._pid)
        tally = self._load.run(seconds)
        spent_s = process_s(self._pid) - before_s
        os.kill(self._pid, signal.SIGSTOP)
        return spent_s, tally.calls


def measured_pair(before: Service, after: Service, seconds: float, slices: int) -> tuple[float, float]:
    """Return the CPU microseconds per call, before and after; the order alternates from slice to slice."""
    spent = {before: [0.0, 0.0], after: [0.0, 0.0]}
    for number in range(slices):
        for service in (before, after) if number % 2 else (after, before):
            cpu_s, answered = service.measure(seconds / slices)
            spent[service][0] += cpu_s
            spent[service][1] += answered
    return spent[before][0] / spent[before][1] * 1e6, spent[after][0] / spent[after][1] * 1e6


@contextmanager
def run_service(package: Path, in_flight: int, directory: Path) -> Iterator[Service]:
    rules = directory / "rules.yaml"
    rules.write_text(RULES)
    port = free_port()
    variables = {"RLS_RULES": str(rules), "GRPC_HOST": LOOPBACK, "GRPC_PORT": str(port), "PORT": "0", "DEBUG_PORT": "0"}
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
        yield Service(process.pid, port, in_flight)
    finally:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGCONT)
        process.terminate()
        process.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.pairs", description=__doc__)
    parser.add_argument("--before", type=Path, required=True, help="checkout to compare with")
    parser.add_argument("--pairs", type=int, default=10, help="number of pairs (default: 10)")
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds of each half of a pair (default: 3)")
    parser.add_argument("--slices", type=int, default=10, help="slices of each side in a pair (default: 10)")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 256], help="concurrent calls (default: 1 256)")
    chosen = parser.parse_args(arguments)
    os.sched_setaffinity(0, {1})
    for in_flight in chosen.in_flight:
        with (
            tempfile.TemporaryDirectory() as one,
            tempfile.TemporaryDirectory() as other,
            run_service(chosen.before.resolve(), in_flight, Path(one)) as before,
            run_service(ROOT, in_flight, Path(other)) as after,
        ):
            pairs = [measured_pair(before, after, chosen.seconds, chosen.slices) for _ in range(chosen.pairs)]
        ratios = sorted(after / before for before, after in pairs)
        medians = [statistics.median(side) for side in zip(*pairs, strict=True)]
        print(
            f"{in_flight:5} in flight: {medians[0]:.1f} → {medians[1]:.1f} µs a call, "
            f"after ÷ before {statistics.median(ratios):.3f} ({ratios[0]:.3f}..{ratios[-1]:.3f}, {len(pairs)} pairs)",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
