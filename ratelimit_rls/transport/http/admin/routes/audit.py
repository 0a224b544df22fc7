"""The record of what administrators changed."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query
from starlette.responses import Response

from ratelimit_rls.transport.http.admin.models import Name
from ratelimit_rls.transport.http.admin.pages import WhichPart, answer_page
from ratelimit_rls.transport.http.admin.shown import Page, ShownAudit
from ratelimit_rls.transport.http.admin.visit import Here
from ratelimit_rls.transport.http.admin.way import routes_of

router = routes_of("audit", "records")


@router.get("", summary="List changes, the newest first", response_model=Page[ShownAudit])
async def list_audit(
    visit: Here,
    part: WhichPart,
    kind: Annotated[Name | None, Query(description="Of what: rule, tier, user, key, token, …")] = None,
    subject: Annotated[Name | None, Query(description="Its id.")] = None,
    actor: Annotated[Name | None, Query(description="By whom.")] = None,
) -> Response:
    async with visit.backend.desk.reading() as reader:
        return await answer_page(
            visit,
            part,
            lambda before, limit: reader.audit(
                int(before) if before is not None else None, limit, kind=kind, subject=subject, actor=actor
            ),
            lambda row: row.audit_id,
            ShownAudit.of,
        )
