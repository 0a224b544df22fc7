"""Rates of a node of Redis between two samples."""

from __future__ import annotations

from ratelimit_rls.store.redis.server_info import ServerInfo
from ratelimit_rls.store.redis.server_sampler import NodeReport, Sample, node_report
from ratelimit_rls.telemetry.series import Distribution, Durations

NOTHING = Durations().value


def durations(*seconds: float) -> Distribution:
    observed = Durations()
    for one in seconds:
        observed.observe(one)
    return observed.value


def info(**fields: float) -> ServerInfo:
    return ServerInfo(**fields)  # type: ignore[arg-type]


def test_rates_are_those_since_the_previous_sample() -> None:
    before = Sample(100.0, info(commands=1000, cpu_user_s=1.0, cpu_system_s=0.5, evicted_keys=7), durations(0.9))
    state = info(
        used_memory_bytes=80,
        maxmemory_bytes=100,
        clients=3,
        commands=4000,
        cpu_user_s=4.0,
        cpu_system_s=1.5,
        evicted_keys=22,
    )
    now = Sample(110.0, state, durations(0.9, *[0.004] * 99, 0.4))

    report = node_report("redis:6379", before, now)

    assert report[:7] == ("redis:6379", 80, 0.8, 300.0, 3, 0.4, 1.5)
    assert report.p95_ms is not None
    assert 2.5 < report.p95_ms < 5.0  # of the hundred calls since, without the slow one before


def test_first_sample_has_no_rates() -> None:
    state = info(used_memory_bytes=80, clients=3, commands=4000, cpu_user_s=4.0, cpu_system_s=1.5, evicted_keys=22)
    assert node_report("n", None, Sample(1.0, state, NOTHING)) == NodeReport("n", 80, None, None, 3, None, None, None)


def test_restarted_or_silent_server_has_no_rates() -> None:
    before = Sample(1.0, info(commands=1000, cpu_user_s=4.0, cpu_system_s=1.0), NOTHING)
    report = node_report("n", before, Sample(2.0, info(commands=10), NOTHING))
    assert report == NodeReport("n", None, None, None, None, None, None, None)
