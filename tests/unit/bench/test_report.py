"""Verdicts compare within a round and print the target next to the measured value."""

from __future__ import annotations

import fnmatch
import re
from dataclasses import replace
from pathlib import Path

import pytest

import bench.__main__
from bench import capacity, redis_instructions, report
from bench.__main__ import options, plan
from bench.fleet import Start
from bench.latency import Latencies
from bench.measure import Measurement
from bench.scenarios import (
    ALGORITHMS,
    CALLERS,
    CHECKS,
    CLUSTER,
    CLUSTER_BY_DOMAIN,
    CLUSTER_BY_TENANT,
    COLD,
    ECHO,
    EDGE,
    ENVOY_ALONE,
    FEW_FIXED_WINDOWS,
    FIXED_WINDOW,
    FLEET,
    FLEET_WINDOWS,
    LIMITADOR,
    LONE,
    LONG_LOGS,
    MANY_RULES,
    MIXED,
    PACED,
    REDIS_2,
    SINGLE_REDIS,
    THROUGH_ENVOY,
    TOKEN_BUCKET_AND_DAY,
    TRACED,
    ClientRoute,
    Scenario,
    Server,
    embedded,
    every,
    of_limitador,
    of_peer,
    with_everything,
    with_records,
)
from bench.verdicts import targets, verdicts
from tests.unit.bench.sample_results import ONE


def rounds(*service_us: float) -> list[Measurement]:
    return [replace(ONE, service_us=each) for each in service_us]


def test_ratios_are_computed_within_a_round() -> None:
    results = {ECHO: rounds(20, 40, 30), REDIS_2: rounds(50, 100, 75)}
    assert verdicts(results) == ["redis, 2 descriptors ÷ bare echo: 2.50 (2.50..2.50) (at most 2.5: met)"]


def test_missed_target_is_reported() -> None:
    results = {REDIS_2: rounds(40), replace(REDIS_2, route=ClientRoute.MTLS): rounds(64)}
    assert verdicts(results) == ["mTLS ÷ plaintext: 1.60 (at most 1.43: MISSED)"]


def test_all_features_are_compared_with_none_for_rls_and_ext_authz() -> None:
    results = {
        CALLERS: rounds(50),
        with_everything(CALLERS): rounds(57),
        CHECKS: rounds(100),
        with_records(CHECKS): rounds(110),
        with_everything(CHECKS): rounds(116),
    }
    assert [line for line in verdicts(results) if "everything" in line] == [
        "everything on ÷ everything off, RLS: 1.14 (at most 1.15: met)",
        "everything on ÷ everything off, ext_authz: 1.16 (at most 1.15: MISSED)",
    ]
    assert {*results} <= {*plan(options([])).scenarios}


def test_redis_commands_are_reported_per_call() -> None:
    def with_commands(**commands: float) -> list[Measurement]:
        return [replace(ONE, redis_commands=commands)]

    hot = replace(REDIS_2, keys=1)
    results = {
        REDIS_2: with_commands(evalsha=0.02, set=2) + with_commands(evalsha=0.04, set=2) + with_commands(evalsha=0.021),
        hot: with_commands(evalsha=0.01),
        CHECKS: with_commands(evalsha=0.025),
        with_records(CHECKS): with_commands(evalsha=0.024, get=0.001),
    }
    assert [line.strip() for line in verdicts(results) if "Redis commands" in line] == [
        "Redis commands a call, ext_authz, without → with: evalsha 0.025 → 0.024, get 0.000 → 0.001",
        "Redis commands a call, redis-2: evalsha 0.021, set 2.000",
        "Redis commands a call, redis-2-hot: evalsha 0.010",
    ]


