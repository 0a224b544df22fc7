"""Tables of README.md and docs/performance.md as Markdown, with medians over the rounds.

Each cell has a value on Redis, on the embedded store and of envoyproxy/ratelimit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import median

from bench.distinct_callers import CallersMeasurement
from bench.measure import Measurement
from bench.scenarios import (
    COLD,
    EDGE,
    LONE,
    MIXED,
    PACED,
    PACED_PER_S,
    REDIS_2,
    TRACED,
    UNCACHED,
    Scenario,
    embedded,
    of_peer,
    with_everything,
)
from bench.spread import spread
from bench.verdicts import Results, calls_per_s, ratios, redis_us, service_us

BEST_CASE = REDIS_2
COLUMNS = {"edge traffic": EDGE, "one call at a time": LONE, "best case": BEST_CASE}
LATENCIES = {**COLUMNS, "edge traffic": PACED}
"""Where the latencies of a column are measured: saturated, edge traffic would only wait for itself."""

NOT_MEASURED = "–"
COSTS: dict[str, tuple[Callable[[Measurement], float], str]] = {
    "calls per second": (calls_per_s, ",.0f"),
    "CPU of the service per call, µs": (service_us, ".0f"),
    "CPU of Redis per call, µs": (redis_us, ".0f"),
}


TRAFFIC = {
    "seen before, 2 descriptors": REDIS_2,
    "seen before, 5": replace(REDIS_2, descriptors=5),
    "never seen, 2": COLD[0],
    "never seen, 5": COLD[1],
    "new combinations, 5": MIXED,
    "edge, 4": EDGE,
    "edge, traced": TRACED,
    "edge, everything on": with_everything(EDGE),
    "edge, one call in flight": LONE,
    f"edge, {PACED_PER_S:,} calls per second": PACED,
}


def scenarios() -> list[Scenario]:
    """Return the scenarios of the table of README.md."""
    return [each for one in (EDGE, LONE, PACED, BEST_CASE) for each in _on_all_servers(one)]


def _on_all_servers(scenario: Scenario) -> tuple[Scenario, ...]:
    return scenario, embedded(scenario), of_peer(scenario)


def table(results: Results) -> Iterator[str]:
    """Yield the lines of the table of README.md."""
    yield f"| on Redis / embedded / envoyproxy/ratelimit | {' | '.join(COLUMNS)} |"
    yield "|---" * (1 + len(COLUMNS)) + "|"
    for label, (cost, form) in COSTS.items():
        yield f"| {label} | {' | '.join(_cell(results, one, cost, form) for one in COLUMNS.values())} |"
    for name in ("p50", "p99", "p99.9"):
        cells = (_cell(results, one, _percentile_ms(name), ".2f") for one in LATENCIES.values())
        yield f"| {name}, ms (edge traffic: at {PACED_PER_S:,} calls per second) | {' | '.join(cells)} |"


def memory(callers: CallersMeasurement) -> str:
    """Return the line below the table of README.md."""
    return (
        f"Memory: {callers.start_bytes / 1e6:.0f} MB at start, {callers.cached_request_bytes / 1024:.1f} KiB per"
        f" cached request, {callers.end_bytes / 1e6:.0f} MB after {callers.callers:,} distinct callers."
    )


def traffic_table(results: Results) -> Iterator[str]:
    """Yield the lines of the table of docs/performance.md, with a row for each kind of traffic that was measured."""
    rows = {label: one for label, one in TRAFFIC.items() if any(each in results for each in _on_all_servers(one))}
    if not {*rows.values()} & {*UNCACHED}:
        return
    yield "| on Redis / embedded / envoyproxy/ratelimit | µs of the service | ÷ envoyproxy/ratelimit | µs of Redis |"
    yield "|---|---|---|---|"
    for label, one in rows.items():
        service, redis = _cell(results, one, service_us, ".1f"), _cell(results, one, redis_us, ".1f")
        yield f"| {label} | {service} | {_versus_reference(results, one)} | {redis} |"


def _versus_reference(results: Results, scenario: Scenario) -> str:
    """Return the cost of a call ÷ that of the reference, within rounds, on Redis and embedded."""
    reference = results.get(of_peer(scenario))
    if reference is None:
        return NOT_MEASURED
    own = [results.get(one) for one in (scenario, embedded(scenario))]
    return " / ".join(NOT_MEASURED if one is None else spread(ratios(one, reference), ".2f") for one in own)


def _percentile_ms(name: str) -> Callable[[Measurement], float]:
    """Return a function that returns the percentile with this name; 0 if latencies were not measured."""
    return lambda one: one.latencies.percentiles_us[name] / 1e3 if one.latencies is not None else 0.0


def _cell(results: Results, scenario: Scenario, cost: Callable[[Measurement], float], form: str) -> str:
    values = [_value(results.get(one, ()), cost, form) for one in _on_all_servers(scenario)]
    return NOT_MEASURED if {*values} == {NOT_MEASURED} else " / ".join(values)


def _value(rounds: Sequence[Measurement], cost: Callable[[Measurement], float], form: str) -> str:
    value = median(map(cost, rounds)) if rounds else 0
    return format(value, form) if value else NOT_MEASURED
