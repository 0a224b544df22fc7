"""What a run says: a table with spreads and ratios, how the load fared, and whether the targets were met."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from statistics import median

from bench.fleet import LOAD_CORE, SERVICE_CORE, Start
from bench.measure import Bench, Measurement, Plan
from bench.pace import Latencies
from bench.scenarios import (
    ALGORITHMS,
    ALL_REFUSED,
    CALLERS,
    CHECKS,
    DESCRIPTORS,
    ECHO,
    EMBEDDED_2,
    ENVOY_ALONE,
    FIXED_WINDOW,
    MANY_RULES,
    NEVER_SEEN,
    REDIS_2,
    THROUGH_ENVOY,
    TWO_WORKERS,
    Scenario,
    Server,
    Way,
    with_everything,
    with_records,
)

Results = Mapping[Scenario, Sequence[Measurement]]

FULL = 0.95

VERSUS = {
    (1, False): (2, 0.45, 0.45),
    (2, False): (2, 0.45, 0.6),
    (5, False): (1.8, 0.5, 0.85),
    **{(descriptors, True): (2.5, 0.35, 0.2) for descriptors in DESCRIPTORS},
}
"""By descriptors, and whether one key is hot: ours ÷ theirs, at least so many calls a second, and at most so much CPU
of the service and of Redis."""


def service_us(one: Measurement) -> float:
    return one.service_us


def redis_us(one: Measurement) -> float:
    return one.redis_us


def envoy_us(one: Measurement) -> float:
    return one.envoy_us


def calls_per_s(one: Measurement) -> float:
    return one.calls_per_s


def ratios(
    over: Sequence[Measurement],
    under: Sequence[Measurement],
    cost: Callable[[Measurement], float] = service_us,
) -> list[float]:
    """What a call costs in one scenario over what it costs in another, round by round."""
    return [cost(one) / cost(other) for one, other in zip(over, under, strict=True)]


def table(results: Results) -> str:
    """One line per scenario: medians, and in brackets the least and the most of all rounds."""
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
        _spread((one.calls_per_s for one in rounds), ",.0f"),
        _spread((one.service_us for one in rounds), ".1f") if has_server else "",
        _spread(ratios(rounds, echo), ".2f") if echo and has_server else "",
        _spread((one.redis_us for one in rounds), ".1f") if scenario.uses_redis else "",
        _spread((one.envoy_us for one in rounds), ".1f") if scenario.has_envoy else "",
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
    serving = [one for scenario, rounds in results.items() if scenario.server is not Server.ENVOY for one in rounds]
    full = sum(one.service_share >= FULL for one in serving)
    busiest = max(every, key=calls_per_s)
    most_of_core = max(one.load_share for one in every)
    return "\n".join(
        (
            f"Each server alone on core {SERVICE_CORE}; Redis, Envoy and the load on core {LOAD_CORE}."
            " Medians, and (least..most) of the rounds. CPU is user + system of all threads, per call.",
            "core 0: share of the service + of anything else. core 1: share of load, Redis and Envoy + of anything"
            " else.",
            "answers/read: how many answers the load found at once. Where there are few, both sides paid for more"
            " system calls; a TLS pipe gathers answers, so larger writes pay back part of what TLS costs.",
            f"The load at its busiest ({busiest.calls_per_s:,.0f} calls/s) spent {busiest.load_us:.1f} µs a call,"
            f" so a core of its own would do for {1e6 / busiest.load_us:,.0f} calls/s;"
            f" with Redis or Envoy beside it, it used at most {most_of_core:.0%} of core {LOAD_CORE}.",
            f"The server filled core {SERVICE_CORE} in {full} of {len(serving)} measurements; in the others it waited"
            " or shared the core, and calls/s is a lower bound, while CPU per call stands.",
        )
    )


@dataclass(frozen=True, slots=True)
class Target:
    """What one scenario may cost at most, in proportion to another."""

    label: str
    over: Scenario
    under: Scenario
    at_most: float
    cost: Callable[[Measurement], float] = service_us


def targets() -> Iterator[Target]:
    yield Target("redis, 2 descriptors ÷ bare echo", REDIS_2, ECHO, 1 / 0.4)
    yield Target("embedded, 2 descriptors ÷ bare echo", EMBEDDED_2, ECHO, 1 / 0.45)
    yield Target("all refused, 2 descriptors ÷ bare echo", ALL_REFUSED, ECHO, 1 / 0.65)
    yield Target("mTLS ÷ plaintext", replace(REDIS_2, way=Way.MTLS), REDIS_2, 1 / 0.7)
    yield Target("TLS ÷ plaintext, embedded", replace(EMBEDDED_2, way=Way.TLS), EMBEDDED_2, 1.5)
    yield Target("TLS ÷ plaintext, bare echo", replace(ECHO, way=Way.TLS), ECHO, 1.5)
    yield Target("never seen before ÷ seen before", NEVER_SEEN, REDIS_2, 1 / 0.65)
    yield Target("100,000 rules ÷ 10", MANY_RULES[-1], MANY_RULES[0], 1.1)
    yield Target("two workers ÷ one", TWO_WORKERS, REDIS_2, 1.15)
    for one in ALGORITHMS:
        name = one.rules.algorithm
        yield Target(f"{name} ÷ fixed_window", one, FIXED_WINDOW, 1.5)
        yield Target(f"{name} ÷ fixed_window, Redis", one, FIXED_WINDOW, 2, redis_us)


def verdicts(results: Results) -> list[str]:
    """The targets, and what was measured beside them."""
    lines = [line for target in targets() for line in _verdict(results, target)]
    for label, without in (("RLS", CALLERS), ("ext_authz", CHECKS)):
        recorded, everything = with_records(without), with_everything(without)
        lines += _verdict(results, Target(f"identity and records ÷ neither, {label}", recorded, without, 1.15))
        lines += _commands(label, results, recorded, without)
        lines += _verdict(results, Target(f"everything on ÷ everything off, {label}", everything, without, 1.15))
    if TWO_WORKERS in results:
        least = _spread((one.least_worker for one in results[TWO_WORKERS]), ".0%")
        lines.append(f"  of two workers, the one that did less did {least}")
    lines += _filter(results)
    for theirs in results:
        if theirs.server is Server.PEER:
            lines += _versus(results, replace(theirs, server=Server.REDIS), theirs)
    return lines


def _verdict(results: Results, target: Target) -> list[str]:
    if target.over not in results or target.under not in results:
        return []
    measured = ratios(results[target.over], results[target.under], target.cost)
    word = "met" if median(measured) <= target.at_most else "MISSED"
    return [f"{target.label}: {_spread(measured, '.2f')} (at most {target.at_most:.3g}: {word})"]


def _filter(results: Results) -> list[str]:
    """What a request costs through an Envoy that asks the service, and what it costs through one that asks nobody."""
    if ENVOY_ALONE not in results or THROUGH_ENVOY not in results:
        return []
    asking, alone = results[THROUGH_ENVOY], results[ENVOY_ALONE]
    added = _spread((one.envoy_us - other.envoy_us for one, other in zip(asking, alone, strict=True)), ".1f")
    everybody = _spread((one.envoy_us + one.service_us + one.redis_us for one in asking), ".1f")
    own, per_s = (_spread(ratios(asking, alone, cost), ".2f") for cost in (envoy_us, calls_per_s))
    return [
        f"Envoy with the rate limit filter ÷ without: its own CPU {own}, {added} µs more; requests/s {per_s}",
        f"  a request takes {everybody} µs of Envoy, service and Redis together",
    ]


def latencies(of: Mapping[Scenario, Latencies]) -> list[str]:
    """Counted from when calls were due, at a pace that every one of these servers can keep."""
    return [
        f"{scenario.name} at {one.per_s:,.0f} calls/s:"
        f" p50 {one.p50_us / 1e3:.2f} ms, p99 {one.p99_us / 1e3:.2f}, p99.9 {one.p99_9_us / 1e3:.2f};"
        f" {one.late_share:.1%} of the calls were sent late by the load itself"
        for scenario, one in of.items()
    ]


def starts(of: Mapping[Scenario, Start]) -> list[str]:
    """How long servers took to start, and what they held before the first call."""
    told = [scenario for scenario in (REDIS_2, EMBEDDED_2, *MANY_RULES) if scenario in of]
    return [
        f"{one.name}: served {of[one].took_s:.2f} s after exec, with {of[one].resident_bytes / 2**20:.0f} MiB"
        for one in told
    ]


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
    told = (
        ("calls/s", ratios(results[ours], results[theirs], calls_per_s)),
        ("service µs", ratios(results[ours], results[theirs])),
        ("Redis µs", ratios(results[ours], results[theirs], redis_us)),
    )
    goals = VERSUS.get((ours.descriptors, ours.keys == 1), (None, None, None))
    parts = [
        f"{label} {_spread(measured, '.2f')}" + _beside(median(measured), goal, is_least=label == "calls/s")
        for (label, measured), goal in zip(told, goals, strict=True)
    ]
    return [f"{ours.name} ÷ {theirs.name}: {', '.join(parts)}"]


def _beside(measured: float, goal: float | None, *, is_least: bool) -> str:
    if goal is None:
        return ""
    is_met = measured >= goal if is_least else measured <= goal
    return f" (at {'least' if is_least else 'most'} {goal:g}: {'met' if is_met else 'MISSED'})"


def write_json(path: Path, plan: Plan, results: Results, bench: Bench) -> None:
    """Everything that was measured, and on what."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "machine": {"platform": platform.platform(), "processor": _processor(), "python": sys.version.split()[0]},
        "versions": {name: version(name) for name in ("grpcio", "pygrpc-native", "protobuf", "redis", "lupa")},
        "load": {"in_flight": plan.in_flight, "most_keys": plan.most_keys},
        "seconds": plan.seconds,
        "scenarios": {scenario.name: [asdict(one) for one in rounds] for scenario, rounds in results.items()},
        "latencies": {scenario.name: asdict(one) for scenario, one in bench.latencies.items()},
        "starts": {scenario.name: asdict(start) for scenario, start in bench.starts.items()},
        "verdicts": verdicts(results),
    }
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