def test_logs_are_compared_with_fixed_window_and_shortest_log() -> None:
    of_redis = {FEW_FIXED_WINDOWS: 10, LONG_LOGS[0]: 20, LONG_LOGS[1]: 21, LONG_LOGS[2]: 25}
    results = {one: [replace(ONE, redis_us=us, log_bytes=one.rules.hits_before * 20)] for one, us in of_redis.items()}
    assert verdicts(results) == [
        "sliding_log, 10 hits in each: Redis ÷ fixed_window's 2.00, ÷ that of 10 hits 1.00; 200 bytes a key",
        "sliding_log, 100 hits in each: Redis ÷ fixed_window's 2.10, ÷ that of 10 hits 1.05; 2,000 bytes a key",
        "sliding_log, 1,000 hits in each: Redis ÷ fixed_window's 2.50, ÷ that of 10 hits 1.25; 20,000 bytes a key",
    ]
    assert {*results} <= {*plan(options([])).scenarios}


def test_filter_cost_is_reported_for_envoy_and_in_total() -> None:
    alone = [replace(ONE, service_us=0, envoy_us=each, calls_per_s=20_000) for each in (40, 20)]
    asking = [replace(ONE, service_us=60, redis_us=10, envoy_us=each, calls_per_s=8_000) for each in (60, 30)]
    results = {ENVOY_ALONE: alone, THROUGH_ENVOY: asking}
    assert verdicts(results) == [
        "Envoy with the rate limit filter ÷ without: its own CPU 1.50 (1.50..1.50), 15.0 (10.0..20.0) µs more;"
        " requests/s 0.40 (0.40..0.40)",
        "  a request takes 115.0 (100.0..130.0) µs of Envoy, service and Redis together",
    ]


def test_envoy_alone_has_no_service_figures() -> None:
    alone = replace(ONE, service_us=0, service_share=0, envoy_us=40)
    results = {
        ECHO: [ONE],
        ENVOY_ALONE: [alone],
        THROUGH_ENVOY: [replace(ONE, service_us=60, redis_us=11, envoy_us=70)],
    }
    _, _, *rows = [[cell.strip() for cell in line.split("  ") if cell] for line in report.table(results).splitlines()]
    assert [row[:6] for row in rows] == [
        ["echo-native", "50,000", "20.0", "1.00", "8.0", "4.0"],
        ["envoy", "50,000", "40.0", "8.0", "4.0", "0% + 0%"],
        ["redis-2-envoy", "50,000", "60.0", "3.00", "11.0", "70.0"],
    ]
    assert "in 2 of 2 measurements" in report.reading(results)


def test_scenarios_without_envoy_are_measured_if_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.envoy.binary", lambda: Path("envoy"))
    every = plan(options([])).scenarios
    monkeypatch.setattr("bench.envoy.binary", lambda: None)
    assert {*every} - {*plan(options([])).scenarios} == {ENVOY_ALONE, THROUGH_ENVOY}


def test_ratio_is_own_divided_by_peer() -> None:
    peer = [replace(ONE, service_us=100, redis_us=40, calls_per_s=10_000)]
    own = [replace(ONE, service_us=50, redis_us=10, calls_per_s=30_000)]
    lines = verdicts({REDIS_2: own, Scenario(Server.PEER): peer})
    assert lines == [
        "redis-2 ÷ peer-2: calls/s 3.00 (at least 2: met), service µs 0.50 (at most 0.45: MISSED), "
        "Redis µs 0.25 (at most 0.6: met)"
    ]


def test_pattern_selects_scenarios_and_unknown_name_lists_all() -> None:
    assert [one.name for one in plan(options(["--only", "redis-5*", "--only", "*-mtls"])).scenarios] == [
        "redis-5",
        "redis-5-hot",
        "redis-2-mtls",
        "redis-5-cold",
        "redis-5-mixed",
        "redis-5-128-in-flight",
        "redis-5-cluster-128-in-flight",
        "redis-5-by-domain-cluster-128-in-flight",
        "redis-5-by-tenant-cluster-128-in-flight",
    ]
    with pytest.raises(SystemExit, match="no scenario is named redis-3; there are: echo-native, "):
        plan(options(["--only", "redis-3"]))


def test_scenario_names_are_unique() -> None:
    named = (*every(peer=True, envoy=True), *redis_instructions.offered(peer=True), *capacity.offered())
    names = [one.name for one in named]
    assert len({*names}) == len(names)


def latencies(p50_us: float) -> Latencies:
    return Latencies.of([p50_us / 1e6] * 100, per_s=1_000)


