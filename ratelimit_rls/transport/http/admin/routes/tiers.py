"""Tiers: named sets of limits."""

from __future__ import annotations

from starlette.responses import Response

from ratelimit_rls.core.accounts import Tier
from ratelimit_rls.records.desk import Change
from ratelimit_rls.transport.http.admin.limits import limits_of
from ratelimit_rls.transport.http.admin.models import NewTier, TierBody, TierName
from ratelimit_rls.transport.http.admin.pages import WhichPart, answer_page
from ratelimit_rls.transport.http.admin.shown import Page, ShownTier
from ratelimit_rls.transport.http.admin.visit import Answer, Here
from ratelimit_rls.transport.http.admin.way import path_of, routes_of

router = routes_of("tiers", "tiers")


@router.get("", summary="List tiers", response_model=Page[ShownTier])
async def list_tiers(visit: Here, part: WhichPart) -> Response:
    async with visit.backend.desk.reading() as reader:
        return await answer_page(
            visit,
            part,
            lambda after, limit: reader.tiers(str(after or ""), limit),
            lambda tier: tier.name,
            ShownTier.of,
        )


@router.post("", summary="Make a tier", status_code=201, response_model=ShownTier)
async def add_tier(visit: Here, body: NewTier) -> Response:
    tier = Tier(body.name, limits_of(body.limits), body.description)

    async def work(change: Change) -> Answer:
        return _answer(await change.add_tier(tier), 201)

    return await visit.change(work)


@router.get("/{name}", summary="Show a tier", response_model=ShownTier)
async def show_tier(visit: Here, name: TierName) -> Response:
    async with visit.backend.desk.reading() as reader:
        tier = await reader.tier(name)
    return visit.show(ShownTier.of(tier), tier.version)


@router.put("/{name}", summary="Make a tier, or replace it", response_model=ShownTier)
async def put_tier(visit: Here, name: TierName, body: TierBody) -> Response:
    tier = Tier(name, limits_of(body.limits), body.description)

    async def work(change: Change) -> Answer:
        before = await change.find_tier(name)
        visit.seen.require(before.version if before else None, f"tier '{name}'")
        return _answer(await change.put_tier(tier), 200 if before else 201)

    return await visit.change(work)


@router.delete("/{name}", summary="Delete a tier that nobody has", status_code=204)
async def delete_tier(visit: Here, name: TierName) -> Response:
    async def work(change: Change) -> Answer:
        visit.seen.require((await change.tier(name)).version, f"tier '{name}'")
        await change.delete_tier(name)
        return Answer(status=204)

    return await visit.change(work)


def _answer(tier: Tier, status: int) -> Answer:
    location = path_of(router, tier.name) if status == 201 else ""
    return Answer(ShownTier.of(tier), status, tier.version, location)
