"""API keys and tokens of administrators. Secrets are returned only when they are created."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from fastapi import Query, Response

from ratelimit_rls.admin.credentials import new_admin_token, new_key
from ratelimit_rls.admin.http.changes import ChangeResult
from ratelimit_rls.admin.http.dependencies import (
    ADMIN,
    READ,
    WRITE,
    Backend,
    Change,
    Conditional,
    ResourceChange,
    make_router,
    resource_path,
)
from ratelimit_rls.admin.http.pagination import PageItems, Pagination
from ratelimit_rls.admin.http.schemas.fields import Name, PublicId
from ratelimit_rls.admin.http.schemas.requests import (
    AdminTokenCreate,
    ApiKeyCreate,
    ApiKeyUpdate,
    compile_limits,
    expires_s,
)
from ratelimit_rls.admin.http.schemas.resources import (
    NO_USE,
    AdminToken,
    AdminTokenPage,
    AdminTokenWithSecret,
    ApiKey,
    ApiKeyPage,
    ApiKeyWithSecret,
)
from ratelimit_rls.database import administration
from ratelimit_rls.database.repository import Reader, UnitOfWork
from ratelimit_rls.identity import accounts

keys = make_router("keys", "keys")
tokens = make_router("tokens", "tokens")


@keys.get("", summary="List API keys", response_model=ApiKeyPage, dependencies=[READ])
async def list_api_keys(
    backend: Backend,
    page: Pagination,
    user_id: Annotated[Name | None, Query(description="Only keys of this user.")] = None,
) -> PageItems[ApiKey]:
    async with backend.repository.reading() as reader:
        return await page.read(
            lambda after, limit: _read_keys(reader, str(after or ""), limit, user_id), lambda key: key.key_id
        )


@keys.post(
    "",
    summary="Create an API key; its secret is only in this response",
    status_code=201,
    response_model=ApiKeyWithSecret,
    dependencies=[WRITE],
)
async def create_api_key(backend: Backend, change: Change, body: ApiKeyCreate) -> Response:
    key, text = new_key(
        backend.key_secret,
        body.user_id,
        name=body.name,
        tier=body.tier,
        limits=compile_limits(body.limits),
        expires_s=expires_s(body, backend.clock()),
    )

    async def work(unit: UnitOfWork) -> ChangeResult:
        created = await unit.add_key(key)
        schema = ApiKeyWithSecret.build(created, key=None if change.dry_run else text)
        return ChangeResult(schema, 201, created.version, resource_path(keys, created.key_id), secret_of=created.key_id)

    return await change.run(work)


@keys.get("/{key_id}", summary="Get an API key, without its secret", response_model=ApiKey, dependencies=[READ])
async def get_api_key(backend: Backend, conditional: Conditional, key_id: PublicId) -> ApiKey | Response:
    async with backend.repository.reading() as reader:
        (key,) = await _with_usage(reader, [await reader.key(key_id)])
    return conditional.respond(key, key.version)


@keys.patch(
    "/{key_id}",
    summary="Update the name, tier, limits or expiry of an API key",
    response_model=ApiKey,
    dependencies=[WRITE],
)
async def update_api_key(change: ResourceChange, key_id: PublicId, body: ApiKeyUpdate) -> Response:
    limits = None if body.limits is None else compile_limits(body.limits)

    async def work(unit: UnitOfWork) -> ChangeResult:
        key = await unit.key(key_id)
        change.require(key.version, f"key {key_id}")
        wanted = replace(
            key,
            name=key.name if body.name is None else body.name,
            tier=key.tier if body.tier is None else body.tier,
            limits=key.limits if limits is None else limits,
            expires_s=body.expires if "expires" in body.model_fields_set else key.expires_s,
        )
        return await _key_result(unit, await unit.put_key(wanted, key.version))

    return await change.run(work)


@keys.delete("/{key_id}", summary="Revoke an API key permanently", response_model=ApiKey, dependencies=[WRITE])
async def revoke_api_key(change: ResourceChange, key_id: PublicId) -> Response:
    """All servers reject it within a second. It stays in the list, as revoked, and is in the response."""

    async def work(unit: UnitOfWork) -> ChangeResult:
        change.require((await unit.key(key_id)).version, f"key {key_id}")
        return await _key_result(unit, await unit.revoke_key(key_id))

    return await change.run(work)


@tokens.get("", summary="List the tokens of administrators", response_model=AdminTokenPage, dependencies=[ADMIN])
async def list_tokens(backend: Backend, page: Pagination) -> PageItems[administration.AdminToken]:
    async with backend.repository.reading() as reader:
        return await page.read(
            lambda after, limit: reader.tokens(str(after or ""), limit), lambda token: token.token_id
        )


@tokens.post(
    "",
    summary="Create a token; its secret is only in this response",
    status_code=201,
    response_model=AdminTokenWithSecret,
    dependencies=[ADMIN],
)
async def create_token(backend: Backend, change: Change, body: AdminTokenCreate) -> Response:
    token, text = new_admin_token(backend.key_secret, body.name, body.role, expires_s(body, backend.clock()))

    async def work(unit: UnitOfWork) -> ChangeResult:
        created = await unit.add_token(token)
        schema = AdminTokenWithSecret.build(created, None if change.dry_run else text)
        return ChangeResult(schema, 201, created.version, secret_of=created.token_id)

    return await change.run(work)


@tokens.delete("/{token_id}", summary="Revoke a token permanently", response_model=AdminToken, dependencies=[ADMIN])
async def revoke_token(change: ResourceChange, token_id: PublicId) -> Response:
    """It is rejected at once. It stays in the list, as revoked, and is in the response."""

    async def work(unit: UnitOfWork) -> ChangeResult:
        change.require((await unit.token(token_id)).version, f"token {token_id}")
        revoked = await unit.revoke_token(token_id)
        return ChangeResult(AdminToken.model_validate(revoked), version=revoked.version)

    return await change.run(work)


async def _read_keys(reader: Reader, after: str, limit: int, user_id: str | None) -> list[ApiKey]:
    return await _with_usage(reader, await reader.keys(after, limit, user_id=user_id))


async def _with_usage(reader: Reader, found: Sequence[accounts.ApiKey]) -> list[ApiKey]:
    used = await reader.usage_of_keys([key.key_id for key in found])
    return [ApiKey.build(key, used.get(key.key_id, NO_USE)) for key in found]


async def _key_result(unit: UnitOfWork, key: accounts.ApiKey) -> ChangeResult:
    (body,) = await _with_usage(unit, [key])
    return ChangeResult(body, version=key.version)