def test_fleet_is_compared_with_the_peer_by_batches_and_latencies() -> None:
    fleet = FLEET[0]
    own = replace(ONE, redis_us=60, redis_reads=1.0, redis_commands={"fcall": 0.8, "get": 1}, latencies=latencies(3000))
    peer = replace(ONE, redis_us=30, redis_reads=0.5, redis_commands={"incrby": 1, "expire": 1})
    peer = replace(peer, latencies=latencies(2000))
    assert verdicts({fleet: [own], of_peer(fleet): [peer]}) == [
        "redis-1-fleet-1-in-flight: 1.25 calls a command, 1.00 reads of Redis a call; closed loop, ms: "
        "p50 3.00, p95 3.00, p99 3.00, p99.9 3.00",
        "peer-1-fleet-1-in-flight: 0.50 calls a command, 0.50 reads of Redis a call; closed loop, ms: "
        "p50 2.00, p95 2.00, p99 2.00, p99.9 2.00",
        "redis-1-fleet-1-in-flight ÷ peer-1-fleet-1-in-flight: calls/s 1.00, service µs 1.00, Redis µs 2.00",
        "  latencies, closed loop: p50 1.50, p95 1.50, p99 1.50, p99.9 1.50",
    ]


def test_fleet_with_a_batch_window_is_compared_with_one_without() -> None:
    window = FLEET_WINDOWS[-1]
    without = replace(window, window_us=0)
    lines = verdicts(
        {
            without: [replace(ONE, redis_us=10, latencies=latencies(1000))],
            window: [replace(ONE, redis_us=8, latencies=latencies(1500))],
        }
    )
    assert lines[-1] == (
        "redis-1-fleet-4-in-flight-window-2000us ÷ redis-1-fleet-4-in-flight: Redis µs 0.80, service µs 1.00, "
        "calls/s 1.00, p50 1.50, p95 1.50, p99 1.50, p99.9 1.50"
    )


def test_cluster_is_compared_with_a_single_redis_and_with_the_peer() -> None:
    single, cluster, by_domain, by_tenant = SINGLE_REDIS[1], CLUSTER[1], CLUSTER_BY_DOMAIN[1], CLUSTER_BY_TENANT[1]
    results = {
        single: [replace(ONE, redis_us=10, busiest_redis_us=10)],
        cluster: [replace(ONE, redis_us=60, busiest_redis_us=22)],
        by_domain: [replace(ONE, redis_us=20, busiest_redis_us=20)],
        by_tenant: [replace(ONE, redis_us=12, busiest_redis_us=4)],
        of_peer(cluster): [replace(ONE, redis_us=40, busiest_redis_us=15)],
    }
    assert verdicts(results) == [
        "redis-2-cluster-128-in-flight ÷ redis-2-128-in-flight: calls/s 1.00, service µs 1.00 (at most 1.4: met), "
        "Redis µs, all masters 6.00 (at most 1.35: MISSED), "
        "throughput by the busiest master 0.45 (at least 2.2: MISSED); the busiest master 22.0 µs",
        "redis-2-by-domain-cluster-128-in-flight ÷ redis-2-128-in-flight: calls/s 1.00, service µs 1.00, "
        "Redis µs, all masters 2.00, throughput by the busiest master 0.50; the busiest master 20.0 µs",
        "redis-2-by-tenant-cluster-128-in-flight ÷ redis-2-128-in-flight: calls/s 1.00, service µs 1.00 "
        "(at most 1.4: met), Redis µs, all masters 1.20 (at most 1.35: met), "
        "throughput by the busiest master 2.50 (at least 2.2: met); the busiest master 4.0 µs",
        "redis-2-cluster-128-in-flight ÷ peer-2-cluster-128-in-flight: calls/s 1.00, service µs 1.00, Redis µs 1.50",
        "redis-2-by-domain-cluster-128-in-flight ÷ peer-2-cluster-128-in-flight: calls/s 1.00, service µs 1.00, "
        "Redis µs 0.50",
        "redis-2-by-tenant-cluster-128-in-flight ÷ peer-2-cluster-128-in-flight: calls/s 1.00, service µs 1.00, "
        "Redis µs 0.30",
    ]


