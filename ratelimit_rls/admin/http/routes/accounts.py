"""Tiers and users: their limits, overrides and blocks, and the limits that apply to a user."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from fastapi import Query, Response

from ratelimit_rls.admin.http.changes import ChangeRequest, ChangeResult
from ratelimit_rls.admin.http.dependencies import (
    READ,
    WRITE,
    Backend,
    Change,
    Conditional,
    Put,
    ResourceChange,
    make_router,
    resource_path,
)
from ratelimit_rls.admin.http.pagination import PageItems, Pagination
from ratelimit_rls.admin.http.schemas.fields import Name, QueryBool, TierName, UserId
from ratelimit_rls.admin.http.schemas.requests import (
    BlockInput,
    OverrideCreate,
    TierCreate,
    TierInput,
    UserInput,
    UserTierUpdate,
    compile_limits,
)
from ratelimit_rls.admin.http.schemas.resources import NO_USE, Tier, TierPage, User, UserLimits, UserPage
from ratelimit_rls.admin.user_limits import limits_of_user
from ratelimit_rls.core.entitlements import Block
from ratelimit_rls.database.repository import Reader, UnitOfWork
from ratelimit_rls.errors import BadRequest
from ratelimit_rls.identity import accounts

tiers = make_router("tiers", "tiers")
users = make_router("users", "users")
blocks = make_router("blocks", "users")


@tiers.get("", summary="List tiers", response_model=TierPage, dependencies=[READ])
async def list_tiers(backend: Backend, page: Pagination) -> PageItems[accounts.Tier]:
    async with backend.repository.reading() as reader:
        return await page.read(lambda after, limit: reader.tiers(str(after or ""), limit), lambda tier: tier.name)


@tiers.post("", summary="Create a tier", status_code=201, response_model=Tier, dependencies=[WRITE])
async def create_tier(change: Change, body: TierCreate) -> Response:
    tier = accounts.Tier(body.name, compile_limits(body.limits), body.description)

    async def work(unit: UnitOfWork) -> ChangeResult:
        return _tier_result(await unit.add_tier(tier), 201)

    return await change.run(work)


@tiers.get("/{name}", summary="Get a tier", response_model=Tier, dependencies=[READ])
async def get_tier(backend: Backend, conditional: Conditional, name: TierName) -> accounts.Tier | Response:
    async with backend.repository.reading() as reader:
        tier = await reader.tier(name)
    return conditional.respond(tier, tier.version)


@tiers.put(
    "/{name}",
    summary="Create or replace a tier",
    response_model=Tier,
    responses={201: {"model": Tier, "description": "Created."}},
    dependencies=[WRITE],
)
async def put_tier(change: Put, name: TierName, body: TierInput) -> Response:
    tier = accounts.Tier(name, compile_limits(body.limits), body.description)

    async def work(unit: UnitOfWork) -> ChangeResult:
        before = await unit.find_tier(name)
        change.require(before.version if before else None, f"tier '{name}'")
        return _tier_result(await unit.put_tier(tier), 200 if before else 201)

    return await change.run(work)


@tiers.delete("/{name}", summary="Delete a tier that is not in use", status_code=204, dependencies=[WRITE])
async def delete_tier(change: ResourceChange, name: TierName) -> Response:
    async def work(unit: UnitOfWork) -> ChangeResult:
        change.require((await unit.tier(name)).version, f"tier '{name}'")
        await unit.delete_tier(name)
        return ChangeResult(status=204)

    return await change.run(work)


@users.get("", summary="List users", response_model=UserPage, dependencies=[READ])
async def list_users(
    backend: Backend,
    page: Pagination,
    tier: Annotated[Name | None, Query(description="Only users of this tier.")] = None,
    blocked: Annotated[QueryBool | None, Query(description="Only blocked, or only unblocked users.")] = None,
) -> PageItems[User]:
    async with backend.repository.reading() as reader:
        return await page.read(
            lambda after, limit: _read_users(reader, str(after or ""), limit, tier, blocked), lambda user: user.user_id
        )


@blocks.get("", summary="List blocked users", response_model=UserPage, dependencies=[READ])
async def list_blocked_users(backend: Backend, page: Pagination) -> PageItems[User]:
    async with backend.repository.reading() as reader:
        return await page.read(
            lambda after, limit: _read_users(reader, str(after or ""), limit, None, True), lambda user: user.user_id
        )


@users.get("/{user_id}", summary="Get a user", response_model=User, dependencies=[READ])
async def get_user(backend: Backend, conditional: Conditional, user_id: UserId) -> User | Response:
    async with backend.repository.reading() as reader:
        (user,) = await _with_usage(reader, [await reader.user(user_id)])
    return conditional.respond(user, user.version)


@users.put(
    "/{user_id}",
    summary="Create a user, or replace its tier, organisation and limits",
    response_model=User,
    responses={201: {"model": User, "description": "Created."}},
    dependencies=[WRITE],
)
async def put_user(change: Put, user_id: UserId, body: UserInput) -> Response:
    user = accounts.User(user_id, body.tier, compile_limits(body.limits), org=body.org)

    async def work(unit: UnitOfWork) -> ChangeResult:
        is_new = await _check_preconditions(change, unit, user_id)
        return await _user_result(unit, await unit.put_user(user), 201 if is_new else 200)

    return await change.run(work)


@users.delete("/{user_id}", summary="Delete a user and its API keys", status_code=204, dependencies=[WRITE])
async def delete_user(change: ResourceChange, user_id: UserId) -> Response:
    async def work(unit: UnitOfWork) -> ChangeResult:
        await _check_preconditions(change, unit, user_id)
        await unit.delete_user(user_id)
        return ChangeResult(status=204)

    return await change.run(work)


@users.get(
    "/{user_id}/limits",
    summary="Get the limits that apply to a user, and why",
    response_model=UserLimits,
    dependencies=[READ],
)
async def get_user_limits(backend: Backend, user_id: UserId) -> UserLimits:
    """Also works for unknown users: the rule's own limits apply to them."""
    return UserLimits.build(user_id, await limits_of_user(backend, user_id))


