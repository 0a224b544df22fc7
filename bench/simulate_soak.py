"""`python -m bench.simulate_soak`: memory of `ratelimit-rls simulate` on a log of ten million lines.

The log is streamed through a pipe and never on disk. Requirements: every line is replayed, and the memory of all
processes is within its bound and does not grow in the second half.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from ctypes import c_int64
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

from bench.cpu import resident_bytes

LINES = 10_000_000
CALLERS = 1_000_000
LINES_PER_SECOND = 1_000  # in the time of the log
MAX_BYTES = 900 * 2**20
"""Maximum memory per rule set. Counters, cached requests and buffered lines have bounds of 256, 64 and a few MiB; the
rest is overhead of Lua and Python."""

MAX_GROWTH = 0.05
LOOK_EVERY_S = 0.25
REPORT_INTERVAL_S = 10.0

RULES = """\
domain: soak
descriptors:
  - {key: user, rate_limit: {unit: minute, requests_per_unit: 5}}
  - {key: path, rate_limit: {unit: second, requests_per_unit: 400, algorithm: gcra}}
"""
OTHER_RULES = RULES.replace("requests_per_unit: 5,", "requests_per_unit: 8,")
COMMAND = ("simulate", "rules.yaml", "--traffic", "access.log", "--format", "json", "--domain", "soak")
AGAINST = ("--against", "other.yaml")
DESCRIPTORS = ("--descriptor", "user=%user%", "--descriptor", "path=%path%")


@dataclass(slots=True)
class Record:
    lines: int
    rule_sets: int = 1
    calls: int = 0
    took_s: float = 0.0
    looks_bytes: list[int] = field(default_factory=list)

    @property
    def peak_bytes(self) -> int:
        return max(self.looks_bytes, default=0)

    @property
    def growth(self) -> float:
        """Growth from the peak of the first half to that of the second."""
        half = len(self.looks_bytes) // 2
        return max(self.looks_bytes[half:]) / max(self.looks_bytes[:half]) - 1 if half else 0.0

    @property
    def well(self) -> bool:
        within = self.peak_bytes <= MAX_BYTES * self.rule_sets
        return self.calls == self.lines and within and self.growth <= MAX_GROWTH


def write_log(path: str, lines: int, written: Synchronized[int]) -> None:
    drawn = random.Random(1)
    start = datetime(2024, 3, 1, tzinfo=UTC)
    with open(path, "w") as log, suppress(BrokenPipeError):  # the reader has exited and reports the error itself
        for number in range(lines):
            if number % LINES_PER_SECOND == 0:
                second = (start + timedelta(seconds=number // LINES_PER_SECOND)).strftime("%Y-%m-%dT%H:%M:%S")
                written.value = number
            user = int(drawn.random() ** 4 * CALLERS)
            log.write(
                f'{{"start_time": "{second}.{number % 1000:03}Z", "method": "GET", "path": "/{user % 7}", '
                f'"user": "user-{user}", "response_code": 200, "duration": 12, "request_id": "{number:032x}"}}\n'
            )


def soak(lines: int, *, against: bool = False) -> Record:
    record = Record(lines, rule_sets=2 if against else 1)
    spawn = multiprocessing.get_context("spawn")
    written: Synchronized[int] = spawn.Value(c_int64)
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "rules.yaml").write_text(RULES)
        Path(directory, "other.yaml").write_text(OTHER_RULES)
        os.mkfifo(Path(directory, "access.log"))
        writer = spawn.Process(target=write_log, args=(str(Path(directory, "access.log")), lines, written))
        writer.start()
        command = [sys.executable, "-m", "ratelimit_rls", *COMMAND, *DESCRIPTORS, *(AGAINST if against else ())]
        simulating = subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, text=True, env=_environment())
        watching = threading.Thread(target=_watch, args=(simulating, record, lambda: written.value), daemon=True)
        watching.start()
        printed, _ = simulating.communicate()
        watching.join()
        writer.terminate()
        writer.join()
    if simulating.returncode == 0:
        reported = json.loads(printed)
        record.calls, record.took_s = reported["calls"], reported["took_s"]
    return record


def _environment() -> dict[str, str]:
    """Return an environment that uses the package of this checkout."""
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}


def _watch(process: subprocess.Popen[str], record: Record, lines: Callable[[], int]) -> None:
    """Sample the memory, and print the progress periodically."""
    began = reported = time.monotonic()
    lines_reported = 0
    while process.poll() is None:
        with suppress(OSError, IndexError):  # it ended meanwhile
            record.looks_bytes.append(resident_bytes(process.pid))
        time.sleep(LOOK_EVERY_S)
        now = time.monotonic()
        if now - reported >= REPORT_INTERVAL_S:
            done = lines()
            rate, memory = (done - lines_reported) * 60 / (now - reported), record.looks_bytes[-1] >> 20
            print(f"{now - began:6.0f} s{done:12,} lines{rate:12,.0f} a minute{memory:6} MiB", flush=True)
            reported, lines_reported = now, done


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.simulate_soak", description=__doc__)
    parser.add_argument("--lines", type=int, default=LINES)
    parser.add_argument("--against", action="store_true", help="compare two rule sets")
    chosen = parser.parse_args(arguments)
    record = soak(chosen.lines, against=chosen.against)
    rate = record.calls * 60 / record.took_s if record.took_s else 0
    verdict = "ok" if record.well else "NOT OK"
    print(
        f"simulate: {record.calls:,} of {record.lines:,} lines in {record.took_s:.0f} s ({rate:,.0f} a minute), "
        f"at most {record.peak_bytes >> 20} MiB, {record.growth:+.1%} since half time: {verdict}"
    )
    return 0 if record.well else 1


if __name__ == "__main__":
    sys.exit(main())
