"""Rollup of minutes to hours and days, and queries with the same sums before and after."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import pytest
from sqlalchemy import func, select

from ratelimit_rls.database.database import Database
from ratelimit_rls.database.usage import rollup
from ratelimit_rls.database.usage.queries import SeriesPoint, decisions, heaviest, series
from ratelimit_rls.database.usage.rollup import roll_up
from ratelimit_rls.database.usage.tables import DAY, HOUR, MINUTE, metrics, rollups_due
from ratelimit_rls.database.usage.writer import UsageWriter
from ratelimit_rls.errors import BadRequest
from ratelimit_rls.telemetry.histogram import from_text, merge_histograms, percentiles_us
from ratelimit_rls.telemetry.usage_recorder import UsageRecorder
from tests.integration.usage.calls import call
from tests.integration.usage.conftest import Clock

DAY_S, HOUR_S = 86_400, 3600


async def calls_of_two_days(database: Database, clock: Clock) -> Counter[str]:
    """Record random requests by two processes; return their number by user."""
    draw = Random(7)
    made: Counter[str] = Counter()
    recorders = [UsageRecorder(sample=0, max_waiting=1000, clock=clock) for _ in range(2)]
    usage_writers = [
        UsageWriter(database, recorder, server_id="here", region="eu", clock=clock) for recorder in recorders
    ]
    for _ in range(12):
        clock.now_s += draw.randrange(60, 4 * HOUR_S)
        for recorder in recorders:
            user = draw.choice(["alice", "bob"])
            passed, denied = draw.randrange(1, 5), draw.randrange(3)
            call(recorder, user, passed, denied, draw.random() / 100, path=draw.choice(["/a", "/b"]))
            made[user] += passed + denied
    for usage_writer in usage_writers:
        await usage_writer.flush()
    return made


async def rows(database: Database, granularity: str) -> list[dict[str, Any]]:
    async with database.reading() as connection:
        query = select(metrics).where(metrics.c.granularity == granularity).order_by(metrics.c.metric_id)
        return [dict(row._mapping) for row in await connection.execute(query)]


@pytest.mark.slow
async def test_hours_sum_minutes_and_days_sum_hours(database: Database, clock: Clock) -> None:
    began_s = clock.now_s
    await calls_of_two_days(database, clock)
    clock.now_s += 2 * DAY_S
    assert await roll_up(database, clock.now_s)
    minutes = await rows(database, MINUTE)
    for granularity, each_s in ((HOUR, HOUR_S), (DAY, DAY_S)):
        made = await rows(database, granularity)
        for row in made:
            members = [
                one
                for one in minutes
                if one["timestamp"] // each_s * each_s == row["timestamp"]
                and all(one[name] == row[name] for name in ("domain", "rule_id", "user_id", "endpoint", "region"))
            ]
            for name in (
                "total_requests",
                "allowed_requests",
                "throttled_requests",
                "blocked_requests",
                "cache_misses",
            ):
                assert row[name] == sum(one[name] for one in members)
            merged = merge_histograms(from_text(str(one["histogram"])) for one in members)
            assert from_text(str(row["histogram"])) == merged
            assert row["latency_p95_us"] == round(percentiles_us(merged, [95])[0] or 0)
            assert row["server_id"] == ""
        assert sum(row["total_requests"] for row in made) == sum(one["total_requests"] for one in minutes)
    assert began_s < clock.now_s


@pytest.mark.slow
async def test_rollup_is_idempotent(database: Database, clock: Clock) -> None:
    await calls_of_two_days(database, clock)
    clock.now_s += 2 * DAY_S
    await roll_up(database, clock.now_s)
    before = await rows(database, HOUR), await rows(database, DAY)
    assert await roll_up(database, clock.now_s) == 0
    assert (await rows(database, HOUR), await rows(database, DAY)) == before
    async with database.reading() as connection:
        assert await connection.scalar(select(func.count()).select_from(rollups_due)) == 0


async def test_late_minutes_are_added_to_their_hour_and_day(database: Database, clock: Clock) -> None:
    recorder = UsageRecorder(sample=0, max_waiting=10, clock=clock)
    late = UsageRecorder(sample=0, max_waiting=10, clock=clock)
    call(recorder, "alice", passed=2)
    call(late, "alice", passed=3)
    await UsageWriter(database, recorder, server_id="here", clock=clock).flush()
    now_s = clock.now_s + 2 * DAY_S
    await roll_up(database, now_s)
    await UsageWriter(database, late, server_id="there", clock=clock).flush()
    await roll_up(database, now_s)
    assert [row["total_requests"] for row in [*await rows(database, HOUR), *await rows(database, DAY)]] == [5, 5]


async def test_minutes_written_during_a_rollup_are_in_the_next_one(
    database: Database, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others can write during a rollup, also on SQLite."""
    recorder = UsageRecorder(sample=0, max_waiting=10, clock=clock)
    late = UsageRecorder(sample=0, max_waiting=10, clock=clock)
    call(recorder, "alice", passed=2)
    call(late, "alice", passed=3)
    await UsageWriter(database, recorder, server_id="here", clock=clock).flush()
    sums = rollup._sums

    async def sums_and_be_late(*arguments: Any) -> AsyncIterator[list[dict[str, Any]]]:
        async for some in sums(*arguments):
            yield some
        await UsageWriter(database, late, server_id="there", clock=clock).flush()

    with monkeypatch.context() as patched:
        patched.setattr(rollup, "_sums", sums_and_be_late)
        await roll_up(database, clock.now_s + 2 * HOUR_S)
    assert [row["total_requests"] for row in await rows(database, HOUR)] == [2]
    assert [use.total for use in await heaviest(database, "user", 0, clock.now_s + 60)] == [5]
    await roll_up(database, clock.now_s + 2 * HOUR_S)
    assert [row["total_requests"] for row in await rows(database, HOUR)] == [5]


