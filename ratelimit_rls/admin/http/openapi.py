"""The OpenAPI document, FastAPI's with the headers and errors that routes share, and the /docs page made from it."""

from __future__ import annotations

import html
import json
import re
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from ratelimit_rls import __version__
from ratelimit_rls.admin.http.problems import MEDIA_TYPE
from ratelimit_rls.admin.http.schemas.resources import ProblemDetails

DESCRIPTION = """\
Manages the tiers, users, API keys, tokens and rules in the database; reads and resets counters; decides on demand.

* **Tokens.** `Authorization: Bearer rla_…`. A token has the role read, write or admin; each role includes those before
  it.
* **ETags.** A single resource has an `ETag`. Send it as `If-Match` with a change: the change fails with 412 if the
  resource was modified in between. Send it as `If-None-Match` with a GET: the response is 304 if it was not modified.
  A PUT with `If-None-Match: *` only creates.
* **Dry runs.** `?dry_run=true` with any change: everything is checked, the response is what it would be, without
  secrets, and nothing is stored.
* **Idempotency.** `Idempotency-Key` with any change: the same request with the same key is carried out once within 24
  hours, and a repetition receives the first response (`Idempotency-Replayed: true`). A response with a secret is not
  stored: a repetition of it is 409, with the id of what was created.
* **Pagination.** A list returns pages of `?limit=` items; `next` is the cursor of the next page, and `Link` its URL.
* **Ids** in paths are percent-encoded: the path of the user `acme/alice` is `/api/v1/users/acme%2Falice`.
* **Names** of users, tiers and organisations have 1 to 255 printable characters, and no space at either end: they are
  sent to upstreams in HTTP headers, which lose such spaces.
* **Versions.** When this version of the API is deprecated, every response says so: `Deprecation`, `Sunset`, and a
  `Link` to its successor.
* **Errors** are `application/problem+json` (RFC 9457).
* **Rate limits.** 1,000 reads and 100 changes a minute for each token, and 10 failed logins a minute for each address;
  beyond that 429 with `Retry-After`. `RLS_ADMIN_TOKEN`, and tokens that were verified within the last 15 minutes, are
  still accepted from an address with too many failed logins.
* **Credentials** in descriptors are verified as the service does it, where the rules name the entries that carry them
  (`identity`). Responses and audit entries show the identity, never the credential.
"""

_PLAIN = {"text/plain": {"schema": {"type": "string"}}}
_PROBLEM = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}

_ETAG = {"ETag": {"description": "The version of the resource, in quotes.", "schema": {"type": "string"}}}
_RETRY = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "string", "pattern": "^[0-9]+$"}}}
_DRY = {"Dry-Run": {"description": "`true` if nothing was stored.", "schema": {"type": "string"}}}
_REPLAYED = {
    "Idempotency-Replayed": {
        "description": "`true` if this is the stored response of an earlier request.",
        "schema": {"type": "string"},
    }
}
_LOCATION = {"Location": {"description": "Path of the resource.", "schema": {"type": "string"}}}
_LINK = {"Link": {"description": 'The next page: rel="next".', "schema": {"type": "string"}}}


_PATH_PARAMETERS = {
    "rule_id": "Id of the rule, a UUID.",
    "name": "Name of the tier, percent-encoded.",
    "user_id": "Id of the user, percent-encoded.",
    "key_id": "Public id of the API key.",
    "token_id": "Public id of the token.",
}

_cached: list[dict[str, Any]] = []
"""The document, once generated: every application has the same routes, and generating it takes a fifth of a second."""


def install(app: FastAPI) -> None:
    def document() -> dict[str, Any]:
        if not _cached:
            _cached.append(_document(app))
        return _cached[0]

    app.openapi = document  # type: ignore[method-assign]


def _document(app: FastAPI) -> dict[str, Any]:
    openapi = get_openapi(
        title="ratelimit-rls admin API", version=__version__, description=DESCRIPTION, routes=app.routes, summary=None
    )
    schemas = openapi.setdefault("components", {}).setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    problem = ProblemDetails.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(problem.pop("$defs", {}))
    schemas["Problem"] = problem
    schemas["JsonValue"]["description"] = "Any JSON value."
    for operations in openapi["paths"].values():
        for operation in operations.values():
            for parameter in operation.get("parameters", ()):
                if parameter["in"] == "path":
                    parameter.setdefault("description", _PATH_PARAMETERS[parameter["name"]])
    for path, operations in openapi["paths"].items():
        for method, operation in operations.items():
            if "security" in operation:
                _complete(operation, method, is_one="{" in path)
    return openapi


