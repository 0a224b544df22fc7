"""Tokens of administrators."""

from __future__ import annotations

from starlette.responses import Response

from ratelimit_rls.core.accounts import AdminToken, Role
from ratelimit_rls.identity.secrets import digest, new_secret
from ratelimit_rls.records.desk import Change
from ratelimit_rls.transport.http.admin.models import NewToken, PublicId, expires_s
from ratelimit_rls.transport.http.admin.pages import WhichPart, answer_page
from ratelimit_rls.transport.http.admin.shown import MadeToken, Page, ShownToken
from ratelimit_rls.transport.http.admin.visit import Answer, Here
from ratelimit_rls.transport.http.admin.way import needs, routes_of

router = routes_of("tokens", "tokens")


@router.get("", summary="List tokens of administrators", response_model=Page[ShownToken])
@needs(Role.ADMIN)
async def list_tokens(visit: Here, part: WhichPart) -> Response:
    async with visit.backend.desk.reading() as reader:
        return await answer_page(
            visit,
            part,
            lambda after, limit: reader.tokens(str(after or ""), limit),
            lambda token: token.token_id,
            ShownToken.of,
        )


@router.post(
    "", summary="Make a token; its text is in this answer and nowhere else", status_code=201, response_model=MadeToken
)
@needs(Role.ADMIN)
async def add_token(visit: Here, body: NewToken) -> Response:
    secret = new_secret("rla")
    token = AdminToken(
        token_id=secret.public_id,
        digest=digest(visit.backend.key_secret, secret.text),
        name=body.name,
        role=body.role,
        expires_s=expires_s(body, visit.now_s()),
    )

    async def work(change: Change) -> Answer:
        made = await change.add_token(token)
        shown = MadeToken.of(made, token=None if visit.dry_run else secret.text)
        return Answer(shown, 201, secret_of=made.token_id)

    return await visit.change(work)


@router.delete("/{token_id}", summary="Revoke a token, for good", response_model=ShownToken)
@needs(Role.ADMIN)
async def revoke_token(visit: Here, token_id: PublicId) -> Response:
    """It is refused from this moment on, and stays in the list."""

    async def work(change: Change) -> Answer:
        return Answer(ShownToken.of(await change.revoke_token(token_id)))

    return await visit.change(work)
