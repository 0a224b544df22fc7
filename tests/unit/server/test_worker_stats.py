"""Merged statistics of several workers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest
from structlog.testing import capture_logs

from ratelimit_rls.core.decision import decision_of
from ratelimit_rls.core.model import (
    Charge,
    DescriptorPlan,
    Limit,
    PlanTemplate,
    Reading,
    Rule,
    Step,
    StoreResult,
    Unit,
)
from ratelimit_rls.server import worker_stats as module
from ratelimit_rls.server.worker_stats import WorkerStats
from ratelimit_rls.telemetry.collector import series
from ratelimit_rls.telemetry.hot_keys import MAX_RATE, HotKeys
from ratelimit_rls.telemetry.instruments import REFERENCE_REQUESTS, WORKERS
from ratelimit_rls.telemetry.metrics import CallTimes, Metrics

STEP = Step(Limit(10, Unit.MINUTE), 1, Charge.ALWAYS)
TEMPLATE = PlanTemplate(
    "edge", True, (STEP,), (DescriptorPlan(Rule("edge.user", (STEP.limit,)), (STEP,), 1, "edge.user"),)
)
DENIED = decision_of(TEMPLATE, StoreResult.of(True, 0, (Reading(0, 5, 1),)))
TOTAL = "ratelimit_server.ShouldRateLimit.total_requests"
REQUESTS = series(REFERENCE_REQUESTS, "ShouldRateLimit")
WORKERS_THERE = series(WORKERS)


class Keyed(NamedTuple):
    keys: tuple[bytes, ...]


class Call(NamedTuple):
    template: PlanTemplate
    prepared: Keyed


class Worker(NamedTuple):
    metrics: Metrics
    hot_keys: HotKeys
    stats: WorkerStats

    def ask(self, times: int, key: bytes) -> None:
        self.metrics.calls.setdefault("/service/ShouldRateLimit", CallTimes()).answered(0.001, times)
        self.hot_keys.observe([Call(TEMPLATE, Keyed((key,)))] * times, [DENIED] * times)


def new_worker(directory: Path | None = None) -> Worker:
    metrics, hot_keys = Metrics(), HotKeys(clock=lambda: 0.0)
    metrics.export_values(hot_keys.gauges)
    return Worker(metrics, hot_keys, WorkerStats(metrics, hot_keys, directory))


@pytest.fixture
async def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[Worker]]:
    workers = []
    for number in range(3):
        monkeypatch.setattr("os.getpid", lambda number=number: number)
        workers.append(new_worker(tmp_path))
        await workers[-1].stats.start()
    yield workers
    for worker in workers:
        await worker.stats.close()
    assert {path.suffix for path in tmp_path.iterdir()} == {".left"}


async def test_every_worker_reports_the_sum_of_counters(workers: list[Worker]) -> None:
    for worker, times in zip(workers, (1, 20, 300), strict=True):
        worker.ask(times, b"rl:{edge/user=%d}:gcra:60" % (times % 2))
    for worker in workers:
        assert dict(await worker.stats.stats())[TOTAL] == 321


async def test_hot_keys_are_summed_but_process_gauges_are_not(workers: list[Worker]) -> None:
    for worker, times in zip(workers, (1, 20, 300), strict=True):
        worker.ask(times, b"rl:{edge/user=%d}:gcra:60" % (times % 2))
    for worker in workers:
        report = await worker.stats.hot()
        assert report.calls_per_second == 321
        assert [(row.key, row.per_second, row.denied_per_second, row.rule) for row in report.hottest(5)] == [
            ("rl:{edge/user=0}:gcra:60", 320, 320, "edge.user"),
            ("rl:{edge/user=1}:gcra:60", 1, 1, "edge.user"),
        ]
        assert dict(await worker.stats.stats())[MAX_RATE] == 300


async def test_worker_without_response_is_left_out(
    workers: list[Worker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def say_half(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"[1, 2")
        writer.close()

    monkeypatch.setattr(module, "RESPONSE_TIMEOUT_S", 0.05)
    (tmp_path / "gone.stats").touch()
    silent = await asyncio.start_unix_server(say_nothing, tmp_path / "silent.stats")
    ended = await asyncio.start_unix_server(say_half, tmp_path / "ended.stats")
    workers[1].ask(7, b"rl:{edge/user=a}:gcra:60")
    assert dict(await workers[0].stats.stats())[TOTAL] == 7
    assert (await workers[0].stats.hot()).calls_per_second == 7
    silent.close()
    ended.close()
    for name in ("gone.stats", "silent.stats", "ended.stats"):
        (tmp_path / name).unlink()


async def test_every_worker_reports_the_sum_of_metrics(workers: list[Worker]) -> None:
    for worker, times in zip(workers, (1, 20, 300), strict=True):
        worker.ask(times, b"rl:{edge/user=a}:gcra:60")
    for worker in workers:
        result = (await worker.stats.collect_all()).series
        assert (result[REQUESTS], result[WORKERS_THERE]) == (321, 3)


async def test_counters_of_ended_workers_are_kept_but_gauges_are_not(
    workers: list[Worker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for worker in workers:
        worker.ask(10, b"rl:{edge/user=a}:gcra:60")
    stopped, killed, left = workers
    assert (await left.stats.collect_all()).series[REQUESTS] == 30
    stopped.ask(5, b"rl:{edge/user=a}:gcra:60")
    await stopped.stats.close()
    assert killed.stats._server is not None
    killed.stats._server.close()  # without a final save: the last saved value is 10
    for _ in range(2):
        result = await left.stats.collect_all()
        assert (result.series[REQUESTS], result.series[WORKERS_THERE]) == (35, 1)
        assert (result.names[TOTAL], result.names[MAX_RATE]) == (35, 10)
    monkeypatch.setattr("os.getpid", lambda: 0)  # process ids are reused
    another = new_worker(tmp_path)
    await another.stats.start()
    another.ask(2, b"rl:{edge/user=a}:gcra:60")
    assert (await left.stats.collect_all()).series[REQUESTS] == 37
    await another.stats.close()


async def test_missing_directory_loses_only_the_other_workers_figures(workers: list[Worker], tmp_path: Path) -> None:
    workers[0].ask(3, b"rl:{edge/user=a}:gcra:60")
    for path in tmp_path.iterdir():
        path.unlink()
    os.chmod(tmp_path, 0o500)
    try:
        with capture_logs() as lines:
            for _ in range(2):
                assert (await workers[0].stats.collect_all()).series[REQUESTS] == 3
        if os.geteuid():  # root may write anywhere
            assert [line["log_level"] for line in lines] == ["warning"]
    finally:
        os.chmod(tmp_path, 0o700)


async def test_single_process_reports_itself() -> None:
    worker = new_worker()
    await worker.stats.start()
    worker.ask(3, b"rl:{edge/user=a}:gcra:60")
    assert dict(await worker.stats.stats())[TOTAL] == 3
    assert (await worker.stats.hot()).calls_per_second == 3
    await worker.stats.close()
