"""The record: who calls most, how it went over time, and what was decided."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import Query
from starlette.responses import Response

from ratelimit_rls.records.usage import decisions, heaviest, series
from ratelimit_rls.transport.http.admin.models import Name, Sought
from ratelimit_rls.transport.http.admin.moments import Moment
from ratelimit_rls.transport.http.admin.pages import WhichPart, answer_page
from ratelimit_rls.transport.http.admin.problems import wrong_field
from ratelimit_rls.transport.http.admin.recorded import HeavyUse, ShownDecision, ShownPoint, ShownSeries, ShownUsage
from ratelimit_rls.transport.http.admin.shown import Page
from ratelimit_rls.transport.http.admin.visit import Here, Visit
from ratelimit_rls.transport.http.admin.way import routes_of

USUAL_SPAN_S = 24 * 3600
MOST_HEAVIEST = 1000

router = routes_of("usage", "records")
recorded = routes_of("decisions", "records")

Since = Annotated[Moment | None, Query(description="From when on; a day before `until` if it is not said.")]
Until = Annotated[Moment | None, Query(description="Up to when; now, if it is not said.")]
OfDomain = Annotated[Sought | None, Query(description="Only of this domain.")]


@router.get("", summary="List the heaviest users, rules or endpoints", response_model=ShownUsage)
async def show_heaviest(
    visit: Here,
    by: Annotated[Literal["user", "rule", "endpoint", "domain", "region"], Query()] = "user",
    since: Since = None,
    until: Until = None,
    domain: OfDomain = None,
    top: Annotated[int, Query(ge=1, le=MOST_HEAVIEST)] = 10,
) -> Response:
    since_s, until_s = _span(visit, since, until)
    found = await heaviest(visit.backend.database, by, since_s, until_s, domain=domain, limit=top)
    return visit.show(ShownUsage.of(by, since_s, until_s, [HeavyUse.of(one) for one in found]))


@router.get("/series", summary="Show calls over time", response_model=ShownSeries)
async def show_series(
    visit: Here,
    granularity: Annotated[Literal["minute", "hour", "day"], Query()] = "hour",
    since: Since = None,
    until: Until = None,
    user: Annotated[Name | None, Query(description="Only this user's.")] = None,
    rule: Annotated[Sought | None, Query(description="Only under this rule, by its path.")] = None,
    domain: OfDomain = None,
) -> Response:
    since_s, until_s = _span(visit, since, until)
    database = visit.backend.database
    found = await series(database, granularity, since_s, until_s, user=user, rule=rule, domain=domain)
    return visit.show(ShownSeries.of(granularity, since_s, until_s, [ShownPoint.of(one) for one in found]))


@recorded.get("", summary="List recorded decisions, the newest first", response_model=Page[ShownDecision])
async def list_decisions(
    visit: Here,
    part: WhichPart,
    since: Since = None,
    until: Until = None,
    user: Annotated[Name | None, Query(description="Only this user's.")] = None,
    decision: Annotated[Literal["allowed", "throttled", "blocked"] | None, Query(description="Only such.")] = None,
) -> Response:
    """Refusals are all there; of what was admitted, the share that RLS_AUDIT_SAMPLE says."""
    since_s, until_s = _span(visit, since, until)
    return await answer_page(
        visit,
        part,
        lambda before, limit: decisions(
            visit.backend.database,
            since_s,
            until_s,
            user=user,
            decision=decision,
            before=str(before or ""),
            limit=limit,
        ),
        lambda one: one.cursor,
        ShownDecision.of,
    )


def _span(visit: Visit, since: float | None, until: float | None) -> tuple[float, float]:
    until_s = visit.now_s() if until is None else until
    since_s = max(0.0, until_s - USUAL_SPAN_S) if since is None else since
    if since_s >= until_s:
        raise wrong_field("since", "it is not before until")
    return since_s, until_s
