"""Every error as application/problem+json (RFC 9457): what is wrong, where, and what would be right."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import structlog
from fastapi import FastAPI
from fastapi.exceptions import HTTPException, RequestValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import Request
from starlette.responses import Response

from ratelimit_rls.errors import (
    BadRequest,
    Conflict,
    NotFound,
    NotReady,
    RecordsError,
    RecordsUnavailable,
    RulesError,
    StoreError,
)
from ratelimit_rls.transport.http.lines import one_line

MEDIA_TYPE = "application/problem+json"

COME_BACK_S = 2
"""What is told to those who come while the database or the store is away: about how long it takes to be back."""

MOST_ERRORS = 100
"""In one answer; the first of them are enough to begin with."""

LONGEST_MESSAGE = 1000

_TYPES = "urn:ratelimit-rls:problem:"

log = structlog.get_logger()


class Fault(HTTPException):
    """An answer that is an error, raised wherever it is known. `kind` is what programs tell it by."""

    def __init__(
        self,
        status: int,
        kind: str,
        detail: str,
        *,
        errors: Sequence[Mapping[str, Any]] = (),
        headers: Mapping[str, str] | None = None,
        **more: Any,
    ) -> None:
        super().__init__(status, detail, dict(headers) if headers else None)
        self.kind = kind
        self.errors = errors
        self.more = more


class Stale(Fault):
    """What was to be changed is not what the caller last saw; the answer carries the ETag of what is there now."""

    def __init__(self, detail: str, etag: str | None) -> None:
        super().__init__(412, "stale", detail, headers={"ETag": etag} if etag else None)


def unavailable(detail: str) -> Fault:
    return Fault(503, "unavailable", detail, headers={"Retry-After": str(COME_BACK_S)})


def wrong_field(field: str, message: str) -> Fault:
    """422 about one field of the body or the query."""
    return Fault(422, "invalid", f"{field}: {message}", errors=[{"field": field, "message": message}])


def problem(fault: Fault, request_id: str = "") -> Response:
    body: dict[str, Any] = {
        "type": _TYPES + fault.kind,
        "title": HTTPStatus(fault.status_code).phrase,
        "status": fault.status_code,
        "detail": _bounded(str(fault.detail)),
    }
    if fault.errors:
        body["errors"] = [dict(error) for error in fault.errors[:MOST_ERRORS]]
    body.update(fault.more)
    if request_id:
        body["request_id"] = request_id
    return Response(_dumped(body), fault.status_code, fault.headers, MEDIA_TYPE)


def install(app: FastAPI) -> None:
    """Whatever is raised on the way of a request becomes such an answer, by whose fault it was."""

    def say(fault: Fault, request: Request) -> Response:
        return problem(fault, getattr(request.state, "request_id", ""))

    async def spoken(request: Request, error: Exception) -> Response:
        if isinstance(error, RecordsError) and not isinstance(error, RecordsUnavailable):
            log.error("the database cannot be used as it is", method=request.method, error=one_line(str(error)))
        return say(fault_of(error), request)

    async def unspoken(request: Request, error: Exception) -> Response:
        """A mistake of ours. It is told to the log, and to nobody else."""
        log.error("the admin API failed", method=request.method, error=one_line(repr(error)))
        return say(Fault(500, "internal", "this is a fault of the service; its log says more"), request)

    async def no_route(request: Request, error: Exception) -> Response:
        assert isinstance(error, StarletteHTTPException)
        if isinstance(error, Fault):
            return say(error, request)
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            allowed = ", ".join(_methods(app, request))
            detail = f"{request.method} is not for this path; use {allowed}"
            return say(Fault(405, "method-not-allowed", detail, headers={"Allow": allowed}), request)
        if error.status_code == HTTPStatus.NOT_FOUND:
            return say(Fault(404, "not-found", "there is no such path; /openapi.json has all there are"), request)
        return say(Fault(400, "bad-request", "the body cannot be read as JSON"), request)

    app.add_exception_handler(StarletteHTTPException, no_route)
    app.add_exception_handler(RequestValidationError, spoken)
    for kind in (RulesError, NotFound, Conflict, BadRequest, NotReady, RecordsError, StoreError):
        app.add_exception_handler(kind, spoken)
    app.add_exception_handler(Exception, unspoken)


def fault_of(error: Exception) -> Fault:
    """The package's own errors, and those of validation, as answers."""
    match error:
        case Fault():
            return error
        case RequestValidationError():
            found = error.errors()
            errors = [_field_error(one) for one in found[:MOST_ERRORS]]
            return Fault(422, "invalid", _and_more(errors, len(found)), errors=errors)
        case RulesError():
            return rules_fault(error)
        case NotFound():
            return Fault(404, "not-found", str(error))
        case Conflict():
            return Stale(str(error), None) if error.is_stale else Fault(409, "conflict", str(error))
        case BadRequest():
            return Fault(422, "invalid", str(error))
        case NotReady():
            return unavailable("no rules have been loaded yet")
        case RecordsUnavailable():
            return unavailable("the database is away; nothing was changed unless reading it says otherwise")
        case StoreError():
            return unavailable("the store of the counters does not answer")
    return unavailable("the database cannot be used as it is; the log of the service says why")


def rules_fault(error: RulesError, **more: Any) -> Fault:
    """422 with every problem at its place; those of limits and targeting name a field in place of a line."""
    problems = error.problems
    if all(not one.line for one in problems):
        errors: list[dict[str, Any]] = [
            {"field": _bounded(one.file), "message": _bounded(one.message)} for one in problems
        ]
        return Fault(422, "invalid", _and_more(errors, len(errors)), errors=errors, **more)
    errors = [
        {"file": _bounded(one.file), "line": one.line, "column": one.column, "message": _bounded(one.message)}
        for one in problems
    ]
    first = f"{problems[0].file}:{problems[0].line}:{problems[0].column}: {problems[0].message}"
    rest = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return Fault(422, "rules", first + rest, errors=errors, **more)


def _and_more(errors: Sequence[Mapping[str, Any]], count: int) -> str:
    """Of so many, the first."""
    if not errors:
        return "the request cannot be understood"
    rest = f" (and {count - 1} more)" if count > 1 else ""
    return f"{errors[0]['field']}: {errors[0]['message']}{rest}"


def _field_error(error: Mapping[str, Any]) -> dict[str, str]:
    """Without what was sent: it may be a secret, and it may be long."""
    where, *path = error["loc"]
    if error["type"] == "json_invalid":
        return {"field": "body", "message": f"not JSON: {error['ctx']['error']} at character {path[0]}"}
    message = str(error["msg"]).removeprefix("Value error, ")
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
    return {"field": _bounded(field or str(where)), "message": _bounded(message)}


def _methods(app: FastAPI, request: Request) -> list[str]:
    """All that the path has, where each is a route of its own."""
    found: set[str] = set()
    for route in app.routes:
        matches, _ = route.matches(request.scope)
        if matches.value:
            found |= set(getattr(route, "methods", None) or ())
    return sorted(found)


def _bounded(text: str) -> str:
    """What a request says may be quoted, and must not come back as more than a text."""
    line = "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)
    return line if len(line) <= LONGEST_MESSAGE else line[: LONGEST_MESSAGE - 1] + "…"


def _dumped(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
