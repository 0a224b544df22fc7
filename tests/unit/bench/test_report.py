"""The verdicts compare within a round and say the target beside what was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench import report
from bench.__main__ import options, plan
from bench.measure import Measurement
from bench.scenarios import (
    ALGORITHMS,
    CALLERS,
    CHECKS,
    ECHO,
    FIXED_WINDOW,
    REDIS_2,
    Scenario,
    Server,
    Way,
    with_everything,
    with_records,
)

ONE = Measurement(
    calls_per_s=50_000,
    service_us=20,
    redis_us=0,
    load_us=8,
    answers_per_read=4,
    service_share=1,
    load_share=0.4,
    others_on_service_core=0,
    others_on_load_core=0,
)


def rounds(*service_us: float) -> list[Measurement]:
    return [replace(ONE, service_us=each) for each in service_us]


def test_ratios_are_taken_within_a_round_so_a_slow_hour_cancels_out() -> None:
    results = {ECHO: rounds(20, 40, 30), REDIS_2: rounds(50, 100, 75)}
    assert report.verdicts(results) == ["redis, 2 descriptors ÷ bare echo: 2.50 (2.50..2.50) (at most 2.5: met)"]


def test_a_missed_target_is_said_aloud() -> None:
    results = {REDIS_2: rounds(40), replace(REDIS_2, way=Way.MTLS): rounds(64)}
    assert report.verdicts(results) == ["mTLS ÷ plaintext: 1.60 (at most 1.43: MISSED)"]


def test_everything_on_is_compared_with_everything_off_at_either_door() -> None:
    results = {
        CALLERS: rounds(50),
        with_everything(CALLERS): rounds(57),
        CHECKS: rounds(100),
        with_records(CHECKS): rounds(110),
        with_everything(CHECKS): rounds(116),
    }
    assert [line for line in report.verdicts(results) if "everything" in line] == [
        "everything on ÷ everything off, RLS: 1.14 (at most 1.15: met)",
        "everything on ÷ everything off, ext_authz: 1.16 (at most 1.15: MISSED)",
    ]
    assert {*results} <= {*plan(options([])).scenarios}


def test_ours_is_divided_by_theirs() -> None:
    theirs = [replace(ONE, service_us=100, redis_us=40, calls_per_s=10_000)]
    ours = [replace(ONE, service_us=50, redis_us=10, calls_per_s=30_000)]
    lines = report.verdicts({REDIS_2: ours, Scenario(Server.PEER): theirs})
    assert lines == [
        "redis-2 ÷ peer-2: calls/s 3.00 (at least 2: met), service µs 0.50 (at most 0.45: MISSED), "
        "Redis µs 0.25 (at most 0.6: met)"
    ]


def test_a_pattern_chooses_scenarios_and_an_unknown_name_lists_them() -> None:
    assert [one.name for one in plan(options(["--only", "redis-5*", "--only", "*-mtls"])).scenarios] == [
        "redis-5",
        "redis-5-hot",
        "redis-2-mtls",
    ]
    with pytest.raises(SystemExit, match="no scenario is named redis-3; there are: echo-native, "):
        plan(options(["--only", "redis-3"]))


def test_no_two_scenarios_have_one_name() -> None:
    names = [one.name for one in plan(options([])).scenarios]
    assert len({*names}) == len(names)


def test_every_target_is_about_scenarios_that_are_measured() -> None:
    measured = {*plan(options([])).scenarios}
    assert {one for target in report.targets() for one in (target.over, target.under)} <= measured


def test_other_costs_than_the_service_s_are_compared_with_their_own() -> None:
    gcra = next(one for one in ALGORITHMS if one.rules.algorithm == "gcra")
    ours, theirs = replace(ONE, redis_us=30), replace(ONE, redis_us=10)
    assert report.verdicts({gcra: [ours], FIXED_WINDOW: [theirs]}) == [
        "gcra ÷ fixed_window: 1.00 (at most 1.5: met)",
        "gcra ÷ fixed_window, Redis: 3.00 (at most 2: MISSED)",
    ]
