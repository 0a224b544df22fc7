"""Users: their tier, limits, override and block, and what holds for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from fastapi import Query
from starlette.responses import Response

from ratelimit_rls.core.accounts import Accounts, Block, Override, User
from ratelimit_rls.core.model import Subject
from ratelimit_rls.errors import RecordsUnavailable
from ratelimit_rls.identity.directory import Directory
from ratelimit_rls.records.desk import Change, Reader
from ratelimit_rls.transport.http.admin.found import require_tier
from ratelimit_rls.transport.http.admin.limits import limits_of
from ratelimit_rls.transport.http.admin.models import BlockBody, Name, OverrideBody, UserBody, UserId, UserTier
from ratelimit_rls.transport.http.admin.pages import Part, WhichPart, answer_page
from ratelimit_rls.transport.http.admin.problems import wrong_field
from ratelimit_rls.transport.http.admin.query import QueryBool
from ratelimit_rls.transport.http.admin.shown import NO_USE, Page, ShownLimits, ShownUser
from ratelimit_rls.transport.http.admin.unblocked import Unblocked
from ratelimit_rls.transport.http.admin.user_rules import rules_of_user
from ratelimit_rls.transport.http.admin.visit import Answer, Here, Visit
from ratelimit_rls.transport.http.admin.way import path_of, routes_of

router = routes_of("users", "users")
blocks = routes_of("blocks", "users")


@router.get("", summary="List users", response_model=Page[ShownUser])
async def list_users(
    visit: Here,
    part: WhichPart,
    tier: Annotated[Name | None, Query(description="Only those of this tier.")] = None,
    blocked: Annotated[QueryBool | None, Query(description="Only those that are blocked, or are not.")] = None,
) -> Response:
    return await _page(visit, part, tier=tier, blocked=blocked)


@blocks.get("", summary="List users that are blocked", response_model=Page[ShownUser])
async def list_blocks(visit: Here, part: WhichPart) -> Response:
    return await _page(visit, part, blocked=True)


async def _page(visit: Visit, part: Part, *, tier: str | None = None, blocked: bool | None = None) -> Response:
    async with visit.backend.desk.reading() as reader:
        return await answer_page(
            visit,
            part,
            lambda after, limit: _some(reader, str(after or ""), limit, tier, blocked),
            lambda shown: shown.user_id,
            lambda shown: shown,
        )


@router.get("/{user_id}", summary="Show a user", response_model=ShownUser)
async def show_user(visit: Here, user_id: UserId) -> Response:
    async with visit.backend.desk.reading() as reader:
        user = await reader.user(user_id)
        (shown,) = await _shown(reader, [user])
    return visit.show(shown, user.version)


@router.put("/{user_id}", summary="Make a user, or replace its tier, organisation and limits", response_model=ShownUser)
async def put_user(visit: Here, user_id: UserId, body: UserBody) -> Response:
    user = User(user_id, body.tier, limits_of(body.limits), org=body.org)

    async def work(change: Change) -> Answer:
        is_new = await _require_seen(visit, change, user_id)
        await require_tier(change, body.tier)
        return await _answer(change, await change.put_user(user), 201 if is_new else 200)

    return await visit.change(work)


@router.delete("/{user_id}", summary="Delete a user, and revoke its keys", status_code=204)
async def delete_user(visit: Here, user_id: UserId) -> Response:
    async def work(change: Change) -> Answer:
        await _require_seen(visit, change, user_id)
        await change.delete_user(user_id)
        return Answer(status=204)

    return await visit.change(work)


@router.get("/{user_id}/limits", summary="Show what holds for a user, and why", response_model=ShownLimits)
async def show_limits(visit: Here, user_id: UserId) -> Response:
    """Of somebody nobody knows, too: what holds is then what the rules say."""
    now_s, loaded = visit.now_s(), visit.backend.rules.current
    try:
        async with visit.backend.desk.reading() as reader:
            directory = await _directory(reader, user_id, now_s)
    except RecordsUnavailable:  # this process knows as well, if perhaps not of the last second
        directory = visit.backend.directory
    rules = rules_of_user(loaded.tree, user_id) if loaded is not None else []
    unblocked = Unblocked(directory).of(Subject.USER, user_id, "").limits
    return visit.show(ShownLimits.of(user_id, directory.effective(user_id, now_s), rules, unblocked))


@router.put("/{user_id}/tier", summary="Give a user a tier; a new user is made", response_model=ShownUser)
async def set_tier(visit: Here, user_id: UserId, body: UserTier) -> Response:
    async def work(change: Change) -> Answer:
        await _require_seen(visit, change, user_id)
        await require_tier(change, body.tier)
        return await _answer(change, await change.set_tier(user_id, body.tier))

    return await visit.change(work)


@router.post(
    "/{user_id}/override",
    summary="Give a user, who may be new, other limits for a while",
    status_code=201,
    response_model=ShownUser,
)
async def set_override(visit: Here, user_id: UserId, body: OverrideBody) -> Response:
    """Limits in place of any other, until a moment. It takes the place of the one before."""
    override = Override(limits_of(body.limits), _in_future(body.ends_s(visit.now_s()), visit), body.reason)

    async def work(change: Change) -> Answer:
        await _require_seen(visit, change, user_id)
        return await _answer(change, await change.set_override(user_id, override), 201)

    return await visit.change(work)


@router.delete("/{user_id}/override", summary="End a user's override", response_model=ShownUser)
async def end_override(visit: Here, user_id: UserId) -> Response:
    async def work(change: Change) -> Answer:
        await _require_seen(visit, change, user_id)
        return await _answer(change, await change.set_override(user_id, None))

    return await visit.change(work)


@router.put("/{user_id}/block", summary="Block a user, who may be new", response_model=ShownUser)
async def set_block(visit: Here, user_id: UserId, body: BlockBody) -> Response:
    """Nothing of theirs passes any more, whichever key they use. Also one who was never seen can be kept out."""
    ends_s = body.ends_s(visit.now_s())
    block = Block(body.reason, None if ends_s is None else _in_future(ends_s, visit))

    async def work(change: Change) -> Answer:
        await _require_seen(visit, change, user_id)
        return await _answer(change, await change.set_block(user_id, block))

    return await visit.change(work)


@router.delete("/{user_id}/block", summary="Lift the block of a user", response_model=ShownUser)
async def lift_block(visit: Here, user_id: UserId) -> Response:
    async def work(change: Change) -> Answer:
        await _require_seen(visit, change, user_id)
        return await _answer(change, await change.set_block(user_id, None))

    return await visit.change(work)


async def _require_seen(visit: Visit, change: Change, user_id: str) -> bool:
    """Raises Stale unless the user is as the request has seen it; says whether it is new."""
    before = await change.find_user(user_id)
    visit.seen.require(before.version if before else None, f"user '{user_id}'")
    return before is None


async def _directory(reader: Reader, user_id: str, now_s: float) -> Directory:
    """Of one user, with what the database has at this moment: whoever has just changed something sees it."""
    user = await reader.find_user(user_id)
    tier = await reader.find_tier(user.tier) if user is not None and user.tier else None
    one = Directory(lambda: now_s)
    one.load(Accounts(users=(user,) if user else (), tiers=(tier,) if tier else ()))
    return one


def _in_future(ends_s: float | None, visit: Visit) -> float:
    assert ends_s is not None
    if ends_s <= visit.now_s():
        raise wrong_field("until", "it is over already; give a moment to come")
    return ends_s


async def _some(reader: Reader, after: str, limit: int, tier: str | None, blocked: bool | None) -> list[ShownUser]:
    return await _shown(reader, await reader.users(after, limit, tier=tier, blocked=blocked))


async def _shown(reader: Reader, users: Sequence[User]) -> list[ShownUser]:
    used = await reader.use_of_users([user.user_id for user in users])
    return [ShownUser.of(user, used.get(user.user_id, NO_USE)) for user in users]


async def _answer(change: Change, user: User, status: int = 200) -> Answer:
    (shown,) = await _shown(change, [user])
    return Answer(shown, status, user.version, path_of(router, user.user_id) if status == 201 else "")
