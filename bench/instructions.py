"""`python -m bench.instructions`: instructions of the service per call, counted by callgrind.

Unlike times, counts are repeatable: the same code, calls and machine give the same figure within 1 %, however busy the
machine is. `--package DIRECTORY` measures another checkout of the package, or an unpacked wheel, with the same calls.
`--traffic` chooses them: two descriptors of requests that are repeated, edge traffic, never seen requests or new
combinations.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench import edge, wire, workload
from bench.connection import Connection, Target, connected
from bench.servers import LOOPBACK, ROOT, run_redis
from tests.support.ports import free_port

START_S = 180.0
"""Start timeout: callgrind is about fifty times slower."""

WARM_UP_ROUNDS = 30
RULES = """\
domain: bench
descriptors:
  - key: user
    rate_limit: {unit: hour, requests_per_unit: 4000000000}
  - key: path
    rate_limit: {unit: hour, requests_per_unit: 4000000000}
"""
_COLLECTED = re.compile(r"Collected : (\d+)")


def calls() -> Iterator[bytes]:
    """Yield requests of 32 users in a loop: after the warm-up, all are cached."""
    users = [
        wire.data(wire.rate_limit_request("bench", [[("user", f"user-{number}")], [("path", "/v1/things")]]))
        for number in range(32)
    ]
    return itertools.cycle(users)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Rules and calls of a measurement."""

    write_rules: Callable[[Path], object]
    calls: Callable[[], Iterator[bytes]]


def _write_rules(directory: Path) -> None:
    (directory / "rules.yaml").write_text(RULES)


TRAFFIC = {
    "seen": Traffic(_write_rules, calls),
    "edge": Traffic(partial(edge.write_rules, of_database=False), partial(edge.calls, 1)),
    "cold-2": Traffic(workload.write_rules, lambda: workload.cold(itertools.count(10**9), 2)),
    "cold-5": Traffic(workload.write_rules, lambda: workload.cold(itertools.count(10**9), 5)),
    "mixed-5": Traffic(workload.write_rules, partial(workload.mixed, 2, 5)),
}


def exchange(connection: Connection, in_flight: int, rounds: int, requests: Iterator[bytes]) -> None:
    """Send `in_flight` calls and wait for all responses, `rounds` times."""
    for _ in range(rounds):
        connection.send_calls(in_flight, requests)
        while connection.answered < connection.sent:
            select.select([connection.socket], [], [])
            connection.receive()


def measured(package: Path, in_flight: int, rounds: int, redis_url: str, traffic: Traffic) -> float:
    """Return the instructions per call, on the embedded store or on a Redis."""
    with tempfile.TemporaryDirectory() as directory:
        rules = Path(directory, "rules")
        rules.mkdir()
        traffic.write_rules(rules)
        port = free_port()
        variables = {
            **os.environ,
            "RLS_RULES": str(rules),
            "GRPC_PORT": str(port),
            "GRPC_HOST": LOOPBACK,
            "PORT": "0",
            "DEBUG_PORT": "0",
            "RLS_DRAIN_DELAY": "0s",
            "PYTHONHASHSEED": "0",
        }
        if redis_url:
            variables["REDIS_URL"] = redis_url
        command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--callgrind-out-file=out"]
        command += [sys.executable, "-m", "ratelimit_rls", "serve"]
        paths = {"PYTHONPATH": str(package), "VALGRIND_LAUNCHER": ""}
        with (Path(directory) / "log").open("wb") as log:
            process = subprocess.Popen(
                command, cwd=directory, env={**variables, **paths}, stdout=log, stderr=log, start_new_session=True
            )
        try:
            _until_it_listens(process, port, Path(directory, "log"))
            connection = Connection(Target((LOOPBACK, port)))
            requests = traffic.calls()
            connection.prime(requests, in_flight)
            exchange(connection, in_flight, WARM_UP_ROUNDS, requests)
            _control(process.pid, "--instr=on")
            exchange(connection, in_flight, rounds, requests)
            _control(process.pid, "--instr=off")
        finally:
            process.terminate()
            process.wait()
        counted = _COLLECTED.search(Path(directory, "log").read_text())
        assert counted is not None, "callgrind did not say what it counted"
        return int(counted[1]) / (rounds * in_flight)


def _control(pid: int, order: str) -> None:
    subprocess.run(["callgrind_control", order, str(pid)], check=True, capture_output=True)


def _until_it_listens(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s and process.poll() is None:
        try:
            connected((LOOPBACK, port)).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise SystemExit(f"the service did not start under callgrind:\n{log.read_text()}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.instructions", description=__doc__)
    parser.add_argument("--package", type=Path, default=ROOT, help="checkout or unpacked wheel (default: this one)")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 32], help="concurrent calls (default: 1 32)")
    parser.add_argument("--calls", type=int, default=3200, help="number of measured calls (default: 3200)")
    parser.add_argument("--redis", action="store_true", help="with the counters in a Redis (default: in the service)")
    parser.add_argument("--traffic", choices=list(TRAFFIC), default="seen", help="requests (default: seen)")
    chosen = parser.parse_args(arguments)
    if shutil.which("callgrind_control") is None:
        parser.error("valgrind is not installed")
    with ExitStack() as running:
        redis_url = ""
        if chosen.redis:
            directory = running.enter_context(tempfile.TemporaryDirectory())
            _, redis_url = running.enter_context(run_redis(Path(directory)))
        for in_flight in chosen.in_flight:
            rounds, traffic = max(1, chosen.calls // in_flight), TRAFFIC[chosen.traffic]
            counted = measured(chosen.package.resolve(), in_flight, rounds, redis_url, traffic)
            print(f"{in_flight:5} in flight: {counted:10,.0f} instructions a call", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
