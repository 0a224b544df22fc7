"""Decisions on demand and counters: check, explain and simulate; peek and reset."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from ratelimit_rls.admin.counters import find_counters, peek, record_reset, reset
from ratelimit_rls.admin.decisions import active_tree, check, explain
from ratelimit_rls.admin.http.changes import ChangeResult
from ratelimit_rls.admin.http.dependencies import READ, WRITE, Backend, Change, make_router
from ratelimit_rls.admin.http.schemas.decisions import (
    Decision,
    DescriptorExplanation,
    Explanation,
    Rejection,
    ResetResult,
    SimulationResult,
)
from ratelimit_rls.admin.http.schemas.requests import (
    CheckRequest,
    RateLimitRequest,
    ResetRequest,
    SimulatedRequest,
    SimulationRequest,
)
from ratelimit_rls.admin.simulation import (
    BoundedLock,
    SimulatedDecisions,
    TimedRequest,
    compile_simulated,
    simulate,
)
from ratelimit_rls.core.model import Purpose
from ratelimit_rls.database.repository import UnitOfWork

counters = make_router("counters", "counters")
decisions = make_router("decisions", "decisions")


@counters.post(
    "/peek", summary="Read the limits of descriptors without counting", response_model=Decision, dependencies=[READ]
)
async def peek_counters(backend: Backend, body: RateLimitRequest) -> Decision:
    request, decision = await peek(backend, body.to_request(Purpose.LOOK))
    return Decision.build(request.descriptors, decision)


@counters.post("/reset", summary="Reset the counters of descriptors", response_model=ResetResult, dependencies=[WRITE])
async def reset_counters(backend: Backend, change: Change, body: ResetRequest) -> Response:
    """The limits become unused, and penalties are lifted. The audit entry is stored first, with the number of counters
    in use: without the database nothing is reset, and if the store fails afterwards (503) the entry stays."""
    found = find_counters(backend, body.to_request(), penalty_only=body.penalty_only)

    async def record(unit: UnitOfWork) -> None:
        await record_reset(unit, backend.counters, found)

    async def work() -> ChangeResult:
        deleted = await reset(backend.counters, found, dry_run=change.dry_run)
        return ChangeResult(ResetResult(counters=[key.decode() for key in deleted], total=len(found.keys)))

    return await change.run_recorded(record, work)


@decisions.post(
    "/check", summary="Decide as the service would, and count", response_model=Decision, dependencies=[WRITE]
)
async def check_decision(backend: Backend, change: Change, body: CheckRequest) -> Response:
    """A dry run counts nothing. With an Idempotency-Key the request counts once, however often it is sent. An invalid
    credential is denied as the service denies it."""
    request_id = None
    if change.idempotency is not None:
        key = f"{change.actor.token_id}\0{change.idempotency.key}\0{change.idempotency.request_digest}"
        request_id = hashlib.sha256(key.encode()).digest()
    purpose = Purpose.LOOK if change.dry_run else Purpose.DECIDE
    request, decision = await check(backend, body.to_request(purpose), request_id)
    return change.respond(ChangeResult(Decision.build(request.descriptors, decision)))


@decisions.post(
    "/explain",
    summary="Explain which rule a descriptor matches, and why",
    response_model=Explanation,
    dependencies=[READ],
)
async def explain_decision(backend: Backend, body: RateLimitRequest) -> Explanation:
    """Also works for a blocked caller: shows the block, and the limits that apply once it ends. An invalid credential
    is 422, as it is for counters."""
    rejection, descriptors = explain(backend, body.to_request())
    return Explanation(
        domain=body.domain,
        rejection=Rejection.model_validate(rejection) if rejection else None,
        descriptors=[DescriptorExplanation.build(one) for one in descriptors],
    )


@decisions.post(
    "/simulate", summary="Simulate requests on a virtual clock", response_model=SimulationResult, dependencies=[READ]
)
async def simulate_decisions(request: Request, backend: Backend, body: SimulationRequest) -> SimulatedDecisions:
    """No real counter changes. Users and keys have their current limits and blocks. Only one simulation runs at a
    time."""
    lock: BoundedLock = request.app.state.simulations
    async with lock.acquire("simulations"):
        tree = active_tree(backend) if body.documents is None else await compile_simulated(backend, body.documents)
        return await simulate(
            tree, backend.directory, backend.verifier, _parse_requests(body.requests), backend.clock()
        )


def _parse_requests(bodies: Sequence[Any]) -> Iterator[TimedRequest]:
    """Validate the requests one by one. Raises RequestValidationError with the position in the whole body."""
    for number, body in enumerate(bodies):
        try:
            timed = SimulatedRequest.model_validate(body)
        except ValidationError as invalid:
            errors = invalid.errors(include_url=False)
            raise RequestValidationError(
                [{**error, "loc": ("body", "requests", number, *error["loc"])} for error in errors]
            ) from None
        yield TimedRequest(timed.at, timed.to_request())
