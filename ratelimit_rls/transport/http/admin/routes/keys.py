"""API keys: made here, shown once, and revoked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from fastapi import Query
from starlette.responses import Response

from ratelimit_rls.core.accounts import ApiKey
from ratelimit_rls.identity.secrets import digest, new_secret
from ratelimit_rls.records.desk import Change, Reader
from ratelimit_rls.transport.http.admin.found import require_tier, require_user
from ratelimit_rls.transport.http.admin.limits import limits_of
from ratelimit_rls.transport.http.admin.models import KeyBody, Name, NewKey, PublicId, expires_s
from ratelimit_rls.transport.http.admin.pages import WhichPart, answer_page
from ratelimit_rls.transport.http.admin.shown import NO_USE, MadeKey, Page, ShownKey
from ratelimit_rls.transport.http.admin.visit import Answer, Here
from ratelimit_rls.transport.http.admin.way import path_of, routes_of

router = routes_of("keys", "keys")


@router.get("", summary="List API keys", response_model=Page[ShownKey])
async def list_keys(
    visit: Here, part: WhichPart, user_id: Annotated[Name | None, Query(description="Only this user's.")] = None
) -> Response:
    async with visit.backend.desk.reading() as reader:
        return await answer_page(
            visit,
            part,
            lambda after, limit: _page(reader, str(after or ""), limit, user_id),
            lambda shown: shown.key_id,
            lambda shown: shown,
        )


@router.post(
    "", summary="Make an API key; its text is in this answer and nowhere else", status_code=201, response_model=MadeKey
)
async def add_key(visit: Here, body: NewKey) -> Response:
    secret = new_secret("rlk")
    key = ApiKey(
        key_id=secret.public_id,
        digest=digest(visit.backend.key_secret, secret.text),
        user_id=body.user_id,
        name=body.name,
        tier=body.tier,
        limits=limits_of(body.limits),
        expires_s=expires_s(body, visit.now_s()),
    )

    async def work(change: Change) -> Answer:
        await require_user(change, body.user_id)
        await require_tier(change, body.tier)
        made = await change.add_key(key)
        shown = MadeKey.of(made, key=None if visit.dry_run else secret.text)
        return Answer(shown, 201, made.version, path_of(router, made.key_id), secret_of=made.key_id)

    return await visit.change(work)


@router.get("/{key_id}", summary="Show an API key, without its secret", response_model=ShownKey)
async def show_key(visit: Here, key_id: PublicId) -> Response:
    async with visit.backend.desk.reading() as reader:
        key = await reader.key(key_id)
        (shown,) = await _shown(reader, [key])
    return visit.show(shown, key.version)


@router.patch("/{key_id}", summary="Change an API key's name, tier, limits or end", response_model=ShownKey)
async def change_key(visit: Here, key_id: PublicId, body: KeyBody) -> Response:
    limits = None if body.limits is None else limits_of(body.limits)

    async def work(change: Change) -> Answer:
        key = await change.key(key_id)
        visit.seen.require(key.version, f"key {key_id}")
        await require_tier(change, body.tier or "")
        wanted = replace(
            key,
            name=key.name if body.name is None else body.name,
            tier=key.tier if body.tier is None else body.tier,
            limits=key.limits if limits is None else limits,
            expires_s=body.expires if "expires" in body.model_fields_set else key.expires_s,
        )
        return await _answer(change, await change.put_key(wanted, key.version))

    return await visit.change(work)


@router.delete("/{key_id}", summary="Revoke an API key, for good", response_model=ShownKey)
async def revoke_key(visit: Here, key_id: PublicId) -> Response:
    """It is refused everywhere within a second, and stays in the list."""

    async def work(change: Change) -> Answer:
        visit.seen.require((await change.key(key_id)).version, f"key {key_id}")
        return await _answer(change, await change.revoke_key(key_id))

    return await visit.change(work)


async def _page(reader: Reader, after: str, limit: int, user_id: str | None) -> list[ShownKey]:
    return await _shown(reader, await reader.keys(after, limit, user_id=user_id))


async def _shown(reader: Reader, keys: Sequence[ApiKey]) -> list[ShownKey]:
    used = await reader.use_of_keys([key.key_id for key in keys])
    return [ShownKey.of(key, used.get(key.key_id, NO_USE)) for key in keys]


async def _answer(change: Change, key: ApiKey) -> Answer:
    (shown,) = await _shown(change, [key])
    return Answer(shown, version=key.version)
