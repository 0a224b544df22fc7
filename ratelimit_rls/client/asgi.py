"""ASGI middleware that checks every HTTP request before it reaches the application.

    app = RateLimitMiddleware(app, client, identify=lambda scope: ("ip", scope["client"][0]))

Denied requests get a JSON response from the middleware; responses of the application get X-RateLimit-* headers. If the
service does not respond, `on_error` of the client decides.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from ratelimit_rls.client.aio import AsyncRateLimiterClient
from ratelimit_rls.client.methods import Dimension
from ratelimit_rls.client.results import CheckResult

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

Identify = Callable[[Scope], tuple[Dimension, str] | None]

Headers = list[tuple[bytes, bytes]]


def request_path(scope: Scope) -> str:
    """Return the decoded path, so that all percent-encoded spellings of a path share a counter."""
    return str(scope["path"])


class RateLimitMiddleware:
    """Rate limits the HTTP requests of an ASGI application. Lifespan and WebSocket scopes are passed through."""

    def __init__(
        self,
        app: App,
        client: AsyncRateLimiterClient,
        identify: Identify,
        *,
        endpoint: Callable[[Scope], str] = request_path,
        cost: int | Callable[[Scope], int] = 1,
        exempt: Callable[[Scope], bool] | None = None,
        domain: str = "",
    ) -> None:
        """Wrap `app`.

        `identify` returns the dimension and identifier of the caller. If it returns None or an empty identifier, the
        request is passed through without counting. It must rely on authenticated properties, not on claims of the
        caller. Requests for which `exempt` returns True are not counted either.
        """
        self._app = app
        self._client = client
        self._identify = identify
        self._endpoint = endpoint
        self._cost = cost
        self._exempt = exempt
        self._domain = domain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (self._exempt is not None and self._exempt(scope)):
            await self._app(scope, receive, send)
            return
        identity = self._identify(scope)
        if identity is None or not identity[1]:
            await self._app(scope, receive, send)
            return
        dimension, identifier = identity
        result = await self._client.check(
            identifier,
            dimension,
            endpoint=self._endpoint(scope),
            cost=self._cost(scope) if callable(self._cost) else self._cost,
            domain=self._domain,
        )
        if result.allowed:
            await self._app(scope, receive, _with_headers(send, _ratelimit_headers(result)))
        else:
            await _send_denial(result, send)


def _with_headers(send: Send, headers: Headers) -> Send:
    """Wrap `send` to add headers to the response; they replace headers of the same name set by the application."""
    if not headers:
        return send
    names = {name for name, _ in headers}

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            kept = [header for header in message.get("headers", ()) if header[0].lower() not in names]
            message["headers"] = [*kept, *headers]
        await send(message)

    return send_with_headers


def _ratelimit_headers(result: CheckResult) -> Headers:
    if not result.is_limited:
        return []
    # Clients assume that remaining ≤ limit, but with a burst it can be more.
    numbers = (result.limit, min(result.remaining, result.limit), result.reset_at)
    names = (b"x-ratelimit-limit", b"x-ratelimit-remaining", b"x-ratelimit-reset")
    return [(name, b"%d" % number) for name, number in zip(names, numbers, strict=True)]


async def _send_denial(result: CheckResult, send: Send) -> None:
    status = result.http_status or HTTPStatus.TOO_MANY_REQUESTS
    body = json.dumps(_body(result), separators=(",", ":")).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"cache-control", b"no-store"),
        *_ratelimit_headers(result),
    ]
    if result.retry_after:
        headers.append((b"retry-after", b"%d" % result.retry_after))
    if status == HTTPStatus.UNAUTHORIZED:
        headers.append((b"www-authenticate", b"Bearer"))
    with suppress(OSError):  # ASGI servers raise it when the client has disconnected
        await send({"type": "http.response.start", "status": int(status), "headers": headers})
        await send({"type": "http.response.body", "body": body})


_MESSAGES = {
    "blocked": "the caller is blocked",
    "unauthorized": "the API key is invalid, expired or revoked",
    "no_answer": "the rate limiter does not respond",
    "not_understood": "the rate limiter rejected the identity of the caller",
}


def _body(result: CheckResult) -> dict[str, Any]:
    error: dict[str, Any] = {
        "reason": result.reason,
        "message": _MESSAGES.get(result.reason, "too many requests"),
    }
    if result.rule:
        error["rule"] = result.rule
    if result.is_limited:
        error["limit"] = result.limit
    if result.reset_at:
        error["reset_at"] = result.reset_at
    if result.retry_after:
        error["retry_after"] = result.retry_after
    return {"error": error}
