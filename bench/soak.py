"""`python -m bench.soak`: maximum load from a million callers on each store in turn, for a configurable time.

There are more callers than fit into the cache, and new connections every minute. Requirements: every call gets a
response, and memory does not grow in the second half.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from bench import workload
from bench.connection import LoadError, Target
from bench.cpu import resident_bytes
from bench.load import Load
from tests.support.servers import RedisServer, Service

CALLERS = 1_000_000
MINUTE_S = 60.0
MAX_GROWTH = 0.03
LOOKS = 12  # memory samples per minute: the garbage collector of the embedded store makes it fluctuate


@dataclass(slots=True)
class Record:
    """Results of one store, per minute."""

    peaks_bytes: list[int] = field(default_factory=list)
    errors: int = 0

    @property
    def growth(self) -> float:
        """Relative growth from half time to the end."""
        half_time = self.peaks_bytes[len(self.peaks_bytes) // 2]
        return self.peaks_bytes[-1] / half_time - 1

    @property
    def well(self) -> bool:
        return not self.errors and self.growth <= MAX_GROWTH


def soak(name: str, service: Service, calls: Sequence[bytes], minutes: int, minute_s: float) -> Record:
    """Run the load, and print a line per minute."""
    record = Record()
    start = 0
    for minute in range(1, minutes + 1):
        answered, peak_bytes = 0, 0
        try:
            # Continue where the previous minute ended, so that the least recent caller is next.
            load_calls = [*calls[start:], *calls[:start]]
            with Load(Target(("127.0.0.1", service.grpc_port)), load_calls, in_flight=64, connections=4) as load:
                for _ in range(LOOKS):
                    answered += load.run(minute_s / LOOKS).calls
                    peak_bytes = max(peak_bytes, resident_bytes(service.pid))
                load.drain()
        except (LoadError, OSError) as error:
            record.errors += 1
            print(f"{name:9}{error}", flush=True)
            if not service.running:
                sys.exit(f"the service on {name} died:\n{service.log()[-2000:]}")
        start = (start + answered) % len(calls)
        record.peaks_bytes.append(peak_bytes or resident_bytes(service.pid))
        rate, memory = answered / minute_s, record.peaks_bytes[-1] >> 20
        print(f"{name:9}{minute:4}/{minutes}{rate:9,.0f} calls/s{memory:6} MiB  {record.errors} errors", flush=True)
    return record


def verdict(records: dict[str, Record]) -> int:
    """Print the verdict of each store; return the exit code."""
    for name, record in records.items():
        outcome = "ok" if record.well else "NOT OK"
        print(f"{name}: {record.errors} errors, {record.growth:+.1%} memory since half time: {outcome}")
    return 0 if all(record.well for record in records.values()) else 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument("--minutes", type=int, default=30, help="minutes on each store (default: 30)")
    parser.add_argument("--stores", nargs="+", choices=["redis", "embedded"], default=["redis", "embedded"])
    parser.add_argument("--callers", type=int, default=CALLERS, help="number of different callers (default: a million)")
    parser.add_argument("--minute", type=float, default=MINUTE_S, help="length of a minute in seconds, for testing")
    chosen = parser.parse_args(arguments)
    calls = workload.requests(1, chosen.callers)
    records = {}
    for store in chosen.stores:
        with ExitStack() as running, tempfile.TemporaryDirectory(prefix="soak-") as directory:
            workload.write_rules(Path(directory))
            variables: dict[str, object] = {"RLS_RULES": directory}
            if store == "redis":
                variables["REDIS_URL"] = running.enter_context(RedisServer()).address
            service = running.enter_context(Service(variables))
            records[store] = soak(store, service, calls, chosen.minutes, chosen.minute)
    return verdict(records)


if __name__ == "__main__":
    sys.exit(main())
