"""Every route requires a role, and admits its caller before it reads the body."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import Depends, FastAPI, Request
from fastapi.routing import iter_route_contexts
from pydantic import BaseModel

from ratelimit_rls.admin.auth import Principal
from ratelimit_rls.admin.http.app import documented_app
from ratelimit_rls.admin.http.dependencies import ADMIN, READ, WRITE, AuthorizedRoute, Caller, make_router
from ratelimit_rls.admin.http.problems import EXCEPTION_HANDLERS
from ratelimit_rls.database.administration import Role
from ratelimit_rls.errors import Unauthenticated

OPEN = {"/healthz", "/openapi.json", "/docs"}


class Body(BaseModel):
    name: str


@pytest.mark.parametrize("dependencies", [[], [Depends(lambda: None)], [READ, WRITE]])
def test_route_without_exactly_one_role_cannot_be_defined(dependencies: list[Any]) -> None:
    with pytest.raises(ValueError, match="must have exactly one of READ, WRITE and ADMIN"):
        make_router("things", "things").get("", dependencies=dependencies)(lambda: None)


def test_every_route_but_three_is_authorized() -> None:
    contexts = [*iter_route_contexts(documented_app().routes)]
    unguarded = {one.path for one in contexts if not isinstance(one.original_route, AuthorizedRoute)}
    assert (unguarded, len(contexts) >= 42) == (OPEN, True)


class Access:
    """Access control that admits one token, and notes the required roles."""

    def __init__(self) -> None:
        self.roles: list[Role] = []

    async def admit(self, token: str, address: str, role: Role) -> Principal:
        self.roles.append(role)
        if token != "right":
            raise Unauthenticated("unknown token")
        return Principal("ann", "id", role)


async def post(app: FastAPI, token: str, *received: dict[str, Any]) -> tuple[int, bytes, int]:
    """Return the status, the body, and the number of messages of the request that were read."""
    left, sent = [*received], list[Any]()

    async def receive() -> dict[str, Any]:
        return left.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"authorization", f"Bearer {token}".encode()), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/api/v1/things", "query_string": b"", "headers": headers}
    await app({**scope, "state": {}, "root_path": ""}, receive, send)
    return sent[0]["status"], sent[1]["body"], len(received) - len(left)


def app_of(role: Any) -> tuple[FastAPI, Access]:
    router = make_router("things", "things")

    @router.post("", dependencies=[role])
    async def create_thing(request: Request, caller: Caller, body: Body) -> str:
        return f"{caller.name} {body.name}"

    app = FastAPI(exception_handlers=EXCEPTION_HANDLERS)
    app.include_router(router)
    app.state.access = access = Access()
    return app, access


@pytest.mark.parametrize("role", [READ, WRITE, ADMIN])
async def test_body_is_read_only_if_the_caller_is_admitted(role: Any) -> None:
    app, access = app_of(role)
    body = {"type": "http.request", "body": b'{"name": "x"}', "more_body": False}

    assert await post(app, "right", body) == (200, b'"ann x"', 1)
    status, problem, read = await post(app, "wrong", body)

    assert (status, read) == (401, 0)
    assert b"urn:ratelimit-rls:problem:unauthorized" in problem
    assert access.roles == [Role(role.scopes[0])] * 2


async def test_lost_connection_is_not_reported_as_invalid_json() -> None:
    app, _ = app_of(WRITE)
    begin = {"type": "http.request", "body": b'{"na', "more_body": True}
    status, problem, _ = await post(app, "right", begin, {"type": "http.disconnect"})
    assert (status, b"the request body is incomplete" in problem) == (400, True)
