"""The table of README.md has edge traffic, one call at a time and the best case beside each other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench import readme
from bench.__main__ import options, plan
from bench.distinct_callers import CallersMeasurement, Interval
from bench.latency import Latencies
from bench.scenarios import EDGE, LONE, PACED, REDIS_2, Scenario, embedded, of_peer, with_everything
from tests.unit.bench.sample_results import ONE


def test_cells_have_values_of_all_servers_and_say_what_was_not_measured() -> None:
    latencies = Latencies(100, per_s=50, p50_us=300, p95_us=500, p99_us=900, p99_9_us=2000, max_us=9000)
    results = {
        EDGE: [replace(ONE, calls_per_s=each, service_us=20, redis_us=30) for each in (20_000, 30_000, 24_000)],
        embedded(EDGE): [replace(ONE, calls_per_s=25_000, service_us=22)],
        of_peer(EDGE): [replace(ONE, calls_per_s=9_000, service_us=100, redis_us=40)],
        LONE: [replace(ONE, latencies=latencies)],
        of_peer(PACED): [replace(ONE, latencies=latencies)],
    }
    assert [*readme.table(results)] == [
        "| on Redis / embedded / envoyproxy/ratelimit | edge traffic | one call at a time | best case |",
        "|---|---|---|---|",
        "| calls per second | 24,000 / 25,000 / 9,000 | 50,000 / – / – | – |",
        "| CPU of the service per call, µs | 20 / 22 / 100 | 20 / – / – | – |",
        "| CPU of Redis per call, µs | 30 / – / 40 | – | – |",
        "| p50, ms (edge traffic: at 4,000 calls per second) | – / – / 0.30 | 0.30 / – / – | – |",
        "| p99, ms (edge traffic: at 4,000 calls per second) | – / – / 0.90 | 0.90 / – / – | – |",
        "| p99.9, ms (edge traffic: at 4,000 calls per second) | – / – / 2.00 | 2.00 / – / – | – |",
    ]
    callers = CallersMeasurement(90_000_000, 1228.8, 1_000_000, (Interval(latencies, 240_000_000),))
    assert readme.memory(callers) == (
        "Memory: 90 MB at start, 1.2 KiB per cached request, 240 MB after 1,000,000 distinct callers."
    )


def test_kinds_of_traffic_are_compared_with_the_reference_within_rounds() -> None:
    measured, reference = (
        [replace(ONE, redis_us=30)] * 2,
        [replace(ONE, service_us=each, redis_us=40) for each in (40, 80)],
    )
    results = {EDGE: measured, of_peer(EDGE): reference, REDIS_2: measured, with_everything(EDGE): measured}
    assert [*readme.traffic_table(results)] == [
        "| on Redis / embedded / envoyproxy/ratelimit | µs of the service | ÷ envoyproxy/ratelimit | µs of Redis |",
        "|---|---|---|---|",
        "| seen before, 2 descriptors | 20.0 / – / – | – | 30.0 / – / – |",
        "| edge, 4 | 20.0 / – / 60.0 | 0.38 (0.25..0.50) / – | 30.0 / – / 40.0 |",
        "| edge, everything on | 20.0 / – / – | – | 30.0 / – / – |",
    ]
    assert [*readme.traffic_table({REDIS_2: measured})] == []


def test_readme_run_measures_only_what_its_table_needs(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"the table of README\.md compares with the reference: --peer PATH"):
        plan(options(["--readme"]))
    binary = tmp_path / "ratelimit"
    binary.touch(0o700)
    todo = plan(options(["--readme", "--peer", str(binary)]))
    assert todo.readme
    assert todo.callers_s
    assert {*todo.scenarios} == {server for one in (EDGE, LONE, PACED, REDIS_2) for server in _all(one)}
    assert not todo.counted
    assert not todo.capacity


def _all(one: Scenario) -> list[Scenario]:
    return [one, embedded(one), of_peer(one)]


def test_distinct_callers_are_part_of_a_full_run_only() -> None:
    assert plan(options([])).callers_s
    assert not plan(options(["--only", "redis-2"])).callers_s
    assert not plan(options(["--quick"])).callers_s
