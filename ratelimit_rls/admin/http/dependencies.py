"""Dependencies of the routes: the caller and its role, the change, ETags, strict queries and JSON bodies."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Annotated, Any, TypeVar
from urllib.parse import quote

from fastapi import APIRouter, Depends, Header, Query, Request, Response, Security
from fastapi import params as fastapi_params
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from pydantic import WithJsonSchema
from starlette.requests import ClientDisconnect

from ratelimit_rls.admin.auth import AccessControl, Principal
from ratelimit_rls.admin.backend import AdminBackend
from ratelimit_rls.admin.http.changes import JSON, ChangeRequest, IdempotencyKey, etag, matches_etag, parse_etags
from ratelimit_rls.admin.http.problems import ApiError
from ratelimit_rls.admin.http.schemas.fields import QueryBool
from ratelimit_rls.database.administration import Role
from ratelimit_rls.database.repository import Actor
from ratelimit_rls.errors import BadRequest

PREFIX = "/api/v1"

IDEMPOTENCY_KEY = "Idempotency-Key"
IDEMPOTENCY_KEY_PATTERN = "^[!-~]{1,255}$"

_KEY_REGEX = re.compile(IDEMPOTENCY_KEY_PATTERN.strip("^$"))
_ETAG_SCHEMA = {"type": "string", "pattern": r'^(\*|"[0-9]{1,10}")$'}

T = TypeVar("T")


async def get_backend(request: Request) -> AdminBackend:
    backend: AdminBackend = request.app.state.backend
    return backend


Backend = Annotated[AdminBackend, Depends(get_backend)]

# ── the caller ────────────────────────────────────────────────────────────────────────────────────────────────────────

_bearer = HTTPBearer(scheme_name="token", description="rla_<id>_<secret>", auto_error=False)


async def get_caller(request: Request, _: Annotated[Any, Depends(_bearer)]) -> Principal:
    """Return the caller that AuthorizedRoute has admitted."""
    caller: Principal = request.state.caller
    return caller


Caller = Annotated[Principal, Depends(get_caller)]

READ = Security(get_caller, scopes=[Role.READ.value])
WRITE = Security(get_caller, scopes=[Role.WRITE.value])
ADMIN = Security(get_caller, scopes=[Role.ADMIN.value])
"""The role that a route requires. Every route has one of these three in its `dependencies`."""


class AuthorizedRoute(APIRoute):
    """A route that admits its caller before the body is read.

    FastAPI parses the body before it resolves any dependency, so with a dependency alone everyone could make this
    process parse a megabyte of JSON, in the event loop that serves rate limit requests.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        role = required_role(self)

        async def admit_and_handle(request: Request) -> Response:
            access: AccessControl = request.app.state.access
            credentials = await _bearer(request)
            token = credentials.credentials.strip(" ") if credentials is not None else ""
            request.state.caller = await access.admit(token, _address(request), role)
            try:
                await request.body()  # kept by the request; FastAPI would report a lost connection as invalid JSON
            except ClientDisconnect:
                raise ApiError(400, "bad-request", "the request body is incomplete") from None
            return await handle(request)

        return admit_and_handle


def required_role(route: APIRoute) -> Role:
    """Return the role of a route. Raises ValueError if it has none, so such a route cannot be defined."""
    scopes = [
        scope
        for dependency in route.dependencies
        if isinstance(dependency, fastapi_params.Security)
        for scope in dependency.scopes or ()
    ]
    if len(scopes) != 1:
        raise ValueError(f"{route.name} must have exactly one of READ, WRITE and ADMIN in its dependencies")
    return Role(scopes[0])


# ── every request ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def check_query(request: Request) -> None:
    """Reject unknown and repeated query parameters: a misspelt `?dryrun=true` would be carried out."""
    route: APIRoute = request.scope["route"]
    operation = request.app.openapi()["paths"][route.path_format][request.method.lower()]
    known = sorted(one["name"] for one in operation.get("parameters", ()) if one["in"] == "query")
    names = [name for name, _ in request.query_params.multi_items()]
    for name in names:
        if name not in known:
            raise BadRequest(f"unknown query parameter; this path has {', '.join(known) or 'none'}", field=name)
        if names.count(name) > 1:
            raise BadRequest("must be given only once", field=name)


async def check_content_type(request: Request) -> None:
    """Accept JSON bodies only, which HTML forms cannot send: so no web page can forge a change."""
    if await request.body() and request.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
        raise ApiError(415, "not-json", "the body must be JSON, with Content-Type: application/json")