def _complete(operation: dict[str, Any], method: str, *, is_one: bool) -> None:
    """Add the response headers and errors that follow from the method and the parameters of an operation."""
    (role,) = operation["security"][0]["token"]
    operation["description"] = f"{operation.get('description', '')}\n\nRole: {role}.".strip()
    names = {parameter["name"] for parameter in operation.setdefault("parameters", [])}
    responses: dict[str, Any] = operation["responses"]
    good = next(responses[status] for status in sorted(responses) if status.startswith("2"))
    headers = good.setdefault("headers", {})
    is_change = "dry_run" in names
    if "cursor" in names:
        headers.update(_LINK)
    if method == "get" and "If-None-Match" in names:
        headers.update(_ETAG)
        responses["304"] = {"description": "Not modified: you have the current version.", "headers": _ETAG}
    if is_change:
        headers.update({**_DRY, **_REPLAYED, **(_ETAG if is_one else {})})
    if is_change and method == "post":
        headers.update({**_ETAG, **_LOCATION})
    if method == "put" and "201" in responses:
        responses["201"]["headers"] = {**headers, **_LOCATION}
    for status, description in _problems(is_one=is_one, is_change=is_change).items():
        responses[status] = {"description": description, "content": _PROBLEM}
    for status in ("400", "503"):  # also sent by the HTTP server itself, before the API is reached
        responses[status]["content"] = {**_PROBLEM, **_PLAIN}
    for status in ("408", "431"):
        responses[status]["content"] = _PLAIN
    for status in ("429", "503"):
        responses[status]["headers"] = _RETRY
    if "412" in responses:
        responses["412"]["headers"] = _ETAG


def _problems(*, is_one: bool, is_change: bool) -> dict[str, str]:
    problems = {
        "400": "Malformed header or body.",
        "401": "Missing or invalid token.",
        "403": "The role of the token does not suffice, or the request is cross-origin.",
        "408": "The request did not arrive in time.",
        "413": "The body is too large.",
        "415": "The Content-Type is not application/json.",
        "421": "Without tokens: the Host is not a loopback host.",
        "422": "Invalid request; `errors` names the fields.",
        "429": "Too many requests, or failed logins.",
        "431": "More than 100 header fields or 16 KiB of headers.",
        "503": "The database or the store is unavailable, or the port has too many connections.",
    }
    if is_one:
        problems["404"] = "Not found."
    if is_change:
        problems["409"] = "Conflict: a name is taken, a resource is in use, or a secret was already returned."
        if is_one:
            problems["412"] = "The resource was modified; read it again."
    return dict(sorted(problems.items()))


_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>ratelimit-rls admin API</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
summary { cursor: pointer; padding: .2rem 0 } code, pre { font: 13px/1.4 ui-monospace, monospace }
pre { background: #f6f6f6; padding: .6rem; overflow: auto; max-height: 24rem }
.m { display: inline-block; width: 4.5rem; font-weight: 600 }
.r { color: #777 } h2 { margin: 2rem 0 .3rem; text-transform: capitalize }
@media (prefers-color-scheme: dark) { body { background: #181818; color: #ddd } pre { background: #222 } }
</style></head><body><h1>ratelimit-rls admin API</h1>
<p>The OpenAPI document: <a href="/openapi.json">/openapi.json</a>.</p>
"""

_BULLET = "* "
_BOLD = re.compile(r"\*\*([^*]+)\*\*")
_CODE = re.compile("`([^`]+)`")


def docs_page(document: dict[str, Any]) -> str:
    """Return a self-contained HTML page with all operations. It loads nothing from elsewhere."""
    by_tag: dict[str, list[str]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            (tag,) = operation["tags"]
            by_tag.setdefault(tag, []).append(_operation(method, path, operation))
    about = "".join(_paragraph(part) for part in document["info"]["description"].strip().split("\n\n"))
    sections = "".join(f"<h2>{_escape(tag)}</h2>{''.join(operations)}" for tag, operations in by_tag.items())
    schemas = _escape(json.dumps(document["components"]["schemas"], indent=2))
    return (
        f"{_HEAD}{about}{sections}<h2>Schemas</h2><details><summary>All</summary><pre>{schemas}</pre></details></body>"
    )


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    role = operation["security"][0]["token"][0] if operation.get("security") else "no token"
    head = f'<span class="m">{method.upper()}</span><code>{_escape(path)}</code> {_markdown(operation["summary"])}'
    details = {name: operation[name] for name in ("parameters", "requestBody", "responses") if name in operation}
    body = f"<p>{_markdown(operation.get('description', ''))}</p><pre>{_escape(json.dumps(details, indent=2))}</pre>"
    return f'<details><summary>{head} <span class="r">({_escape(role)})</span></summary>{body}</details>'


def _paragraph(text: str) -> str:
    if not text.startswith(_BULLET):
        return f"<p>{_markdown(text)}</p>"
    items = text.removeprefix(_BULLET).split(f"\n{_BULLET}")
    return f"<ul>{''.join(f'<li>{_markdown(item)}</li>' for item in items)}</ul>"


def _markdown(text: str) -> str:
    """Render the subset of Markdown that our descriptions use: bold and code."""
    return _BOLD.sub(r"<b>\1</b>", _CODE.sub(r"<code>\1</code>", _escape(text)))


def _escape(text: str) -> str:
    return html.escape(text)
