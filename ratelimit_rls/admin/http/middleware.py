"""ASGI middleware that runs before routing: request id, body size, origin and host checks, and common headers.

Paths are routed percent-encoded: a user id with a slash is /users/acme%2Falice, which would be another path once
decoded. Routes decode their path parameters (schemas.fields.UserId and others).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from email.utils import format_datetime
from ipaddress import ip_address
from urllib.parse import urlsplit
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ratelimit_rls.admin.http.problems import ApiError, problem_response
from ratelimit_rls.telemetry.abuse import Abuse, AbuseLog
from ratelimit_rls.transport.http.guard import scope_peer
from ratelimit_rls.transport.http.hosts import is_cross_origin

MAX_BODY_BYTES = 2**20

REQUEST_ID = "X-Request-Id"

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
"""Ids that do not match are replaced by our own: an id goes into headers, logs and audit entries."""

_ALWAYS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


@dataclass(frozen=True, slots=True)
class ApiVersion:
    """One version of the API.

    Every response of a deprecated version has the headers Deprecation (RFC 9745) and Sunset (RFC 8594), at least half a
    year ahead.
    """

    name: str  # as in the path
    deprecated_at: datetime | None = None  # with a time zone; so has sunset_at
    sunset_at: datetime | None = None
    successor: str = ""  # the name of the version to use instead

    @property
    def prefix(self) -> str:
        return f"/api/{self.name}"

    def headers(self) -> dict[str, str]:
        """Return the headers of every response under its path; none while it is not deprecated."""
        headers: dict[str, str] = {}
        if self.deprecated_at is not None:
            headers["Deprecation"] = f"@{int(self.deprecated_at.timestamp())}"
        if self.sunset_at is not None:
            headers["Sunset"] = format_datetime(self.sunset_at, usegmt=True)
        if headers and self.successor:
            headers["Link"] = f'</api/{self.successor}>; rel="successor-version"'
        return headers


VERSIONS = (ApiVersion("v1"),)


def deprecation_headers(path: str, versions: Sequence[ApiVersion]) -> dict[str, str]:
    for version in versions:
        if path == version.prefix or path.startswith(f"{version.prefix}/"):
            return version.headers()
    return {}


class RequestGuardMiddleware:
    """Checks requests before routing, and adds headers to all responses."""

    def __init__(self, app: ASGIApp, versions: Sequence[ApiVersion], abuse: AbuseLog, *, only_loopback: bool) -> None:
        """`only_loopback`: the port requires no token, so only programs on this machine may use it.

        A web page elsewhere can make a browser send requests here, through a host name of its own that resolves to this
        address, or through the address itself. Such requests have another host or another origin. Where tokens are
        required, the host does not matter.
        """
        self._app = app
        self._versions = versions
        self._abuse = abuse
        self._only_loopback = only_loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get(REQUEST_ID, "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        scope["path"] = scope["raw_path"].partition(b"?")[0].decode("ascii", "replace")
        added = {REQUEST_ID: request_id, **_ALWAYS, **deprecation_headers(scope["path"], self._versions)}

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                response_headers = MutableHeaders(scope=message)
                for name, value in added.items():
                    # Append: a page of a list already has a link to the next one.
                    response_headers.append(name, value) if name == "Link" else response_headers.__setitem__(
                        name, value
                    )
            await send(message)

        rejection = self._rejection(scope, headers)
        if rejection is not None:
            await problem_response(rejection, request_id)(scope, receive, send_with_headers)
        else:
            await self._app(scope, _bounded(receive), send_with_headers)

    def _rejection(self, scope: Scope, headers: Headers) -> ApiError | None:
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > MAX_BODY_BYTES:
            return _too_large()
        if self._only_loopback and not _is_loopback(headers.get("host", "")):
            self._abuse.record(Abuse.UNKNOWN_HOST, scope_peer(scope))
            return ApiError(421, "misdirected", "without tokens, the Host must be a loopback host, e.g. localhost")
        if is_cross_origin(scope["headers"]):
            self._abuse.record(Abuse.CROSS_ORIGIN, scope_peer(scope))
            return ApiError(403, "forbidden", "cross-origin requests are not allowed")
        return None


def _bounded(receive: Receive) -> Receive:
    """Limit the bytes read from a body without Content-Length. Raises ApiError (413) beyond the limit."""
    taken = 0

    async def receive_bounded() -> Message:
        nonlocal taken
        message = await receive()
        if message["type"] == "http.request":
            taken += len(message.get("body", b""))
            if taken > MAX_BODY_BYTES:
                raise _too_large()
        return message

    return receive_bounded


def _too_large() -> ApiError:
    return ApiError(413, "too-large", f"the body must have at most {MAX_BODY_BYTES} bytes")


def _is_loopback(host: str) -> bool:
    """Return whether a Host header (a name or an address, with or without a port) means this machine."""
    try:
        name = (urlsplit(f"//{host}").hostname or "").removesuffix(".")
        return name == "localhost" or name.endswith(".localhost") or ip_address(name).is_loopback
    except ValueError:
        return False
