"""Report of a run: a table with spreads and ratios, load, latencies and start times, and all of it as JSON."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from statistics import median

from bench.fleet import LOAD_CORE, SERVICE_CORE, Start
from bench.latency import Latencies
from bench.measure import Bench, Measurement, Plan
from bench.resources import Resources
from bench.scenarios import ECHO, EMBEDDED_2, MANY_RULES, REDIS_2, Scenario, Server, of_peer
from bench.servers import redis_version
from bench.spread import spread
from bench.verdicts import Results, calls_per_s, ratios, verdicts

FULL = 0.95

FEW_RULES = 10
MAX_START_S, MAX_IDLE_MIB = 1.5, 143  # 150 MB
MAX_LOAD_S = 5
"""Maximum start time with any number of rules."""


def table(results: Results) -> str:
    """Return a table with one line per scenario: medians, and minimum and maximum in brackets."""
    columns = ("scenario", "calls/s", "service µs", "÷ echo", "Redis µs", "Envoy µs", "load µs", "answers/read")
    header = (*columns, "core 0", "core 1")
    rows = [header, *(_row(scenario, rounds, results.get(ECHO)) for scenario, rounds in results.items())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("─" * width for width in widths))
    return "\n".join(lines)


def _row(scenario: Scenario, rounds: Sequence[Measurement], echo: Sequence[Measurement] | None) -> tuple[str, ...]:
    has_server = scenario.server is not Server.ENVOY
    return (
        scenario.name,
        spread((one.calls_per_s for one in rounds), ",.0f"),
        spread((one.service_us for one in rounds), ".1f") if has_server else "",
        spread(ratios(rounds, echo), ".2f") if echo and has_server else "",
        spread((one.redis_us for one in rounds), ".1f") if scenario.uses_redis else "",
        spread((one.envoy_us for one in rounds), ".1f") if scenario.has_envoy else "",
        spread((one.load_us for one in rounds), ".1f"),
        f"{median(one.answers_per_read for one in rounds):.1f}",
        _shares((one.service_share for one in rounds), (one.others_on_service_core for one in rounds)),
        _shares((one.load_share for one in rounds), (one.others_on_load_core for one in rounds)),
    )


def _shares(own: Iterable[float], others: Iterable[float]) -> str:
    return f"{median(own):.0%} + {median(others):.0%}"


def reading(results: Results) -> str:
    """Return notes on the table, including whether the load was the bottleneck."""
    every = [one for rounds in results.values() for one in rounds]
    loaded = [scenario for scenario in results if scenario.server is not Server.ENVOY and not scenario.is_timed]
    serving = [one for scenario in loaded for one in results[scenario]]
    full = sum(one.service_share >= FULL for one in serving)
    busiest = max(every, key=calls_per_s)
    max_of_core = max(one.load_share for one in every)
    return "\n".join(
        (
            f"Each server alone on core {SERVICE_CORE}; Redis, Envoy and the load on core {LOAD_CORE}."
            " Medians, and (least..most) of the rounds. CPU is user + system of all threads, per call.",
            "core 0: share of the service + of anything else. core 1: share of load, Redis and Envoy + of anything"
            " else.",
            "answers/read: how many answers the load found at once. Where there are few, both sides paid for more"
            " system calls.",
            f"The load at its busiest ({busiest.calls_per_s:,.0f} calls/s) spent {busiest.load_us:.1f} µs a call,"
            f" so a core of its own would do for {1e6 / busiest.load_us:,.0f} calls/s;"
            f" with Redis or Envoy beside it, it used at most {max_of_core:.0%} of core {LOAD_CORE}.",
            f"The server filled core {SERVICE_CORE} in {full} of {len(serving)} measurements with many calls in flight;"
            " in the others it waited or shared the core, and calls/s is a lower bound, while CPU per call stands.",
        )
    )


def latencies(of: Mapping[Scenario, Latencies]) -> list[str]:
    """Return the latencies from due time, at a rate that all of these servers sustain."""
    result = [
        f"{scenario.name} at {one.per_s:,.0f} calls/s: {one};"
        f" {one.late_share:.1%} of the calls were sent late by the load itself"
        for scenario, one in of.items()
    ]
    for scenario, one in of.items():
        reference = of.get(of_peer(scenario))
        if scenario.server is Server.REDIS and reference is not None:
            pairs = {name: us / reference.percentiles_us[name] for name, us in one.percentiles_us.items()}
            judged = ", ".join(f"{name} {ratio:.2f} {_judged(ratio, 1)}" for name, ratio in pairs.items())
            result.append(f"{scenario.name}: our latencies ÷ the reference's: {judged}")
    return result


def _judged(measured: float, most: float, unit: str = "") -> str:
    return f"(at most {most:g}{unit}: {'met' if measured <= most else 'MISSED'})"


def starts(of: Mapping[Scenario, Start]) -> list[str]:
    """Return start times and memory before the first call."""
    result = [scenario for scenario in (REDIS_2, EMBEDDED_2, *MANY_RULES) if scenario in of]
    return [_start(one, of[one].took_s, of[one].resident_bytes / 2**20) for one in result]


def _start(scenario: Scenario, took_s: float, mib: float) -> str:
    has_many = scenario.rules.others > FEW_RULES
    max_s, max_mib = (MAX_LOAD_S, None) if has_many else (MAX_START_S, MAX_IDLE_MIB)
    memory = f"{mib:.0f} MiB" + ("" if max_mib is None else f" {_judged(mib, max_mib)}")
    return f"{scenario.name}: served {took_s:.2f} s after exec {_judged(took_s, max_s, ' s')}, with {memory}"


def write_json(path: Path, plan: Plan, results: Results, bench: Bench, resources: Resources) -> None:
    """Write all measurements and the description of the machine as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "machine": {
            "platform": platform.platform(),
            "processor": _processor(),
            "python": sys.version.split()[0],
            "redis": redis_version(),
        },
        "versions": {name: version(name) for name in ("grpcio", "pygrpc-native", "protobuf", "redis", "lupa")},
        "load": {"in_flight": plan.in_flight, "max_keys": plan.max_keys},
        "seconds": plan.seconds,
        "scenarios": {scenario.name: [asdict(one) for one in rounds] for scenario, rounds in results.items()},
        "latencies": {scenario.name: asdict(one) for scenario, one in bench.latencies.items()},
        "starts": {scenario.name: asdict(start) for scenario, start in bench.starts.items()},
        "verdicts": verdicts(results),
        "instructions": {case.name: asdict(one) for case, one in resources.instructions.items()},
        "capacity_redis_us": {case.name: us for case, us in resources.redis_us.items()},
        "memory": {case.name: asdict(one) for case, one in resources.memory.items()},
    }
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
