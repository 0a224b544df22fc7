"""Generates docs/admin-api.md from the OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ratelimit_rls.admin.http.app import documented_app

_HEAD = """\
The REST API for administrators. Every server with a database (`RLS_DATABASE_URL`) serves it on
`RLS_ADMIN_HOST:RLS_ADMIN_PORT` (127.0.0.1:8082). The OpenAPI document is at `/openapi.json`, a page with all operations
at `/docs`; `/healthz` tells whether the API answers. None of these three needs a token.

`RLS_ADMIN_TOKEN` is the initial token, with the role admin. Create others with `POST /api/v1/tokens` or
`ratelimit-rls tokens create`; they are stored as hashes keyed with `RLS_KEY_SECRET`. `RLS_ADMIN_AUTH=none` requires no
token, and is for loopback only: requests with another host are rejected then. Cross-origin requests are always
rejected: in a browser, only pages of the same host and port may use the API.
"""

_WITHOUT_DATABASE = """\
If no database is configured (`RLS_DATABASE_URL` is empty), there is no admin API: the port is not opened, and the log
event `serving` has `admin=none`. Settings that begin with `RLS_ADMIN_` are validated but have no effect, and the log
warns of each one that is set. `ResetLimit` on the gRPC port is `UNIMPLEMENTED`. Requests are limited by the rules of
files or xDS, and administrators use commands: `ratelimit-rls explain` and `simulate`, and with Redis `peek` and
`reset`, which write no audit entries.

While a configured database is unavailable, the port stays open. Tokens in the database cannot be verified, and requests
with them are 503. `RLS_ADMIN_TOKEN`, or any request with `RLS_ADMIN_AUTH=none`, still gives access to what needs no
database, with users and keys as they were last read: `GET /users/{user_id}/limits`, `GET /sources`,
`POST /counters/peek`, and `POST /decisions/check`, `/explain` and `/simulate`. Everything else under `/api/v1` is 503,
and so is `POST /counters/reset`, because its audit entry must be stored first.
"""

_SESSION = """\
```sh
export RLS=http://127.0.0.1:8082/api/v1
auth='Authorization: Bearer '"$RLS_ADMIN_TOKEN"
json='Content-Type: application/json'
curl -H "$auth" -H "$json" $RLS/tiers -d '{"name": "gold", "limits": [{"unit": "minute", "requests_per_unit": 100}]}'
curl -H "$auth" -H "$json" -X PUT $RLS/users/alice/tier -d '{"tier": "gold"}'
curl -H "$auth" -H "$json" $RLS/keys -d '{"user_id": "alice", "expires_in": "90d"}'
curl -H "$auth" $RLS/users/alice/limits
```
"""

_ERRORS = """\
Every error is `application/problem+json` with `type` (`urn:ratelimit-rls:problem:…`, which identifies the kind of
error), `title`, `status`, `detail` and `request_id`. If the request is invalid it also has `errors`: each with `field`
and `message`, or, for a rules document, with `file`, `line`, `column` and `message`.

