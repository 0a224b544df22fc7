"""Queries of recorded usage and decisions.

Sums are exact to the minute for any time range: they use whole days and hours that have been rolled up, and minutes
elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from sqlalchemy import ColumnElement, and_, false, func, or_, select

from ratelimit_rls.core.names import MAX_ID_LENGTH
from ratelimit_rls.database.usage.tables import DAY, HOUR, MINUTE, SECONDS, audit_logs, metrics, rollups_due
from ratelimit_rls.errors import BadRequest
from ratelimit_rls.telemetry.histogram import add, parse_or_empty, percentiles_us

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from ratelimit_rls.database.database import Database

By = Literal["user", "rule", "endpoint", "domain", "region"]

_COLUMNS = {
    "user": metrics.c.user_id,
    "rule": metrics.c.rule_id,
    "endpoint": metrics.c.endpoint,
    "domain": metrics.c.domain,
    "region": metrics.c.region,
}
_SUMS = ("total", "allowed", "throttled", "blocked")
_SUM_COLUMNS = [func.sum(metrics.c[f"{name}_requests"]) for name in _SUMS]
_CACHE_COLUMNS = [func.sum(metrics.c.cache_hits), func.sum(metrics.c.cache_misses)]

MAX_POINTS = 10_000
"""Points of a series: a week of minutes."""

_ROWS_PER_FETCH = 500


class GroupedUsage(NamedTuple):
    """Usage of one user, rule, endpoint, domain or region."""

    name: str  # name of the user, rule, …
    total: int
    allowed: int
    throttled: int
    blocked: int
    cache_hits: int
    cache_misses: int
    p50_us: float | None
    p95_us: float | None
    p99_us: float | None

    @property
    def denied(self) -> int:
        return self.throttled + self.blocked


class SeriesPoint(NamedTuple):
    """One point of a series."""

    at_s: float
    total: int
    allowed: int
    throttled: int
    blocked: int


class Interval(NamedTuple):
    """A time range that is covered by rows of one granularity."""

    granularity: str
    since_s: float
    until_s: float


class RecordedDecision(NamedTuple):
    """One row of the decision log. Unknown texts are empty."""

    at_s: float
    log_id: int
    domain: str
    user: str
    api_key: str
    ip: str
    endpoint: str
    method: str
    rule: str
    decision: str
    reason: str
    current: int | None
    limit: int | None
    status: int | None
    retry_after_s: int | None
    region: str
    server_id: str
    latency_us: int | None

    @property
    def cursor(self) -> str:
        """Value of `before` for the next page."""
        return f"{round(self.at_s * 1e6)}-{self.log_id}"


async def heaviest(
    database: Database,
    by: By,
    since_s: float,
    until_s: float,
    *,
    domain: str | None = None,
    limit: int = 10,
) -> list[GroupedUsage]:
    """Return the groups with the most requests, heaviest first. Requests without a user (or endpoint, …) are
    excluded."""
    column = _COLUMNS[by]
    async with database.reading() as connection:
        where = [await _time_filter(connection, since_s, until_s), *([metrics.c.domain == domain] if domain else [])]
        total = func.sum(metrics.c.total_requests)
        query = select(column, *_SUM_COLUMNS, *_CACHE_COLUMNS).where(*where, column != "").group_by(column)
        sums = {row[0]: row for row in await connection.execute(query.order_by(total.desc(), column).limit(limit))}
        latencies: dict[str, dict[int, int]] = {name: {} for name in sums}
        if sums:
            histograms = select(column, metrics.c.histogram).where(*where, column.in_(sums))
            async with connection.stream(histograms.execution_options(yield_per=_ROWS_PER_FETCH)) as rows:
                async for some in rows.partitions():
                    for name, histogram in some:
                        add(latencies[name], parse_or_empty(histogram))
    return [
        GroupedUsage(name, *map(int, row[1:]), *percentiles_us(latencies[name], (50, 95, 99)))
        for name, row in sums.items()
    ]


async def series(
    database: Database,
    granularity: str,
    since_s: float,
    until_s: float,
    *,
    user: str | None = None,
    rule: str | None = None,
    domain: str | None = None,
) -> list[SeriesPoint]:
    """Return one point for each minute, hour or day with requests. Raises BadRequest if these could be too many."""
    each_s = SECONDS.get(granularity)
    if each_s is None:
        raise BadRequest(f"granularity must be minute, hour or day, not {granularity!r}")
    if (until_s - since_s) / each_s > MAX_POINTS:
        raise BadRequest(
            f"a series must have at most {MAX_POINTS} points; use a shorter time range or a coarser granularity"
        )
    named = ((metrics.c.user_id, user), (metrics.c.rule_id, rule), (metrics.c.domain, domain))
    where = [column == value for column, value in named if value is not None]
    points: dict[float, list[int]] = {}
    async with database.reading() as connection:
        within = await _time_filter(connection, since_s, until_s, granularity)
        query = select(metrics.c.timestamp, *_SUM_COLUMNS).where(within, *where).group_by(metrics.c.timestamp)
        for at_s, *sums in await connection.execute(query):
            point = points.setdefault(at_s // each_s * each_s, [0] * len(_SUMS))
            for number, value in enumerate(sums):
                point[number] += int(value)
    return [SeriesPoint(at_s, *points[at_s]) for at_s in sorted(points)]


async def decisions(
    database: Database,
    since_s: float,
    until_s: float,
    *,
    user: str | None = None,
    decision: str | None = None,
    before: str = "",
    limit: int = 100,
) -> list[RecordedDecision]:
    """Return recorded decisions, newest first.

    `before` is the cursor of the last one of the previous page. Raises BadRequest if it is invalid.
    """
    table = audit_logs
    where = [table.c.timestamp >= since_s, table.c.timestamp < until_s]
    where += [table.c.user_id == user[:MAX_ID_LENGTH]] if user is not None else []
    where += [table.c.decision == decision] if decision is not None else []
    if before:
        at_s, log_id = _parse_cursor(before)
        # The first condition is redundant, but lets the index start there.
        where += [table.c.timestamp <= at_s, or_(table.c.timestamp < at_s, table.c.log_id < log_id)]
    columns = [table.c[name] for name in _DECISION_COLUMNS]
    query = select(*columns).where(*where).order_by(table.c.timestamp.desc(), table.c.log_id.desc()).limit(limit)
    async with database.reading() as connection:
        return [RecordedDecision(*_empty_for_none(row)) for row in await connection.execute(query)]


_DECISION_COLUMNS = (
    "timestamp",
    "log_id",
    "domain",
    "user_id",
    "api_key_id",
    "ip_address",
    "endpoint",
    "http_method",
    "rule_id",
    "decision",
    "reason",
    "current_count",
    "limit_value",
    "response_status",
    "retry_after_seconds",
    "region",
    "server_id",
    "latency_us",
)
_NUMBERS = {"current", "limit", "status", "retry_after_s", "latency_us"}


def _empty_for_none(row: Any) -> Iterator[Any]:
    for name, value in zip(RecordedDecision._fields, row, strict=True):
        yield "" if value is None and name not in _NUMBERS else value


def _parse_cursor(text: str) -> tuple[float, int]:
    at_us, _, log_id = text.partition("-")
    if not (at_us.isdecimal() and log_id.isdecimal() and len(text) < 40):
        raise BadRequest("the cursor of a page of decisions is invalid")
    return int(at_us) / 1e6, int(log_id)


async def _time_filter(
    connection: AsyncConnection, since_s: float, until_s: float, coarsest: str = DAY
) -> ColumnElement[bool]:
    """Return the condition for rows that cover this time range, each request exactly once."""
    at = metrics.c.timestamp
    first_s, last_s = (await connection.execute(select(func.min(at), func.max(at)))).one()
    if first_s is None:
        return false()
    due: dict[str, set[float]] = {HOUR: set(), DAY: set()}
    for granularity, at_s in await connection.execute(select(rollups_due.c.granularity, rollups_due.c.timestamp)):
        due[granularity].add(at_s)
    # Restrict the range to where there are rows.
    since_s, until_s = max(since_s, first_s // SECONDS[DAY] * SECONDS[DAY]), min(until_s, last_s + SECONDS[DAY])
    return or_(
        false(),
        *(
            and_(metrics.c.granularity == granularity, at >= from_s, at < to_s)
            for granularity, from_s, to_s in split_interval(since_s, until_s, due[HOUR], due[DAY], coarsest)
        ),
    )


def split_interval(
    since_s: float, until_s: float, due_hours: Collection[float], due_days: Collection[float], coarsest: str = DAY
) -> list[Interval]:
    """Split a time range, in whole minutes, into whole days and hours where these are rolled up, and minutes
    elsewhere."""
    hour_s, day_s = SECONDS[HOUR], SECONDS[DAY]
    closed_days = {*due_days, *(at_s // day_s * day_s for at_s in due_hours)}
    intervals: list[Interval] = []
    at_s = since_s // SECONDS[MINUTE] * SECONDS[MINUTE]
    until_s = -(-until_s // SECONDS[MINUTE]) * SECONDS[MINUTE]
    while at_s < until_s:
        if coarsest == DAY and at_s % day_s == 0 and at_s + day_s <= until_s and at_s not in closed_days:
            part = Interval(DAY, at_s, at_s + day_s)
        elif coarsest != MINUTE and at_s % hour_s == 0 and at_s + hour_s <= until_s and at_s not in due_hours:
            part = Interval(HOUR, at_s, at_s + hour_s)
        else:
            part = Interval(MINUTE, at_s, min(at_s // hour_s * hour_s + hour_s, until_s))
        if intervals and intervals[-1].granularity == part.granularity:
            intervals[-1] = intervals[-1]._replace(until_s=part.until_s)
        else:
            intervals.append(part)
        at_s = part.until_s
    return intervals
