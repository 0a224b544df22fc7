"""Decisions on demand: one that counts, why one would be so, and many that count nowhere."""

from __future__ import annotations

import asyncio
import hashlib

from starlette.responses import Response

from ratelimit_rls.core.accounts import Role
from ratelimit_rls.core.callers import TIER
from ratelimit_rls.core.explain import explain
from ratelimit_rls.core.model import Descriptor, Purpose, Rule
from ratelimit_rls.core.standing import Standing
from ratelimit_rls.errors import StoreError
from ratelimit_rls.rules.compile import compile_documents
from ratelimit_rls.transport.http.admin.backend import AdminBackend
from ratelimit_rls.transport.http.admin.models import Asked, CheckBody, SimulateBody
from ratelimit_rls.transport.http.admin.planning import request_of, tree_in_force
from ratelimit_rls.transport.http.admin.routes.rules import document_text
from ratelimit_rls.transport.http.admin.simulation import Timed, simulate
from ratelimit_rls.transport.http.admin.told import Simulated, ToldDecision, ToldExplanation, ToldWalk
from ratelimit_rls.transport.http.admin.visit import Here
from ratelimit_rls.transport.http.admin.way import needs, routes_of

router = routes_of("decisions", "decisions")


@router.post("/check", summary="Decide as the service would, and count", response_model=ToldDecision)
async def check(visit: Here, body: CheckBody) -> Response:
    """A dry run looks and counts nothing. With an Idempotency-Key, it counts once however often it is sent."""
    request = request_of(body, Purpose.LOOK if visit.dry_run else Purpose.DECIDE)
    call = visit.backend.limiter.prepare(request)
    once = None
    if visit.idempotency is not None:
        key = f"{visit.caller.token_id}\0{visit.idempotency.key}\0{visit.idempotency.request_digest}"
        once = [hashlib.sha256(key.encode()).digest()]
    (decision,) = await visit.backend.limiter.check([call], request_ids=once)
    if isinstance(decision, StoreError):
        raise decision
    return visit.show(ToldDecision.of(request.descriptors, decision))


@router.post("/explain", summary="Tell which rule a descriptor meets, and why no other", response_model=ToldExplanation)
@needs(Role.READ)
async def explain_descriptors(visit: Here, body: Asked) -> Response:
    request = request_of(body)
    plan = visit.backend.limiter.plan(request)
    tree = tree_in_force(visit.backend)
    keys = iter(plan.keys)
    walks = []
    for descriptor, slot in zip(request.descriptors, plan.outline.slots, strict=True):
        own = [next(keys) for _ in (*slot.steps, *slot.watchers)]
        standing = _standing(visit.backend, slot.rule, descriptor)
        walks.append(ToldWalk.of(explain(tree, body.domain, descriptor), slot, own, standing))
    return visit.show(ToldExplanation(domain=body.domain, descriptors=walks))


@router.post("/simulate", summary="Replay requests on a clock of their own", response_model=Simulated)
@needs(Role.READ)
async def simulate_requests(visit: Here, body: SimulateBody) -> Response:
    """Nothing real is counted. Users and keys stand as they do now."""
    tree = tree_in_force(visit.backend) if body.documents is None else None
    if tree is None:
        assert body.documents is not None
        texts = {f"documents[{number}]": document_text(one).encode() for number, one in enumerate(body.documents)}
        tree = (await asyncio.to_thread(compile_documents, texts, merge_domains=True)).tree
    requests = [Timed(one.at, request_of(one)) for one in body.requests]
    return visit.show(await simulate(tree, visit.backend.directory, requests))


def _standing(backend: AdminBackend, rule: Rule | None, descriptor: Descriptor) -> Standing | None:
    if rule is None or rule.limits_of is None:
        return None
    tier = next((entry.value for entry in descriptor.entries if entry.key == TIER), "")
    return backend.directory.of(rule.limits_of, descriptor.entries[-1].value, tier)
