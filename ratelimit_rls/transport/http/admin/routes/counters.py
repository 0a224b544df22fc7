"""Counters: how they stand, and forgetting them."""

from __future__ import annotations

from starlette.responses import Response

from ratelimit_rls.core.accounts import Role
from ratelimit_rls.core.decide import decide
from ratelimit_rls.core.model import Answer as StoreAnswer
from ratelimit_rls.core.model import Descriptor, Purpose
from ratelimit_rls.errors import StoreError, one_line
from ratelimit_rls.records.desk import Change
from ratelimit_rls.transport.http.admin.models import Asked, ResetBody
from ratelimit_rls.transport.http.admin.planning import request_of
from ratelimit_rls.transport.http.admin.told import Forgotten, ToldDecision
from ratelimit_rls.transport.http.admin.visit import Answer, Here
from ratelimit_rls.transport.http.admin.way import needs, routes_of

PENALTY = b":penalty"

LONGEST_WORDS = 1000
"""Of a descriptor in the record of changes."""

router = routes_of("counters", "counters")


@router.post("/peek", summary="Tell how descriptors stand; nothing is counted", response_model=ToldDecision)
@needs(Role.READ)
async def peek(visit: Here, body: Asked) -> Response:
    request = request_of(body, Purpose.LOOK)
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
    request = request_of(body)
    # As if something were given back: of a blocked caller nothing else is asked of the counters.
    request = request._replace(descriptors=tuple([one._replace(is_refund=True) for one in request.descriptors]))
    keys = visit.backend.limiter.plan(request).keys
    if body.penalty_only:
        keys = tuple(key for key in keys if key.endswith(PENALTY))

    async def work(change: Change) -> Answer:
        counters = visit.backend.counters
        forgotten = await (counters.present(keys) if visit.dry_run else counters.forget(keys)) if keys else []
        shown = Forgotten(counters=[key.decode() for key in forgotten], looked_for=len(keys))
        done = {"descriptors": [_words(descriptor) for descriptor in request.descriptors], "forgotten": len(forgotten)}
        await change.note("reset", "counters", body.domain, done)
        return Answer(shown)

    return await visit.change(work)


def _words(descriptor: Descriptor) -> str:
    return one_line(",".join(f"{key}={value}" for key, value in descriptor.entries)[:LONGEST_WORDS])