async def test_current_hour_is_not_rolled_up(database: Database, clock: Clock) -> None:
    recorder = UsageRecorder(sample=0, max_waiting=10, clock=clock)
    call(recorder, "alice", passed=2)
    await UsageWriter(database, recorder, server_id="here", clock=clock).flush()
    assert await roll_up(database, clock.now_s + HOUR_S) == 0
    assert await roll_up(database, clock.now_s + HOUR_S + 120) == 1


@pytest.mark.slow
async def test_sums_are_equal_before_and_after_rollup(database: Database, clock: Clock) -> None:
    began_s = clock.now_s
    made = await calls_of_two_days(database, clock)
    ended_s = clock.now_s + 60

    async def result() -> tuple[object, ...]:
        by_user = await heaviest(database, "user", began_s, ended_s)
        assert {use.name: use.total for use in by_user} == made
        over_time = [await series(database, each, began_s, ended_s, user="alice") for each in (MINUTE, HOUR, DAY)]
        for points in over_time:
            assert sum(point.total for point in points) == made["alice"]
        return by_user, over_time, await heaviest(database, "rule", began_s + HOUR_S, ended_s - 7200)

    before = await result()
    for later_s in (HOUR_S, DAY_S / 2, 3 * DAY_S):
        await roll_up(database, began_s + later_s)
        assert await result() == before


async def test_heaviest_are_sorted_and_filtered(database: Database, clock: Clock) -> None:
    recorder = UsageRecorder(sample=0, max_waiting=10, clock=clock)
    call(recorder, "alice", passed=2, denied=1, elapsed_s=0.001, path="/a")
    call(recorder, "bob", passed=7, elapsed_s=0.01, path="/b")
    await UsageWriter(database, recorder, server_id="here", region="eu", clock=clock).flush()
    since_s, until_s = clock.now_s, clock.now_s + 60
    bob, alice = await heaviest(database, "user", since_s, until_s)
    assert (bob.name, bob.total, bob.denied, alice.name, alice.total, alice.denied) == ("bob", 7, 0, "alice", 3, 1)
    assert bob.p95_us == pytest.approx(10_000, rel=0.1)
    assert alice.p95_us == pytest.approx(1000, rel=0.1)
    assert [use.name for use in await heaviest(database, "endpoint", since_s, until_s, limit=1)] == ["/b"]
    assert [use.total for use in await heaviest(database, "rule", since_s, until_s, domain="edge")] == [10]
    assert await heaviest(database, "rule", since_s, until_s, domain="other") == []
    assert await heaviest(database, "user", 0, since_s) == []
    assert await heaviest(database, "user", -1e30, 1e30, limit=1) == [bob]
    assert await series(database, HOUR, since_s, until_s, rule="edge.user") == [SeriesPoint(since_s, 10, 9, 1, 0)]


async def test_series_with_too_many_points_is_rejected(database: Database) -> None:
    with pytest.raises(BadRequest, match="10000 points"):
        await series(database, MINUTE, 0, 1e9)
    with pytest.raises(BadRequest, match="granularity must be"):
        await series(database, "week", 0, 1)


async def test_decisions_are_paged_newest_first(database: Database, clock: Clock) -> None:
    recorder = UsageRecorder(sample=0, max_waiting=100, clock=clock)
    since_s = clock.now_s
    for user in ("alice", "bob"):
        for _ in range(3):
            call(recorder, user, denied=2)  # with the same timestamp
            clock.now_s += 1
    await UsageWriter(database, recorder, server_id="here", clock=clock).flush()
    paged, before = [], ""
    while page := await decisions(database, since_s, clock.now_s, before=before, limit=5):
        paged += page
        before = page[-1].cursor
    assert [one.at_s for one in paged] == sorted((one.at_s for one in paged), reverse=True)
    assert len({one.cursor for one in paged}) == 12
    assert len(await decisions(database, since_s, clock.now_s, user="bob", decision="throttled")) == 6
    assert await decisions(database, since_s, clock.now_s, decision="blocked") == []
    for bad in ("x", "1", "1-", "-1", "9" * 50 + "-1"):
        with pytest.raises(BadRequest, match=r"cursor .* is invalid"):
            await decisions(database, since_s, clock.now_s, before=bad)


async def test_foreign_row_does_not_stop_a_rollup(database: Database, clock: Clock) -> None:
    recorder = UsageRecorder(sample=0, max_waiting=10, clock=clock)
    call(recorder, "alice", passed=2)
    call(recorder, "bob", passed=3)
    await UsageWriter(database, recorder, server_id="here", clock=clock).flush()
    async with database.begin() as connection:
        await connection.execute(metrics.update().where(metrics.c.user_id == "alice").values(histogram="garbage"))
    assert await roll_up(database, clock.now_s + 2 * HOUR_S) == 1
    assert sorted(row["total_requests"] for row in await rows(database, HOUR)) == [2, 3]
    assert [use.total for use in await heaviest(database, "user", 0, clock.now_s + 60)] == [3, 2]