def test_token_bucket_and_daily_limit_are_compared_with_two_fixed_windows() -> None:
    results = {REDIS_2: [replace(ONE, redis_us=10)], TOKEN_BUCKET_AND_DAY: [replace(ONE, redis_us=17)]}
    assert verdicts(results) == ["token bucket and daily limit ÷ two fixed windows: service µs 1.00, Redis µs 1.70"]


def test_pattern_also_selects_instructions_and_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.redis_instructions.available", lambda: True)
    chosen = plan(options(["--only", "instructions-1-gcra", "--only", "capacity-1-*-4-*", "--only", "*-memory-gcra"]))
    assert not chosen.scenarios
    assert [one.name for one in chosen.counted] == ["instructions-1-gcra"]
    assert [one.name for one in chosen.capacity] == ["capacity-1-fixed_window-4-in-batch", "capacity-memory-gcra"]


def test_instructions_are_offered_only_with_valgrind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.redis_instructions.available", lambda: True)
    assert {one.name for one in plan(options([])).counted} >= {"instructions-1-fixed_window", "instructions-1-gcra"}
    monkeypatch.setattr("bench.redis_instructions.available", lambda: False)
    assert not plan(options([])).counted
    with pytest.raises(SystemExit, match="no scenario is named instructions-1-gcra; there are: "):
        plan(options(["--only", "instructions-1-gcra"]))


def test_quick_run_has_neither_instructions_nor_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.redis_instructions.available", lambda: True)
    quick = plan(options(["--quick"]))
    assert not quick.counted
    assert not quick.capacity


def test_help_names_the_patterns_of_the_scenarios() -> None:
    names = [one.name for one in every(peer=True, envoy=True)]
    names += [one.name for one in (*redis_instructions.offered(peer=True), *capacity.offered())]
    assert bench.__main__.__doc__ is not None
    for pattern in re.findall(r"'([^']+)'", bench.__main__.__doc__):
        assert fnmatch.filter(names, pattern), pattern


def test_every_target_refers_to_measured_scenarios() -> None:
    measured = {*every(peer=True, envoy=True, limitador=True)}
    assert {one for target in targets() for one in (target.over, target.under)} <= measured


def test_redis_and_envoy_costs_are_compared_separately() -> None:
    gcra = next(one for one in ALGORITHMS if one.rules.algorithm == "gcra")
    own, peer = replace(ONE, redis_us=30), replace(ONE, redis_us=10)
    assert verdicts({gcra: [own], FIXED_WINDOW: [peer]}) == [
        "gcra ÷ fixed_window: 1.00 (at most 1.5: met)",
        "gcra ÷ fixed_window, Redis: 3.00 (at most 2: MISSED)",
    ]


def test_latencies_are_compared_with_envoyproxy_ratelimit() -> None:
    own = Latencies(100, per_s=50, p50_us=1500, p95_us=4000, p99_us=5000, p99_9_us=9000, max_us=9000)
    peer = replace(own, p50_us=1000, p95_us=10_000, p99_us=20_000, p99_9_us=9000)
    assert report.latencies({REDIS_2: own})[1:] == []
    assert report.latencies({REDIS_2: own, replace(REDIS_2, server=Server.PEER): peer})[-1] == (
        "redis-2: our latencies ÷ the reference's: p50 1.50 (at most 1: MISSED), p95 0.40 (at most 1: met), "
        "p99 0.25 (at most 1: met), p99.9 1.00 (at most 1: met)"
    )
    assert report.latencies({REDIS_2: own}) == [
        "redis-2 at 50 calls/s: p50 1.50 ms, p95 4.00, p99 5.00, p99.9 9.00; "
        "0.0% of the calls were sent late by the load itself"
    ]


def test_start_times_are_compared_with_their_limits() -> None:
    few, *_, many = MANY_RULES
    result = report.starts({REDIS_2: Start(1.6, 140_000_000), few: Start(1.4, 151_000_000), many: Start(5.0, 2**30)})
    assert result == [
        "redis-2: served 1.60 s after exec (at most 1.5 s: MISSED), with 134 MiB (at most 143: met)",
        "redis-2-10-rules: served 1.40 s after exec (at most 1.5 s: met), with 144 MiB (at most 143: MISSED)",
        "redis-2-100000-rules: served 5.00 s after exec (at most 5 s: met), with 1024 MiB",
    ]


