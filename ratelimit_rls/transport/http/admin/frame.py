"""What holds for every request, before anybody looks at what it asks: its id, its size, and which host it names.

Paths are routed as they were written, with escapes: a user whose id has a slash in it is /users/acme%2Falice, and would
be another path once unescaped. Routes unescape what they take from it (models.Id).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ratelimit_rls.transport.http.admin.problems import Fault, problem
from ratelimit_rls.transport.http.admin.versions import Version, aging_headers

MOST_BODY_BYTES = 2**20

REQUEST_ID = "X-Request-Id"

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
"""Others are not repeated: an id goes into headers, logs and records."""

_ALWAYS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


class Frame:
    def __init__(self, app: ASGIApp, versions: Sequence[Version], *, only_loopback: bool) -> None:
        """`only_loopback`: the port asks for no token, so that only programs of this machine may speak to it.

        A web page somewhere else can make a browser send requests here, by its own name for this address or by its
        address: such requests name another host, or an origin that is not here.
        """
        self._app = app
        self._versions = versions
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
        added = {REQUEST_ID: request_id, **_ALWAYS, **aging_headers(scope["path"], self._versions)}

        async def send_framed(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer = MutableHeaders(scope=message)
                for name, value in added.items():
                    # A page has links of its own: to the next one.
                    answer.append(name, value) if name == "Link" else answer.__setitem__(name, value)
            await send(message)

        refusal = self._refusal(headers)
        if refusal is not None:
            await problem(refusal, request_id)(scope, receive, send_framed)
        else:
            await self._app(scope, _bounded(receive), send_framed)

    def _refusal(self, headers: Headers) -> Fault | None:
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > MOST_BODY_BYTES:
            return _too_large()
        if self._only_loopback and not _is_loopback(headers.get("host", "")):
            return Fault(421, "misdirected", "without tokens, only requests to a loopback host such as localhost pass")
        origin = headers.get("origin")
        if self._only_loopback and origin is not None and not _is_loopback(origin.partition("://")[2]):
            return Fault(403, "forbidden", "without tokens, pages of other origins may not ask")
        return None


def _bounded(receive: Receive) -> Receive:
    """Of a body that does not say how long it is, no more is read than may be."""
    taken = 0

    async def receive_bounded() -> Message:
        nonlocal taken
        message = await receive()
        if message["type"] == "http.request":
            taken += len(message.get("body", b""))
            if taken > MOST_BODY_BYTES:
                raise _too_large()
        return message

    return receive_bounded


def _too_large() -> Fault:
    return Fault(413, "too-large", f"the body is too large; at most {MOST_BODY_BYTES} bytes are read")


def _is_loopback(host: str) -> bool:
    """Of a Host header, or of the place of a URL: a name or an address, perhaps with a port."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or name.endswith(".localhost") or ip_address(name).is_loopback
    except ValueError:
        return False
