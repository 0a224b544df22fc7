"""Decisions on demand: one that counts, why one would be so, and many that count nowhere."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from ratelimit_rls.core.accounts import Role
from ratelimit_rls.core.callers import TIER
from ratelimit_rls.core.explain import explain
from ratelimit_rls.core.model import Descriptor, Purpose, Rule
from ratelimit_rls.core.tree import Tree
from ratelimit_rls.errors import StoreError
from ratelimit_rls.rules.compile import compile_documents
from ratelimit_rls.transport.http.admin.backend import AdminBackend
from ratelimit_rls.transport.http.admin.documents import document_text
from ratelimit_rls.transport.http.admin.models import Asked, CheckBody, SimulateBody
from ratelimit_rls.transport.http.admin.planning import (
    known_caller,
    plan_unblocked,
    request_of,
    resolved,
    tree_in_force,
    whoever,
)
from ratelimit_rls.transport.http.admin.simulation import simulate
from ratelimit_rls.transport.http.admin.told import (
    Simulated,
    ToldBlock,
    ToldDecision,
    ToldExplanation,
    ToldStanding,
    ToldWalk,
)
from ratelimit_rls.transport.http.admin.unblocked import Unblocked
from ratelimit_rls.transport.http.admin.visit import Here
from ratelimit_rls.transport.http.admin.way import needs, routes_of

router = routes_of("decisions", "decisions")


@router.post("/check", summary="Decide as the service would, and count", response_model=ToldDecision)
async def check(visit: Here, body: CheckBody) -> Response:
    """A dry run looks and counts nothing. With an Idempotency-Key, it counts once however often it is sent. Whose
    credential is not valid is refused as the service refuses it."""
    backend = visit.backend
    request = request_of(body, Purpose.LOOK if visit.dry_run else Purpose.DECIDE)
    request, refusal, _ = resolved(request, tree_in_force(backend), backend.verifier, visit.now_s())
    call = backend.limiter.prepare(request) if refusal is None else backend.limiter.refuse(request, refusal)
    once = None
    if visit.idempotency is not None:
        key = f"{visit.caller.token_id}\0{visit.idempotency.key}\0{visit.idempotency.request_digest}"
        once = [hashlib.sha256(key.encode()).digest()]
    (decision,) = await backend.limiter.check([call], request_ids=once)
    if isinstance(decision, StoreError):
        raise decision
    return visit.show(ToldDecision.of(request.descriptors, decision))


@router.post("/explain", summary="Tell which rule a descriptor meets, and why no other", response_model=ToldExplanation)
@needs(Role.READ)
async def explain_descriptors(visit: Here, body: Asked) -> Response:
    """Of a blocked caller, too: with the limits that wait for it, and the block beside them. A credential that is not
    valid is 422, as it is for counters."""
    tree = tree_in_force(visit.backend)
    request, refusal, _ = known_caller(visit.backend, request_of(body))
    refusal = refusal or visit.backend.limiter.plan(request).outline.refusal
    plan = plan_unblocked(visit.backend, whoever(request))
    keys = iter(plan.keys)
    walks = []
    for descriptor, slot in zip(request.descriptors, plan.outline.slots, strict=True):
        own = [next(keys) for _ in (*slot.steps, *slot.watchers)]
        standing = _standing(visit.backend, slot.rule, descriptor)
        walks.append(ToldWalk.of(explain(tree, body.domain, descriptor), slot, own, standing))
    return visit.show(ToldExplanation(domain=body.domain, refused=ToldBlock.of(refusal), descriptors=walks))


@router.post("/simulate", summary="Replay requests on a clock of their own", response_model=Simulated)
@needs(Role.READ)
async def simulate_requests(visit: Here, body: SimulateBody) -> Response:
    """Nothing real is counted. Users and keys stand as they do now. One goes on at a time."""
    backend = visit.backend
    async with visit.simulations.take("simulations"):
        tree = tree_in_force(backend) if body.documents is None else await _compiled(body.documents)
        told = await simulate(tree, backend.directory, backend.verifier, body.requests, visit.now_s())
    return visit.show(told)


async def _compiled(documents: Sequence[str | dict[str, Any]]) -> Tree:
    """Raises RulesError, or a Fault, which names the document."""
    named = {f"documents[{number}]": document for number, document in enumerate(documents)}
    texts = {name: (await document_text(document, name)).encode() for name, document in named.items()}
    return (await asyncio.to_thread(compile_documents, texts, merge_domains=True)).tree


def _standing(backend: AdminBackend, rule: Rule | None, descriptor: Descriptor) -> ToldStanding | None:
    if rule is None or rule.limits_of is None:
        return None
    tier = next((entry.value for entry in descriptor.entries if entry.key == TIER), "")
    named = rule.limits_of, descriptor.entries[-1].value, tier
    unblocked = Unblocked(backend.directory).of(*named)
    return ToldStanding.of(rule.limits_of, backend.directory.of(*named), unblocked)
