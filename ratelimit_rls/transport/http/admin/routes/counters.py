"""Counters: how they stand, and forgetting them."""

from __future__ import annotations

from starlette.responses import Response

from ratelimit_rls.core.accounts import Role
from ratelimit_rls.core.decide import decide
from ratelimit_rls.core.model import Answer as StoreAnswer
from ratelimit_rls.core.model import Purpose
from ratelimit_rls.errors import StoreError
from ratelimit_rls.records.desk import Change
from ratelimit_rls.transport.http.admin.models import Asked, ResetBody
from ratelimit_rls.transport.http.admin.noted import note_reset
from ratelimit_rls.transport.http.admin.planning import known_caller, plan_unblocked, request_of, whoever
from ratelimit_rls.transport.http.admin.told import Forgotten, ToldDecision
from ratelimit_rls.transport.http.admin.visit import Answer, Here
from ratelimit_rls.transport.http.admin.way import needs, routes_of

PENALTY = b":penalty"

router = routes_of("counters", "counters")


@router.post("/peek", summary="Tell how descriptors stand; nothing is counted", response_model=ToldDecision)
@needs(Role.READ)
async def peek(visit: Here, body: Asked) -> Response:
    request, refusal, _ = known_caller(visit.backend, request_of(body, Purpose.LOOK))
    if refusal is not None:  # blocked, whatever the counters say
        outline = visit.backend.limiter.refuse(request, refusal).outline
        return visit.show(ToldDecision.of(request.descriptors, decide(outline, None)))
    plan = visit.backend.limiter.plan(request)
    answer: StoreAnswer | None = None
    if plan.keys:
        # Past the service, which has other answers where the store has none.
        (told,) = await visit.backend.store.spend([visit.backend.store.prepare(plan)])
        if isinstance(told, StoreError):
            raise told
        answer = told
    return visit.show(ToldDecision.of(request.descriptors, decide(plan.outline, answer)))


@router.post("/reset", summary="Forget what was counted for descriptors", response_model=Forgotten)
async def reset(visit: Here, body: ResetBody) -> Response:
    """Their limits are as if never used, and their penalties are lifted."""
    request = known_caller(visit.backend, whoever(request_of(body))).request
    keys = plan_unblocked(visit.backend, request).keys
    if body.penalty_only:
        keys = tuple(key for key in keys if key.endswith(PENALTY))

    async def work(change: Change) -> Answer:
        counters = visit.backend.counters
        forgotten = await (counters.present(keys) if visit.dry_run else counters.forget(keys)) if keys else []
        await note_reset(change, request, len(forgotten))
        return Answer(Forgotten(counters=[key.decode() for key in forgotten], looked_for=len(keys)))

    return await visit.change(work)
