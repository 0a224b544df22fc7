"""Errors as application/problem+json (RFC 9457): what is wrong, where, and what would be right."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import cache
from http import HTTPStatus
from typing import Any

import structlog
from fastapi.exceptions import HTTPException, RequestValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import compile_path

from ratelimit_rls.errors import (
    BadRequest,
    Conflict,
    DatabaseError,
    DatabaseUnavailable,
    NotFound,
    NotReady,
    PermissionDenied,
    RulesError,
    StoreError,
    TooManyRequests,
    Unauthenticated,
)
from ratelimit_rls.transport.http.header_value import header_value

MEDIA_TYPE = "application/problem+json"

RETRY_AFTER_S = 2
"""Retry-After while the database or the store is unavailable: about as long as a reconnection takes."""

MAX_ERRORS = 100
"""Errors listed in one response."""

MAX_MESSAGE_LENGTH = 1000

_CHALLENGE = 'Bearer realm="ratelimit-rls"'

_TYPES = "urn:ratelimit-rls:problem:"

_compile_path = cache(compile_path)

_log = structlog.get_logger()


class ApiError(HTTPException):
    """An error of the HTTP layer, as a response. `kind` is the last part of the problem `type`."""

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


def unavailable(detail: str) -> ApiError:
    return ApiError(503, "unavailable", detail, headers={"Retry-After": str(RETRY_AFTER_S)})


def invalid_field(field: str, message: str) -> ApiError:
    """Return a 422 about one field of the body or the query."""
    return ApiError(422, "invalid", f"{field}: {message}", errors=[{"field": field, "message": message}])


def problem_response(api_error: ApiError, request_id: str = "") -> Response:
    body: dict[str, Any] = {
        "type": _TYPES + api_error.kind,
        "title": HTTPStatus(api_error.status_code).phrase,
        "status": api_error.status_code,
        "detail": _bounded(str(api_error.detail)),
    }
    if api_error.errors:
        body["errors"] = [dict(error) for error in api_error.errors[:MAX_ERRORS]]
    body.update(api_error.more)
    if request_id:
        body["request_id"] = request_id
    return Response(_to_json(body), api_error.status_code, api_error.headers, MEDIA_TYPE)


async def _handle_known(request: Request, error: Exception) -> Response:
    if isinstance(error, DatabaseError) and not isinstance(error, DatabaseUnavailable):
        _log.error("database_unusable", method=request.method, error=header_value(str(error)))
    return _respond(request, to_api_error(error))


async def _handle_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, StarletteHTTPException)
    if isinstance(error, ApiError):
        return _respond(request, error)
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = ", ".join(_methods(request)) or "GET"  # /docs and /openapi.json are not in the document
        detail = f"{request.method} is not allowed for this path; use {allowed}"
        return _respond(request, ApiError(405, "method-not-allowed", detail, headers={"Allow": allowed}))
    if error.status_code == HTTPStatus.NOT_FOUND:
        return _respond(request, ApiError(404, "not-found", "no such path; see /openapi.json"))
    return _respond(request, ApiError(400, "bad-request", "the body must be valid JSON"))


async def _handle_unexpected(request: Request, error: Exception) -> Response:
    """Handle a bug. Its details go to the log only."""
    _log.error("admin_request_failed", method=request.method, error=header_value(repr(error)))
    return _respond(request, ApiError(500, "internal", "internal error; see the log of the service"))


def _respond(request: Request, api_error: ApiError) -> Response:
    return problem_response(api_error, getattr(request.state, "request_id", ""))


_KNOWN = (
    RequestValidationError,
    Unauthenticated,
    PermissionDenied,
    TooManyRequests,
    RulesError,
    NotFound,
    Conflict,
    BadRequest,
    NotReady,
    DatabaseError,
    StoreError,
)

EXCEPTION_HANDLERS: dict[int | type[Exception], Callable[[Request, Any], Coroutine[Any, Any, Response]]] = {
    **dict.fromkeys(_KNOWN, _handle_known),
    StarletteHTTPException: _handle_http,
    Exception: _handle_unexpected,
}
"""Turns every exception of a request into a problem response."""


def to_api_error(error: Exception) -> ApiError:
    """Convert an error of this package or of validation."""
    match error:
        case ApiError():
            return error
        case RequestValidationError():
            found = error.errors()
            errors = [_field_error(one) for one in found[:MAX_ERRORS]]
            return ApiError(422, "invalid", _summary(errors, len(found)), errors=errors)
        case Unauthenticated():
            challenge = _CHALLENGE if error.is_missing else f'{_CHALLENGE}, error="invalid_token"'
            return ApiError(401, "unauthorized", str(error), headers={"WWW-Authenticate": challenge})
        case PermissionDenied():
            return ApiError(403, "forbidden", str(error))
        case TooManyRequests():
            headers = {"Retry-After": str(error.retry_after_s)}
            return ApiError(429, "too-many-requests", str(error), headers=headers)
        case RulesError():
            return invalid_rules(error)
        case NotFound():
            return ApiError(404, "not-found", str(error))
        case Conflict():
            return ApiError(412, "stale", str(error)) if error.is_stale else ApiError(409, "conflict", str(error))
        case BadRequest():
            return invalid_field(error.field, str(error)) if error.field else ApiError(422, "invalid", str(error))
        case NotReady():
            return unavailable("no rules have been loaded yet")
        case DatabaseUnavailable():
            return unavailable("the database is unavailable; check whether the change was stored before you retry")
        case StoreError():
            return unavailable("the counter store is unavailable")
    return unavailable("the database cannot be used; see the log of the service")


def invalid_rules(error: RulesError, **more: Any) -> ApiError:
    """Return a 422 with the position of each problem. Problems of limits and targeting have a field instead of a
    line."""
    problems = error.problems
    if all(not one.line for one in problems):
        errors: list[dict[str, Any]] = [
            {"field": _bounded(one.file), "message": _bounded(one.message)} for one in problems
        ]
        return ApiError(422, "invalid", _summary(errors, len(errors)), errors=errors, **more)
    errors = [
        {"file": _bounded(one.file), "line": one.line, "column": one.column, "message": _bounded(one.message)}
        for one in problems
    ]
    first = f"{problems[0].file}:{problems[0].line}:{problems[0].column}: {problems[0].message}"
    rest = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return ApiError(422, "rules", first + rest, errors=errors, **more)


def _summary(errors: Sequence[Mapping[str, Any]], count: int) -> str:
    """Return the first of `count` errors, and how many more there are."""
    if not errors:
        return "invalid request"
    rest = f" (and {count - 1} more)" if count > 1 else ""
    return f"{errors[0]['field']}: {errors[0]['message']}{rest}"


def _field_error(error: Mapping[str, Any]) -> dict[str, str]:
    """Convert one validation error. Omits the input, which may be secret or long."""
    where, *path = error["loc"]
    if error["type"] == "json_invalid":
        return {"field": "body", "message": f"not JSON: {error['ctx']['error']} at character {path[0]}"}
    message = str(error["msg"]).removeprefix("Value error, ")
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
    return {"field": _bounded(field or str(where)), "message": _bounded(message)}


def _methods(request: Request) -> list[str]:
    """Return all methods of the path; each is a route of its own."""
    paths: dict[str, dict[str, Any]] = request.app.openapi()["paths"]
    found = (operations for path, operations in paths.items() if _compile_path(path)[0].match(request.scope["path"]))
    return sorted(method.upper() for operations in found for method in operations)


def _bounded(text: str) -> str:
    """Escape unprintable characters and bound the length, because the text may quote the request."""
    line = "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)
    return line if len(line) <= MAX_MESSAGE_LENGTH else line[: MAX_MESSAGE_LENGTH - 1] + "…"


def _to_json(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
