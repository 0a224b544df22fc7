"""The OpenAPI document: what FastAPI makes of the routes, and what holds for all of them and no route says."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from ratelimit_rls import __version__
from ratelimit_rls.transport.http.admin.problems import MEDIA_TYPE
from ratelimit_rls.transport.http.admin.shown import ProblemBody
from ratelimit_rls.transport.http.admin.way import IDEMPOTENCY_KEY, KEY_PATTERN, Way

ABOUT = """\
What the database keeps about callers and rules, read and changed; counters and decisions on demand.

* **Tokens.** `Authorization: Bearer rla_…`, with the role read, write or admin; each may do what those before it may.
* **Versions of things.** A single thing has an `ETag`. Send it back as `If-Match` with a change, and the change is
  refused (412) if somebody else was first; as `If-None-Match` with a GET, and the answer is 304 if nothing has changed.
  `If-None-Match: *` with a PUT only creates.
* **Dry runs.** `?dry_run=true` with any change: everything is checked, the answer is what it would be, and nothing is
  stored.
* **Repetition.** `Idempotency-Key` with any change: the same request under the same key is carried out once within 24
  hours, and answered as then (`Idempotency-Replayed: true`). An answer with a secret is not kept: its repetition is
  409, with the id of what was made.
* **Lists** come in pages of `?limit=` things; `next` of one, and its `Link`, lead to the next.
* **Ids** in paths are escaped: of the user `acme/alice` the path is `/api/v1/users/acme%2Falice`.
* **Versions of the API.** When this one ages, every answer says so: `Deprecation`, `Sunset`, and a `Link` to its
  successor.
* **Errors** are `application/problem+json` (RFC 9457).
* **Limits.** 1,000 reads and 100 changes a minute for each token, 10 failed logins a minute for each address; then 429
  with `Retry-After`. `RLS_ADMIN_TOKEN`, and tokens that were good within the last 15 minutes, are let in from such an
  address all the same.
* **Credentials** in descriptors, where the rules say which entries carry one (`identity`), are read as the service
  reads them. Answers and records show who is calling in their place.
"""

_TAG = {"type": "string", "pattern": r'^(\*|"[0-9]{1,10}")$'}
_PROBLEM = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemBody"}}}

_ETAG = {"ETag": {"description": "The version, in quotes.", "schema": {"type": "string"}}}
_RETRY = {"Retry-After": {"description": "In seconds.", "schema": {"type": "string", "pattern": "^[0-9]+$"}}}
_DRY = {"Dry-Run": {"description": "true, if nothing was stored.", "schema": {"type": "string"}}}
_REPLAYED = {"Idempotency-Replayed": {"description": "true, if kept from before.", "schema": {"type": "string"}}}
_LOCATION = {"Location": {"description": "Where it is.", "schema": {"type": "string"}}}
_LINK = {"Link": {"description": 'The next page: rel="next".', "schema": {"type": "string"}}}


_made: list[dict[str, Any]] = []
"""The document, once it was asked for: every app has the same routes, and it takes a fifth of a second."""


def install(app: FastAPI) -> None:
    def document() -> dict[str, Any]:
        if not _made:
            _made.append(_document(app))
        return _made[0]

    app.openapi = document  # type: ignore[method-assign]


def _document(app: FastAPI) -> dict[str, Any]:
    made = get_openapi(
        title="ratelimit-rls admin API", version=__version__, description=ABOUT, routes=app.routes, summary=None
    )
    schemas = made.setdefault("components", {}).setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    problem = ProblemBody.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(problem.pop("$defs", {}))
    schemas["ProblemBody"] = problem
    made["components"]["securitySchemes"] = {
        "token": {"type": "http", "scheme": "bearer", "description": "rla_<id>_<secret>"}
    }
    for route in ways(app):
        _complete(made["paths"][route.path_format][route.method.lower()], route)
    return made


def ways(app: FastAPI) -> list[Way]:
    return [route for route in app.routes if isinstance(route, Way)]


def _complete(operation: dict[str, Any], route: Way) -> None:
    method = route.method
    operation["security"] = [{"token": [route.role.value]}]
    operation["description"] = f"{operation.get('description', '')}\n\nRole: {route.role.value}.".strip()
    parameters: list[dict[str, Any]] = operation.setdefault("parameters", [])
    responses: dict[str, Any] = operation["responses"]
    is_one = "{" in route.path_format
    good = next(response for status, response in responses.items() if status.startswith("2"))
    good.setdefault("headers", {})
    if method == "GET":
        if is_one and not route.path_format.endswith("/limits"):
            parameters.append(_header("If-None-Match", "304, if it still is the version you have.", _TAG))
            good["headers"].update(_ETAG)
            responses["304"] = {"description": "You have it already.", "headers": _ETAG}
        elif any(parameter["name"] == "cursor" for parameter in parameters):
            good["headers"].update(_LINK)
    elif route.is_change:
        _complete_change(operation, parameters, good, method, is_one=is_one)
    problems = _problems(route, is_one=is_one)
    for status, description in problems.items():
        responses[status] = {"description": description, "content": _PROBLEM}
    for status in ("429", "503"):
        responses[status]["headers"] = _RETRY
    if "412" in problems:
        responses["412"]["headers"] = _ETAG


def _complete_change(
    operation: dict[str, Any], parameters: list[dict[str, Any]], good: dict[str, Any], method: str, *, is_one: bool
) -> None:
    good["headers"].update({**_DRY, **_REPLAYED})
    parameters.append(
        {
            "name": "dry_run",
            "in": "query",
            "required": False,
            "schema": {"type": "boolean", "default": False},
            "description": "Check everything, answer as it would be, and store nothing.",
        }
    )
    key_schema = {"type": "string", "pattern": KEY_PATTERN}
    parameters.append(_header(IDEMPOTENCY_KEY, "Carries the request out once, however often it is sent.", key_schema))
    if is_one:
        parameters.append(_header("If-Match", "412, unless it still is the version you have seen.", _TAG))
        good["headers"].update(_ETAG)
    if method == "PUT":
        only_new = {"type": "string", "pattern": r"^\*$"}
        parameters.append(_header("If-None-Match", "`*`: only if it is not there yet; 412 otherwise.", only_new))
        if "200" in operation["responses"]:
            operation["responses"]["201"] = {
                **good,
                "description": "It was made.",
                "headers": {**good["headers"], **_LOCATION},
            }
    if method == "POST":
        good["headers"].update({**_ETAG, **_LOCATION})


def _problems(route: Way, *, is_one: bool) -> dict[str, str]:
    problems = {
        "400": "A header or the body cannot be read.",
        "401": "There is no token, or it is not good.",
        "403": "The token's role is not enough.",
        "413": "The body is too large.",
        "415": "The body is not said to be JSON.",
        "421": "Without tokens: the Host is not a loopback one.",
        "422": "The request is understood, and wrong; `errors` says where.",
        "429": "Too many requests, or failed logins.",
        "503": "The database or the store is away.",
    }
    if is_one:
        problems["404"] = "There is no such thing."
    if route.is_change:
        problems["409"] = "It cannot be so: a name is taken, something is in use, or a secret was told once."
        if is_one:
            problems["412"] = "It is not the version you have seen."
    return dict(sorted(problems.items()))


def _header(name: str, description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "header", "required": False, "schema": schema, "description": description}