@pytest.mark.parametrize("option", [["--seconds", "-1"], ["--seconds", "0"], ["--repeats", "0"], ["--in-flight", "0"]])
def test_invalid_number_option_is_rejected(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options(option)
    assert f"argument {option[0]}: {option[1]} is not above 0" in capsys.readouterr().err


def test_limitador_is_measured_only_with_its_binary(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"--limitador .*missing: not a program"):
        plan(options(["--limitador", str(tmp_path / "missing")]))
    binary = tmp_path / "limitador-server"
    binary.touch(0o700)
    with_it, without = plan(options(["--limitador", str(binary)])), plan(options([]))
    assert with_it.limitador == binary
    assert {*with_it.scenarios} - {*without.scenarios} == {*LIMITADOR}


def test_requests_as_users_send_them_are_compared_with_seen_ones_and_other_servers() -> None:
    redis_5 = replace(REDIS_2, descriptors=5)
    results = {
        REDIS_2: rounds(10),
        redis_5: rounds(20),
        COLD[0]: rounds(15),
        COLD[1]: rounds(50),
        MIXED: rounds(30),
        embedded(MIXED): rounds(18),
        of_limitador(MIXED): rounds(20),
        EDGE: rounds(40),
        TRACED: rounds(44),
        with_everything(EDGE): rounds(48),
        embedded(EDGE): rounds(20),
        of_peer(EDGE): [replace(ONE, service_us=100, redis_us=10)],
    }
    assert verdicts(results) == [
        "never seen before ÷ seen before, 2 descriptors: 1.50 (at most 1.6: met)",
        "never seen before ÷ seen before, 5 descriptors: 2.50",
        "new combinations ÷ seen before, 5 descriptors: 1.50 (at most 1.3: MISSED)",
        "edge, embedded ÷ the reference: 0.20 (at most 0.22: met)",
        "edge, a new traceparent for each call ÷ none: 1.10",
        "everything on ÷ everything off, edge: 1.20 (at most 1.15: MISSED)",
        "embedded-5-mixed ÷ limitador-5-mixed: 0.90 (at most 0.9: met)",
        "redis-4-edge ÷ peer-4-edge: calls/s 1.00, service µs 0.40 (at most 0.25: MISSED), Redis µs 0.00",
    ]


@pytest.mark.parametrize(
    ("scenario", "judged", "loop"), [(LONE, {"p50", "p99"}, "closed"), (PACED, {"p50", "p95", "p99", "p99.9"}, "open")]
)
def test_latencies_of_lone_and_paced_calls_are_at_most_those_of_the_reference(
    scenario: Scenario, judged: set[str], loop: str
) -> None:
    measured, reference = (replace(ONE, redis_us=10, latencies=latencies(p50_us)) for p50_us in (1_500, 1_000))
    line = verdicts({scenario: [measured], of_peer(scenario): [reference]})[-1]
    assert line.startswith(f"  latencies, {loop} loop: p50 1.50")
    assert {*re.findall(r"(p[\d.]+) 1\.50 \(at most 1: MISSED\)", line)} == judged
    assert len(re.findall(r"p[\d.]+ 1\.50", line)) == 4


def test_calls_sent_late_by_the_load_are_reported_for_a_fixed_rate() -> None:
    late = replace(latencies(1_000), late_share=0.02)
    assert verdicts({embedded(PACED): [replace(ONE, latencies=late)]}) == [
        "embedded-4-edge-4000-per-s: from when calls were due, at most 2.0% of which the load itself sent late, ms: "
        "p50 1.00, p95 1.00, p99 1.00, p99.9 1.00"
    ]


def test_missing_peer_binary_prints_instructions() -> None:
    with pytest.raises(SystemExit, match="the reference is measured if its binary is given: --peer PATH"):
        plan(options(["--only", "peer-2"]))