| status | type | when |
|---|---|---|
| 400 | `bad-request` | malformed header or body |
| 401 | `unauthorized` | missing or invalid token |
| 403 | `forbidden` | the role of the token does not suffice, or the request is cross-origin |
| 404 | `not-found` | no such resource or path |
| 405 | `method-not-allowed` | `Allow` lists the allowed methods |
| 409 | `conflict`, `secret-already-returned` | a name is taken or a resource in use; the secret was returned before |
| 412 | `stale` | the resource was modified; `ETag` has its current version |
| 408, 431 | | the request took too long; it has more than 100 header fields or 16 KiB of headers; plain text |
| 413 | `too-large` | the body has more than 1 MiB |
| 415 | `not-json` | the body comes without `Content-Type: application/json` |
| 421 | `misdirected` | without tokens: the Host is not a loopback host |
| 422 | `invalid`, `rules`, `idempotency-key-reused` | invalid request |
| 429 | `too-many-requests` | `Retry-After` has the seconds to wait |
| 503 | `unavailable` | the database or the store is unavailable; with `Retry-After`, too |
"""


_PAGE = "Page"
"""Suffix of the components that are pages of a list, e.g. UserPage."""


def admin_api(notice: str) -> str:
    document = documented_app().openapi()
    about = document["info"]["description"].partition("\n\n")
    lines = ["# Admin API", "", notice, "", about[0], "", _HEAD, _SESSION]
    lines += ["## Without a database", "", _WITHOUT_DATABASE, "## Common behaviour", "", about[2]]
    lines += ["## Errors", "", _ERRORS, *_overview(document)]
    for tag, operations in _by_tag(document).items():
        lines += [f"## {tag.capitalize()}", ""]
        for method, path, operation in operations:
            lines += [*_operation(method, path, operation, document), ""]
    lines += ["## Schemas", "", *_schemas(document)]
    return "\n".join(lines).rstrip() + "\n"


def _by_tag(document: dict[str, Any]) -> dict[str, list[tuple[str, str, dict[str, Any]]]]:
    found: dict[str, list[tuple[str, str, dict[str, Any]]]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            found.setdefault(operation["tags"][0], []).append((method.upper(), path, operation))
    return found


def _overview(document: dict[str, Any]) -> Iterator[str]:
    yield from ("## Endpoints", "", "| | | role |", "|---|---|---|")
    for operations in _by_tag(document).values():
        for method, path, operation in operations:
            yield f"| `{method} {path}` | {operation['summary']} | {_role(operation)} |"
    yield ""


def _operation(method: str, path: str, operation: dict[str, Any], document: dict[str, Any]) -> Iterator[str]:
    yield from (f"### `{method} {path}`", "", f"{operation['summary']}. Role: {_role(operation)}.")
    more = operation.get("description", "").partition("Role: ")[0].strip()
    if more:
        yield from ("", more)
    rows = [*_parameters(operation), *_body(operation, document)]
    if rows:
        yield from ("", "| | type | default | description |", "|---|---|---|---|", *rows)
    good = [status for status in operation["responses"] if status.startswith(("2", "3"))]
    bad = [status for status in operation["responses"] if not status.startswith(("2", "3"))]
    errors = f"; {', '.join(sorted(bad))}" if bad else ""
    yield from ("", f"Responses: {', '.join(good)}{_response_type(operation, good[0])}{errors}.")


def _role(operation: dict[str, Any]) -> str:
    return str(operation["security"][0]["token"][0]) if "security" in operation else "none"


def _parameters(operation: dict[str, Any]) -> Iterator[str]:
    for parameter in operation.get("parameters", ()):
        where = {"query": "?", "header": "header ", "path": "path "}[parameter["in"]]
        name = f"`{where}{parameter['name']}`" if where == "?" else f"{where}`{parameter['name']}`"
        yield _row(name, parameter["schema"], parameter.get("description", ""), is_needed=parameter["required"])


def _body(operation: dict[str, Any], document: dict[str, Any]) -> Iterator[str]:
    content = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if content is None:
        return
    schema = _resolved(content["schema"], document)
    for name, field in schema["properties"].items():
        whole = _resolved(field, document)
        yield _row(f"`{name}`", field, whole.get("description", ""), is_needed=name in schema.get("required", ()))


def _row(name: str, schema: dict[str, Any], meaning: str, *, is_needed: bool) -> str:
    default = schema.get("default")
    default_text = "required" if is_needed else f"`{str(default).lower()}`" if default not in (None, "", []) else ""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in (name, _kind(schema), default_text, meaning)) + " |"


def _kind(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return f"`{schema['$ref'].rpartition('/')[2]}`"
    if "anyOf" in schema:
        kinds = dict.fromkeys(_kind(one) for one in schema["anyOf"] if one.get("type") != "null")
        return " or ".join(kinds)
    if "enum" in schema:
        return ", ".join(f"`{one}`" for one in schema["enum"])
    if schema.get("format") == "date-time":
        return "timestamp"
    if schema.get("type") == "array":
        return f"list of {_kind(schema['items'])}"
    return str(schema.get("type", "anything"))


def _response_type(operation: dict[str, Any], status: str) -> str:
    content = operation["responses"][status].get("content", {}).get("application/json", {})
    name = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
    if name.endswith(_PAGE):
        return f" with a page of `{name.removesuffix(_PAGE)}`"
    return f" with `{name}`" if name else ""


def _schemas(document: dict[str, Any]) -> Iterator[str]:
    for name, schema in sorted(document["components"]["schemas"].items()):
        if name.endswith(_PAGE) or "properties" not in schema:
            continue
        yield from (f"### `{name}`", "")
        if "description" in schema:
            yield from (schema["description"], "")
        yield from ("| | type | default | description |", "|---|---|---|---|")
        for field, its in schema["properties"].items():
            meaning = _resolved(its, document).get("description", "")
            is_request = schema.get("additionalProperties") is False  # responses have all fields
            is_needed = is_request and field in schema.get("required", ())
            yield _row(f"`{field}`", its, meaning, is_needed=is_needed)
        yield ""


def _resolved(schema: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    name = schema.get("$ref", "").rpartition("/")[2]
    found: dict[str, Any] = document["components"]["schemas"][name] if name else schema
    return found
