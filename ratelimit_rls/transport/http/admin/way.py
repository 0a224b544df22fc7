"""The way of every request to a route: let in, counted, allowed, read; only then does the route see it."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar
from urllib.parse import quote

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ratelimit_rls.core.accounts import Role
from ratelimit_rls.transport.http.admin.access import ANYBODY, Access, Caller, allow, bearer
from ratelimit_rls.transport.http.admin.backend import AdminBackend
from ratelimit_rls.transport.http.admin.cursors import Cursors
from ratelimit_rls.transport.http.admin.etags import seen
from ratelimit_rls.transport.http.admin.own_limits import OwnLimits
from ratelimit_rls.transport.http.admin.problems import Fault, wrong_field
from ratelimit_rls.transport.http.admin.turns import Turns
from ratelimit_rls.transport.http.admin.visit import JSON, IdempotencyKey, Visit, request_digest

PREFIX = "/api/v1"

IDEMPOTENCY_KEY = "Idempotency-Key"
KEY_PATTERN = "^[!-~]{1,255}$"

_KEY = re.compile(KEY_PATTERN.strip("^$"))

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


class Gate:
    """What every way leads through."""

    def __init__(self, backend: AdminBackend) -> None:
        self.backend = backend
        self.cursors = Cursors(backend.key_secret)
        self.simulations = Turns()
        self._limits = OwnLimits(backend.store, backend.policy.key_prefix)
        self._access: Access | None = None
        if backend.needs_tokens:
            self._access = Access(
                backend.desk, backend.key_secret, backend.first_token, self._limits, lambda: backend.clock()
            )

    async def admit(self, request: Request, role: Role) -> Caller:
        """Raises a Fault: 401, 403 or 429."""
        caller = ANYBODY if self._access is None else await self._access.caller(bearer(request), _address(request))
        await allow(caller, role, self._limits)
        return caller


def routes_of(noun: str, tag: str) -> APIRouter:
    """The routes of one noun, all of which are Ways."""
    return APIRouter(prefix=f"{PREFIX}/{noun}", tags=[tag], route_class=Way)


def needs(role: Role) -> Callable[[Endpoint], Endpoint]:
    """Says of a route that it needs another role than its method tells."""

    def mark(endpoint: Endpoint) -> Endpoint:
        endpoint.__dict__["role"] = role
        return endpoint

    return mark


class Way(APIRoute):
    @property
    def method(self) -> str:
        """The one it has."""
        return next(iter(self.methods or ()))

    @property
    def role(self) -> Role:
        usual = Role.READ if self.method == "GET" else Role.WRITE
        role: Role = getattr(self.endpoint, "role", usual)
        return role

    @property
    def is_change(self) -> bool:
        return self.role is not Role.READ and self.method != "GET"

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        role, is_change = self.role, self.is_change

        async def lead(request: Request) -> Response:
            gate: Gate = request.app.state.gate
            caller = await gate.admit(request, role)
            self._check_parameters(request)
            try:
                body = await request.body()
            except ClientDisconnect:
                raise Fault(400, "bad-request", "the request was cut short") from None
            headers = request.headers
            if body and not _is_json(headers.get("content-type", "")):
                raise Fault(415, "not-json", "send the body as JSON, and say so: Content-Type: application/json")
            request.state.visit = Visit(
                backend=gate.backend,
                cursors=gate.cursors,
                simulations=gate.simulations,
                caller=caller,
                address=_address(request),
                request_id=request.state.request_id,
                path=request.scope["path"],
                query=request.query_params,
                seen=seen(headers.get("if-match"), headers.get("if-none-match")),
                dry_run=is_change and _is_dry(request),
                idempotency=_idempotency(request, body) if is_change else None,
            )
            return await handle(request)

        return lead

    def _check_parameters(self, request: Request) -> None:
        """A word that is misspelt must not be as good as none: `?dryrun=true` would be carried out."""
        operation = request.app.openapi()["paths"][self.path_format][self.method.lower()]
        known = sorted(one["name"] for one in operation["parameters"] if one["in"] == "query")
        said = [name for name, _ in request.query_params.multi_items()]
        for name in said:
            if name not in known:
                raise wrong_field(name, f"there is no such parameter; this path has {', '.join(known) or 'none'}")
            if said.count(name) > 1:
                raise wrong_field(name, "it is said more than once")


def _address(request: Request) -> str:
    return request.client.host if request.client else ""


def _is_json(content_type: str) -> bool:
    """What no form of a web page can say, so that none can send a change here unasked."""
    return content_type.partition(";")[0].strip().lower() == JSON


def _is_dry(request: Request) -> bool:
    said = request.query_params.get("dry_run", "false")
    if said not in ("true", "false"):
        raise wrong_field("dry_run", "it is true or false")
    return said == "true"


def _idempotency(request: Request, body: bytes) -> IdempotencyKey | None:
    key = request.headers.get(IDEMPOTENCY_KEY)
    if key is None:
        return None
    if not _KEY.fullmatch(key):
        raise Fault(400, "bad-request", f"{IDEMPOTENCY_KEY} must be 1 to 255 visible ASCII characters, e.g. a UUID")
    return IdempotencyKey(key, request_digest(request, body))


def path_of(router: APIRouter, name: str) -> str:
    """Where one thing of a collection is."""
    return f"{router.prefix}/{quote(name, safe='')}"
