"""What a run says: a table with spreads and ratios, how the load fared, and whether the targets were met."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from statistics import median

from bench.measure import LOAD_CORE, SERVICE_CORE, Measurement, Plan
from bench.scenarios import CALLERS, CHECKS, ECHO, EMBEDDED_2, REDIS_2, Scenario, Server

Results = Mapping[Scenario, Sequence[Measurement]]

ECHO_TARGET = 3.0
TLS_TARGET = 1.5
RECORDS_TARGET = 1.15
FULL = 0.95


def ratios(over: Sequence[Measurement], under: Sequence[Measurement]) -> list[float]:
    """Service CPU per call of one scenario over that of another, round by round."""
    return [one.service_us / other.service_us for one, other in zip(over, under, strict=True)]


def table(results: Results) -> str:
    """One line per scenario: medians, and in brackets the least and the most of all rounds."""
    header = ("scenario", "calls/s", "service µs", "÷ echo", "Redis µs", "load µs", "answers/read", "core 0", "core 1")
    rows = [header, *(_row(scenario, rounds, results.get(ECHO)) for scenario, rounds in results.items())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("─" * width for width in widths))
    return "\n".join(lines)


def _row(scenario: Scenario, rounds: Sequence[Measurement], echo: Sequence[Measurement] | None) -> tuple[str, ...]:
    return (
        scenario.name,
        _spread((one.calls_per_s for one in rounds), ",.0f"),
        _spread((one.service_us for one in rounds), ".1f"),
        _spread(ratios(rounds, echo), ".2f") if echo else "",
        _spread((one.redis_us for one in rounds), ".1f") if scenario.uses_redis else "",
        _spread((one.load_us for one in rounds), ".1f"),
        f"{median(one.answers_per_read for one in rounds):.1f}",
        _shares((one.service_share for one in rounds), (one.others_on_service_core for one in rounds)),
        _shares((one.load_share for one in rounds), (one.others_on_load_core for one in rounds)),
    )


def _spread(values: Iterable[float], form: str) -> str:
    ordered = sorted(values)
    middle = format(median(ordered), form)
    return middle if len(ordered) == 1 else f"{middle} ({ordered[0]:{form}}..{ordered[-1]:{form}})"


def _shares(ours: Iterable[float], others: Iterable[float]) -> str:
    return f"{median(ours):.0%} + {median(others):.0%}"


def reading(results: Results) -> str:
    """How to read the table, and how it was seen that the load was not what was measured."""
    every = [one for rounds in results.values() for one in rounds]
    full = sum(one.service_share >= FULL for one in every)
    busiest = max(every, key=lambda one: one.calls_per_s)
    return "\n".join(
        (
            f"Each server alone on core {SERVICE_CORE}; Redis and the load on core {LOAD_CORE}."
            " Medians, and (least..most) of the rounds. CPU is user + system of all threads, per call.",
            "core 0: share of the service + of anything else. core 1: share of load and Redis + of anything else.",
            "answers/read: how many answers the load found at once. Where there are few, both sides paid for more"
            " system calls; a TLS pipe gathers answers, so larger writes pay back part of what TLS costs.",
            f"The load at its busiest ({busiest.calls_per_s:,.0f} calls/s) spent {busiest.load_us:.1f} µs a call,"
            f" so a core of its own would do for {1e6 / busiest.load_us:,.0f} calls/s;"
            f" with Redis beside it, it used at most {max(one.load_share for one in every):.0%} of core {LOAD_CORE}.",
            f"The server filled core {SERVICE_CORE} in {full} of {len(every)} measurements; in the others it waited"
            " or shared the core, and calls/s is a lower bound, while CPU per call stands.",
        )
    )


def verdicts(results: Results) -> list[str]:
    """The targets, and what was measured beside them."""
    lines = _verdict("redis, 2 descriptors ÷ bare echo", results, REDIS_2, ECHO, ECHO_TARGET)
    for label, plain in (
        ("redis, 2 descriptors", REDIS_2),
        ("embedded, 2 descriptors", EMBEDDED_2),
        ("bare echo", ECHO),
    ):
        lines += _verdict(f"TLS ÷ plaintext, {label}", results, replace(plain, tls=True), plain, TLS_TARGET)
    for label, without in (("RLS", CALLERS), ("ext_authz", CHECKS)):
        with_records = replace(without, records=True)
        lines += _verdict(f"identity and records ÷ neither, {label}", results, with_records, without, RECORDS_TARGET)
        lines += _commands(label, results, with_records, without)
    for theirs in results:
        if theirs.server is Server.PEER:
            lines += _versus(results, replace(theirs, server=Server.REDIS), theirs)
    return lines


def _verdict(label: str, results: Results, over: Scenario, under: Scenario, at_most: float) -> list[str]:
    if over not in results or under not in results:
        return []
    measured = ratios(results[over], results[under])
    word = "met" if median(measured) <= at_most else "MISSED"
    return [f"{label}: {_spread(measured, '.2f')} (at most {at_most:g}: {word})"]


def _commands(label: str, results: Results, over: Scenario, under: Scenario) -> list[str]:
    """What Redis was asked with and without, per call: a command of its own, or more of one, would be a round trip."""
    if over not in results or under not in results:
        return []
    told = []
    for name in sorted(
        {name for scenario in (under, over) for one in results[scenario] for name in one.redis_commands}
    ):
        without, with_records = (
            median(one.redis_commands.get(name, 0.0) for one in results[scenario]) for scenario in (under, over)
        )
        told.append(f"{name} {without:.3f} → {with_records:.3f}")
    return [f"  Redis commands a call, {label}, without → with: {', '.join(told)}"]


def _versus(results: Results, ours: Scenario, theirs: Scenario) -> list[str]:
    if ours not in results:
        return []
    pairs = list(zip(results[ours], results[theirs], strict=True))
    return [
        f"{ours.name} ÷ {theirs.name}:"
        f" calls/s {_spread((one.calls_per_s / other.calls_per_s for one, other in pairs), '.2f')},"
        f" service µs {_spread((one.service_us / other.service_us for one, other in pairs), '.2f')},"
        f" Redis µs {_spread((one.redis_us / other.redis_us for one, other in pairs), '.2f')}"
    ]


def write_json(path: Path, plan: Plan, results: Results) -> None:
    """Everything that was measured, and on what."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "machine": {"platform": platform.platform(), "processor": _processor(), "python": sys.version.split()[0]},
        "versions": {name: version(name) for name in ("grpcio", "pygrpc-native", "protobuf", "redis", "lupa")},
        "load": {"in_flight": plan.in_flight, "connections": plan.connections, "most_keys": plan.most_keys},
        "seconds": plan.seconds,
        "scenarios": {scenario.name: [asdict(one) for one in rounds] for scenario, rounds in results.items()},
        "verdicts": verdicts(results),
    }
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
