"""The record as the API shows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from pydantic import Field

from ratelimit_rls.transport.http.admin.moments import moment_text
from ratelimit_rls.transport.http.admin.shown import MomentText, Shown

if TYPE_CHECKING:
    from ratelimit_rls.records.usage import Point, RecordedDecision, Use


class HeavyUse(Shown):
    name: str = Field(description="Of the user, rule, endpoint, domain or region.")
    total: int
    allowed: int
    throttled: int
    blocked: int
    cache_hits: int = Field(description="Refusals that were remembered, so that the store was not asked.")
    cache_misses: int
    p50_us: float | None
    p95_us: float | None
    p99_us: float | None

    @classmethod
    def of(cls, use: Use) -> Self:
        return cls(**use._asdict())


class ShownUsage(Shown):
    by: str
    since: MomentText
    until: MomentText
    items: list[HeavyUse]

    @classmethod
    def of(cls, by: str, since_s: float, until_s: float, items: Sequence[HeavyUse]) -> Self:
        return cls(by=by, since=moment_text(since_s), until=moment_text(until_s), items=list(items))


class ShownPoint(Shown):
    at: MomentText
    total: int
    allowed: int
    throttled: int
    blocked: int

    @classmethod
    def of(cls, point: Point) -> Self:
        counts = {name: count for name, count in point._asdict().items() if name != "at_s"}
        return cls(at=moment_text(point.at_s), **counts)


class ShownSeries(Shown):
    granularity: str
    since: MomentText
    until: MomentText
    points: list[ShownPoint] = Field(description="Where there were none, there is no point.")

    @classmethod
    def of(cls, granularity: str, since_s: float, until_s: float, points: Sequence[ShownPoint]) -> Self:
        return cls(granularity=granularity, since=moment_text(since_s), until=moment_text(until_s), points=list(points))


class ShownDecision(Shown):
    """What was not known is empty, or null where it is a number."""

    at: MomentText
    domain: str
    user: str
    api_key: str = Field(description="Its public id.")
    ip: str
    endpoint: str
    method: str
    rule: str
    decision: str = Field(description="allowed, throttled or blocked.")
    reason: str
    current: int | None
    limit: int | None
    status: int | None
    retry_after_s: int | None
    region: str
    server_id: str
    latency_us: int | None

    @classmethod
    def of(cls, one: RecordedDecision) -> Self:
        told = one._asdict()
        del told["log_id"]
        return cls(at=moment_text(told.pop("at_s")), **told)