async def check_preconditions(request: Request) -> None:
    """Reject malformed ETags, also where they have no effect: the client expects one."""
    for header in ("If-Match", "If-None-Match"):
        parse_etags(header, request.headers.get(header))


def make_router(noun: str, tag: str) -> APIRouter:
    """Return a router for one resource."""
    checks = [Depends(check_query), Depends(check_content_type), Depends(check_preconditions)]
    return APIRouter(prefix=f"{PREFIX}/{noun}", tags=[tag], route_class=AuthorizedRoute, dependencies=checks)


def resource_path(router: APIRouter, name: str) -> str:
    """Return the path of one resource of a collection."""
    return f"{router.prefix}/{quote(name, safe='')}"


# ── reads ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


class ConditionalRead:
    """The response to a GET of one resource: 304 if the caller already has its current version."""

    def __init__(self, response: Response, if_none_match: frozenset[str] | None) -> None:
        self._response = response
        self._if_none_match = if_none_match

    def respond(self, resource: T, version: int) -> T | Response:
        """Return the resource and set its ETag, or return a 304."""
        headers = {"ETag": etag(version)}
        if self._if_none_match is not None and matches_etag(version, self._if_none_match):
            return Response(status_code=304, headers=headers)
        self._response.headers.update(headers)
        return resource


async def get_conditional_read(
    response: Response,
    if_none_match: Annotated[
        str | None,
        Header(alias="If-None-Match", description="ETag of the version you have: 304 if it is still current."),
        WithJsonSchema(_ETAG_SCHEMA),
    ] = None,
) -> ConditionalRead:
    return ConditionalRead(response, parse_etags("If-None-Match", if_none_match))


Conditional = Annotated[ConditionalRead, Depends(get_conditional_read)]

# ── changes ───────────────────────────────────────────────────────────────────────────────────────────────────────────


async def get_change(
    request: Request,
    backend: Backend,
    caller: Caller,
    dry_run: Annotated[
        QueryBool, Query(description="Check everything, return the response, and store nothing.")
    ] = False,
    idempotency_key: Annotated[
        str | None,
        Header(alias=IDEMPOTENCY_KEY, description="Carry out the request once, however often it is sent."),
        WithJsonSchema({"type": "string", "pattern": IDEMPOTENCY_KEY_PATTERN}),
    ] = None,
) -> ChangeRequest:
    actor = Actor(caller.name, caller.token_id, _address(request), request.state.request_id)
    idempotency = None
    if idempotency_key is not None:
        if not _KEY_REGEX.fullmatch(idempotency_key):
            detail = f"{IDEMPOTENCY_KEY} must be 1 to 255 visible ASCII characters, e.g. a UUID"
            raise ApiError(400, "bad-request", detail)
        idempotency = IdempotencyKey(idempotency_key, request_digest(request, await request.body()))
    return ChangeRequest(backend.repository, actor, dry_run, idempotency)


Change = Annotated[ChangeRequest, Depends(get_change)]


async def get_resource_change(
    change: Change,
    if_match: Annotated[
        str | None,
        Header(alias="If-Match", description="ETag of the version you have read: 412 if it is no longer current."),
        WithJsonSchema(_ETAG_SCHEMA),
    ] = None,
    if_none_match: Annotated[str | None, Header(alias="If-None-Match", include_in_schema=False)] = None,
) -> ChangeRequest:
    """Return the change with both preconditions. If-None-Match is documented where it is useful: `get_put`."""
    return replace(
        change,
        if_match=parse_etags("If-Match", if_match),
        if_none_match=parse_etags("If-None-Match", if_none_match),
    )


ResourceChange = Annotated[ChangeRequest, Depends(get_resource_change)]
"""A change of one resource."""


async def get_put(
    change: ResourceChange,
    _: Annotated[
        str | None,
        Header(alias="If-None-Match", description="`*`: create only; 412 if it exists."),
        WithJsonSchema({"type": "string", "pattern": r"^\*$"}),
    ] = None,
) -> ChangeRequest:
    return change


Put = Annotated[ChangeRequest, Depends(get_put)]
"""The creation or replacement of one resource."""


def request_digest(request: Request, body: bytes) -> str:
    whole = hashlib.sha256()
    for part in (request.method.encode(), request.scope["path"].encode(), request.scope["query_string"], body):
        whole.update(b"%d:" % len(part))
        whole.update(part)
    return whole.hexdigest()


def _address(request: Request) -> str:
    return request.client.host if request.client else ""