@users.put(
    "/{user_id}/tier",
    summary="Set the tier of a user; creates the user if needed",
    response_model=User,
    dependencies=[WRITE],
)
async def put_user_tier(change: Put, user_id: UserId, body: UserTierUpdate) -> Response:
    async def work(unit: UnitOfWork) -> ChangeResult:
        await _check_preconditions(change, unit, user_id)
        return await _user_result(unit, await unit.set_tier(user_id, body.tier))

    return await change.run(work)


@users.post(
    "/{user_id}/override",
    summary="Give a user temporary limits; creates the user if needed",
    status_code=201,
    response_model=User,
    dependencies=[WRITE],
)
async def create_user_override(
    backend: Backend, change: ResourceChange, user_id: UserId, body: OverrideCreate
) -> Response:
    """The override replaces all other limits of the user until it ends. It replaces an earlier override."""
    now_s = backend.clock()
    override = accounts.Override(compile_limits(body.limits), _in_future(body.ends_s(now_s), now_s), body.reason)

    async def work(unit: UnitOfWork) -> ChangeResult:
        await _check_preconditions(change, unit, user_id)
        return await _user_result(unit, await unit.set_override(user_id, override), 201)

    return await change.run(work)


@users.delete("/{user_id}/override", summary="Delete the override of a user", response_model=User, dependencies=[WRITE])
async def delete_user_override(change: ResourceChange, user_id: UserId) -> Response:
    async def work(unit: UnitOfWork) -> ChangeResult:
        await _check_preconditions(change, unit, user_id)
        return await _user_result(unit, await unit.set_override(user_id, None))

    return await change.run(work)


@users.put(
    "/{user_id}/block",
    summary="Block a user; creates the user if needed",
    response_model=User,
    dependencies=[WRITE],
)
async def put_user_block(backend: Backend, change: Put, user_id: UserId, body: BlockInput) -> Response:
    """Denies all requests of the user, with whatever key. A user who is not known yet can be blocked, too."""
    now_s = backend.clock()
    ends_s = body.ends_s(now_s)
    block = Block(body.reason, None if ends_s is None else _in_future(ends_s, now_s))

    async def work(unit: UnitOfWork) -> ChangeResult:
        await _check_preconditions(change, unit, user_id)
        return await _user_result(unit, await unit.set_block(user_id, block))

    return await change.run(work)


@users.delete("/{user_id}/block", summary="Unblock a user", response_model=User, dependencies=[WRITE])
async def delete_user_block(change: ResourceChange, user_id: UserId) -> Response:
    async def work(unit: UnitOfWork) -> ChangeResult:
        await _check_preconditions(change, unit, user_id)
        return await _user_result(unit, await unit.set_block(user_id, None))

    return await change.run(work)


async def _check_preconditions(change: ChangeRequest, unit: UnitOfWork, user_id: str) -> bool:
    """Raise PreconditionFailed unless the user satisfies If-Match and If-None-Match. Return whether the user is new."""
    before = await unit.find_user(user_id)
    change.require(before.version if before else None, f"user '{user_id}'")
    return before is None


def _in_future(ends_s: float | None, now_s: float) -> float:
    assert ends_s is not None
    if ends_s <= now_s:
        raise BadRequest("must be in the future", field="until")
    return ends_s


async def _read_users(reader: Reader, after: str, limit: int, tier: str | None, blocked: bool | None) -> list[User]:
    return await _with_usage(reader, await reader.users(after, limit, tier=tier, blocked=blocked))


async def _with_usage(reader: Reader, found: Sequence[accounts.User]) -> list[User]:
    used = await reader.usage_of_users([user.user_id for user in found])
    return [User.build(user, used.get(user.user_id, NO_USE)) for user in found]


async def _user_result(unit: UnitOfWork, user: accounts.User, status: int = 200) -> ChangeResult:
    (body,) = await _with_usage(unit, [user])
    return ChangeResult(body, status, user.version, resource_path(users, user.user_id) if status == 201 else "")


def _tier_result(tier: accounts.Tier, status: int) -> ChangeResult:
    location = resource_path(tiers, tier.name) if status == 201 else ""
    return ChangeResult(Tier.model_validate(tier), status, tier.version, location)
