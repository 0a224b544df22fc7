"""Minutes, hours and days: the same sums, however they are asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import pytest
from sqlalchemy import func, select

from ratelimit_rls.errors import BadRequest
from ratelimit_rls.records import rollup
from ratelimit_rls.records.database import Database
from ratelimit_rls.records.decisions import Scribe
from ratelimit_rls.records.rollup import roll_up
from ratelimit_rls.records.series import DAY, HOUR, MINUTE, metrics, rollups_due
from ratelimit_rls.records.usage import Point, decisions, heaviest, series
from ratelimit_rls.telemetry.histogram import added, from_text, percentiles_us
from ratelimit_rls.telemetry.ledger import Ledger
from tests.integration.series.calls import call
from tests.integration.series.conftest import Clock

DAY_S, HOUR_S = 86_400, 3600


async def calls_of_two_days(database: Database, clock: Clock) -> Counter[str]:
    """By two processes, at random; how many each user made."""
    draw = Random(7)
    made: Counter[str] = Counter()
    ledgers = [Ledger(sample=0, most_waiting=1000, clock=clock) for _ in range(2)]
    scribes = [Scribe(database, ledger, server_id="here", region="eu", clock=clock) for ledger in ledgers]
    for _ in range(12):
        clock.now_s += draw.randrange(60, 4 * HOUR_S)
        for ledger in ledgers:
            user = draw.choice(["alice", "bob"])
            passed, refused = draw.randrange(1, 5), draw.randrange(3)
            call(ledger, user, passed, refused, draw.random() / 100, path=draw.choice(["/a", "/b"]))
            made[user] += passed + refused
    for scribe in scribes:
        await scribe.flush()
    return made


async def rows(database: Database, granularity: str) -> list[dict[str, object]]:
    async with database.reading() as connection:
        asked = select(metrics).where(metrics.c.granularity == granularity).order_by(metrics.c.metric_id)
        return [dict(row._mapping) for row in await connection.execute(asked)]


@pytest.mark.slow
async def test_an_hour_is_the_sum_of_its_minutes_and_a_day_of_its_hours(database: Database, clock: Clock) -> None:
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
                if one["timestamp"] // each_s * each_s == row["timestamp"]  # type: ignore[operator]
                and all(one[name] == row[name] for name in ("domain", "rule_id", "user_id", "endpoint", "region"))
            ]
            for name in (
                "total_requests",
                "allowed_requests",
                "throttled_requests",
                "blocked_requests",
                "cache_misses",
            ):
                assert row[name] == sum(one[name] for one in members)  # type: ignore[misc]
            merged = added(from_text(str(one["histogram"])) for one in members)
            assert from_text(str(row["histogram"])) == merged
            assert row["latency_p95_us"] == round(percentiles_us(merged, [95])[0] or 0)
            assert row["server_id"] == ""
        assert sum(row["total_requests"] for row in made) == sum(  # type: ignore[misc]
            one["total_requests"]
            for one in minutes  # type: ignore[misc]
        )
    assert began_s < clock.now_s


@pytest.mark.slow
async def test_rolling_up_again_changes_nothing_and_nothing_is_left_to_do(database: Database, clock: Clock) -> None:
    await calls_of_two_days(database, clock)
    clock.now_s += 2 * DAY_S
    await roll_up(database, clock.now_s)
    before = await rows(database, HOUR), await rows(database, DAY)
    assert await roll_up(database, clock.now_s) == 0
    assert (await rows(database, HOUR), await rows(database, DAY)) == before
    async with database.reading() as connection:
        assert await connection.scalar(select(func.count()).select_from(rollups_due)) == 0


async def test_minutes_that_come_late_are_in_their_hour_and_day(database: Database, clock: Clock) -> None:
    ledger = Ledger(sample=0, most_waiting=10, clock=clock)
    late = Ledger(sample=0, most_waiting=10, clock=clock)
    call(ledger, "alice", passed=2)
    call(late, "alice", passed=3)
    await Scribe(database, ledger, server_id="here", clock=clock).flush()
    now_s = clock.now_s + 2 * DAY_S
    await roll_up(database, now_s)
    await Scribe(database, late, server_id="there", clock=clock).flush()
    await roll_up(database, now_s)
    assert [row["total_requests"] for row in [*await rows(database, HOUR), *await rows(database, DAY)]] == [5, 5]


async def test_minutes_that_come_while_their_hour_is_made_are_in_it_the_next_time(
    database: Database, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others can write meanwhile, on SQLite, too."""
    ledger = Ledger(sample=0, most_waiting=10, clock=clock)
    late = Ledger(sample=0, most_waiting=10, clock=clock)
    call(ledger, "alice", passed=2)
    call(late, "alice", passed=3)
    await Scribe(database, ledger, server_id="here", clock=clock).flush()
    sums = rollup._sums

    async def sums_and_be_late(*arguments: Any) -> AsyncIterator[list[dict[str, Any]]]:
        async for some in sums(*arguments):
            yield some
        await Scribe(database, late, server_id="there", clock=clock).flush()

    with monkeypatch.context() as patched:
        patched.setattr(rollup, "_sums", sums_and_be_late)
        await roll_up(database, clock.now_s + 2 * HOUR_S)
    assert [row["total_requests"] for row in await rows(database, HOUR)] == [2]
    assert [use.total for use in await heaviest(database, "user", 0, clock.now_s + 60)] == [5]
    await roll_up(database, clock.now_s + 2 * HOUR_S)
    assert [row["total_requests"] for row in await rows(database, HOUR)] == [5]


