"""Records: usage, decisions, the audit log, and the state of the sources of rules and accounts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import Query

from ratelimit_rls.admin.backend import AdminBackend, SourceState
from ratelimit_rls.admin.http.dependencies import READ, Backend, make_router
from ratelimit_rls.admin.http.pagination import PageItems, Pagination
from ratelimit_rls.admin.http.schemas.decisions import RecordedDecisionPage, UsageReport, UsageSeries
from ratelimit_rls.admin.http.schemas.fields import Name, SearchText, Timestamp
from ratelimit_rls.admin.http.schemas.resources import AuditEntryPage, SourceStatusList
from ratelimit_rls.database.administration import AuditRow
from ratelimit_rls.database.usage import queries
from ratelimit_rls.errors import BadRequest

DEFAULT_RANGE_S = 24 * 3600
MAX_TOP = 1000

usage = make_router("usage", "records")
recorded_decisions = make_router("decisions", "records")
audit = make_router("audit", "records")
sources = make_router("sources", "sources")

Since = Annotated[Timestamp | None, Query(description="Start of the time range; default: a day before `until`.")]
Until = Annotated[Timestamp | None, Query(description="End of the time range; default: now.")]
DomainFilter = Annotated[SearchText | None, Query(description="Only this domain.")]
UserFilter = Annotated[Name | None, Query(description="Only this user.")]


@usage.get(
    "",
    summary="List the users, rules, endpoints, domains or regions with the most requests",
    response_model=UsageReport,
    dependencies=[READ],
)
async def get_usage(
    backend: Backend,
    by: Annotated[
        Literal["user", "rule", "endpoint", "domain", "region"], Query(description="What the requests are grouped by.")
    ] = "user",
    since: Since = None,
    until: Until = None,
    domain: DomainFilter = None,
    top: Annotated[int, Query(ge=1, le=MAX_TOP, description="Maximum number of groups.")] = 10,
) -> dict[str, Any]:
    since_s, until_s = _time_range(backend, since, until)
    items = await queries.heaviest(backend.database, by, since_s, until_s, domain=domain, limit=top)
    return {"by": by, "since": since_s, "until": until_s, "items": items}


@usage.get("/series", summary="Get requests over time", response_model=UsageSeries, dependencies=[READ])
async def get_usage_series(
    backend: Backend,
    granularity: Annotated[Literal["minute", "hour", "day"], Query(description="Length of an interval.")] = "hour",
    since: Since = None,
    until: Until = None,
    user: UserFilter = None,
    rule: Annotated[SearchText | None, Query(description="Only this rule, by its path.")] = None,
    domain: DomainFilter = None,
) -> dict[str, Any]:
    since_s, until_s = _time_range(backend, since, until)
    points = await queries.series(backend.database, granularity, since_s, until_s, user=user, rule=rule, domain=domain)
    return {"granularity": granularity, "since": since_s, "until": until_s, "points": points}


@recorded_decisions.get(
    "", summary="List recorded decisions, newest first", response_model=RecordedDecisionPage, dependencies=[READ]
)
async def list_decisions(
    backend: Backend,
    page: Pagination,
    since: Since = None,
    until: Until = None,
    user: UserFilter = None,
    decision: Annotated[
        Literal["allowed", "throttled", "blocked"] | None,
        Query(description="Only decisions of this kind; throttled: denied by a limit."),
    ] = None,
) -> PageItems[queries.RecordedDecision]:
    """The history: `POST /decisions/check` decides. Contains all denials up to RLS_AUDIT_REFUSALS_PER_MINUTE of each
    process and a sample beyond that, and the share of admitted requests that RLS_AUDIT_SAMPLE sets."""
    since_s, until_s = _time_range(backend, since, until)
    return await page.read(
        lambda before, limit: queries.decisions(
            backend.database, since_s, until_s, user=user, decision=decision, before=str(before or ""), limit=limit
        ),
        lambda one: one.cursor,
    )


@audit.get("", summary="List audit entries, newest first", response_model=AuditEntryPage, dependencies=[READ])
async def list_audit_entries(
    backend: Backend,
    page: Pagination,
    kind: Annotated[
        Name | None, Query(description="Only entries of this kind: rule, tier, user, key, token, …")
    ] = None,
    subject: Annotated[Name | None, Query(description="Only entries about the resource with this id.")] = None,
    actor: Annotated[Name | None, Query(description="Only entries by this actor.")] = None,
) -> PageItems[AuditRow]:
    async with backend.repository.reading() as reader:
        return await page.read(
            lambda before, limit: reader.audit(
                int(before) if before is not None else None, limit, kind=kind, subject=subject, actor=actor
            ),
            lambda row: row.audit_id,
        )


@sources.get("", summary="List the sources of rules and accounts", response_model=SourceStatusList, dependencies=[READ])
async def list_sources(backend: Backend) -> dict[str, Sequence[SourceState]]:
    """Shows the state of the process that answers."""
    return {"sources": backend.sources()}


def _time_range(backend: AdminBackend, since: float | None, until: float | None) -> tuple[float, float]:
    until_s = backend.clock() if until is None else until
    since_s = max(0.0, until_s - DEFAULT_RANGE_S) if since is None else since
    if since_s >= until_s:
        raise BadRequest("must be before `until`", field="since")
    return since_s, until_s