async def test_an_hour_that_runs_is_left_alone(database: Database, clock: Clock) -> None:
    ledger = Ledger(sample=0, most_waiting=10, clock=clock)
    call(ledger, "alice", passed=2)
    await Scribe(database, ledger, server_id="here", clock=clock).flush()
    assert await roll_up(database, clock.now_s + HOUR_S) == 0
    assert await roll_up(database, clock.now_s + HOUR_S + 120) == 1


@pytest.mark.slow
async def test_sums_are_the_same_before_and_after(database: Database, clock: Clock) -> None:
    began_s = clock.now_s
    made = await calls_of_two_days(database, clock)
    ended_s = clock.now_s + 60

    async def told() -> tuple[object, ...]:
        by_user = await heaviest(database, "user", began_s, ended_s)
        assert {use.name: use.total for use in by_user} == made
        over_time = [await series(database, each, began_s, ended_s, user="alice") for each in (MINUTE, HOUR, DAY)]
        for points in over_time:
            assert sum(point.total for point in points) == made["alice"]
        return by_user, over_time, await heaviest(database, "rule", began_s + HOUR_S, ended_s - 7200)

    before = await told()
    for later_s in (HOUR_S, DAY_S / 2, 3 * DAY_S):
        await roll_up(database, began_s + later_s)
        assert await told() == before


async def test_the_heaviest_come_first_and_can_be_asked_for_by_what_they_did(database: Database, clock: Clock) -> None:
    ledger = Ledger(sample=0, most_waiting=10, clock=clock)
    call(ledger, "alice", passed=2, refused=1, elapsed_s=0.001, path="/a")
    call(ledger, "bob", passed=7, elapsed_s=0.01, path="/b")
    await Scribe(database, ledger, server_id="here", region="eu", clock=clock).flush()
    since_s, until_s = clock.now_s, clock.now_s + 60
    bob, alice = await heaviest(database, "user", since_s, until_s)
    assert (bob.name, bob.total, bob.refused, alice.name, alice.total, alice.refused) == ("bob", 7, 0, "alice", 3, 1)
    assert bob.p95_us == pytest.approx(10_000, rel=0.1)
    assert alice.p95_us == pytest.approx(1000, rel=0.1)
    assert [use.name for use in await heaviest(database, "endpoint", since_s, until_s, limit=1)] == ["/b"]
    assert [use.total for use in await heaviest(database, "rule", since_s, until_s, domain="edge")] == [10]
    assert await heaviest(database, "rule", since_s, until_s, domain="other") == []
    assert await heaviest(database, "user", 0, since_s) == []
    assert await heaviest(database, "user", -1e30, 1e30, limit=1) == [bob]
    assert await series(database, HOUR, since_s, until_s, rule="edge.user") == [Point(since_s, 10, 9, 1, 0)]


async def test_too_long_a_series_is_refused(database: Database) -> None:
    with pytest.raises(BadRequest, match="10000 points"):
        await series(database, MINUTE, 0, 1e9)
    with pytest.raises(BadRequest, match="no granularity"):
        await series(database, "week", 0, 1)


async def test_decisions_come_newest_first_in_pages(database: Database, clock: Clock) -> None:
    ledger = Ledger(sample=0, most_waiting=100, clock=clock)
    since_s = clock.now_s
    for user in ("alice", "bob"):
        for _ in range(3):
            call(ledger, user, refused=2)  # at one moment
            clock.now_s += 1
    await Scribe(database, ledger, server_id="here", clock=clock).flush()
    paged, before = [], ""
    while page := await decisions(database, since_s, clock.now_s, before=before, limit=5):
        paged += page
        before = page[-1].cursor
    assert [one.at_s for one in paged] == sorted((one.at_s for one in paged), reverse=True)
    assert len({one.cursor for one in paged}) == 12
    assert len(await decisions(database, since_s, clock.now_s, user="bob", decision="throttled")) == 6
    assert await decisions(database, since_s, clock.now_s, decision="blocked") == []
    for bad in ("x", "1", "1-", "-1", "9" * 50 + "-1"):
        with pytest.raises(BadRequest, match="no cursor"):
            await decisions(database, since_s, clock.now_s, before=bad)


async def test_a_row_of_somebody_else_s_stops_no_rollup(database: Database, clock: Clock) -> None:
    ledger = Ledger(sample=0, most_waiting=10, clock=clock)
    call(ledger, "alice", passed=2)
    call(ledger, "bob", passed=3)
    await Scribe(database, ledger, server_id="here", clock=clock).flush()
    async with database.begin() as connection:
        await connection.execute(metrics.update().where(metrics.c.user_id == "alice").values(histogram="garbage"))
    assert await roll_up(database, clock.now_s + 2 * HOUR_S) == 1
    assert sorted(row["total_requests"] for row in await rows(database, HOUR)) == [2, 3]
    assert [use.total for use in await heaviest(database, "user", 0, clock.now_s + 60)] == [3, 2]
