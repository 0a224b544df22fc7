"""A middleware for ASGI applications: every HTTP request is checked before the application sees it.

    app = RateLimitMiddleware(app, client, identify=lambda scope: ("ip", scope["client"][0]))

Refusals are answered here, in JSON; the answers of the application are told how its caller stands. What becomes of
requests when the service gives no answer is the client's `on_error`.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from ratelimit_rls.client.answers import Answer
from ratelimit_rls.client.asynchronous import AsyncRateLimiterClient
from ratelimit_rls.client.calls import Dimension

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

Identify = Callable[[Scope], tuple[Dimension, str] | None]

Headers = list[tuple[bytes, bytes]]


def path_of(scope: Scope) -> str:
    """As the application is told it, without escapes: one path in many spellings is counted as one."""
    return str(scope["path"])


class RateLimitMiddleware:
    """Lifespans and WebSockets pass untouched."""

    def __init__(
        self,
        app: App,
        client: AsyncRateLimiterClient,
        identify: Identify,
        *,
        endpoint: Callable[[Scope], str] = path_of,
        cost: int | Callable[[Scope], int] = 1,
        exempt: Callable[[Scope], bool] | None = None,
        domain: str = "",
    ) -> None:
        """`identify` says who is calling; None, or an empty identifier: nobody to count it for, so that it passes. It
        must go by what a caller proves, not by what it claims. Neither is whoever `exempt` knows counted."""
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
        who = self._identify(scope)
        if who is None or not who[1]:
            await self._app(scope, receive, send)
            return
        dimension, identifier = who
        answer = await self._client.check(
            identifier,
            dimension,
            endpoint=self._endpoint(scope),
            cost=self._cost(scope) if callable(self._cost) else self._cost,
            domain=self._domain,
        )
        if answer.allowed:
            await self._app(scope, receive, _telling(send, _standing(answer)))
        else:
            await _refuse(answer, send)


def _telling(send: Send, standing: Headers) -> Send:
    """`send`, with these headers in every answer; they take the place of the application's own of the same name."""
    if not standing:
        return send
    names = {name for name, _ in standing}

    async def told(message: Message) -> None:
        if message["type"] == "http.response.start":
            kept = [header for header in message.get("headers", ()) if header[0].lower() not in names]
            message["headers"] = [*kept, *standing]
        await send(message)

    return told


def _standing(answer: Answer) -> Headers:
    if not answer.is_limited:
        return []
    # Those who read these headers take it for granted that no more than the limit is left; a burst may be.
    numbers = (answer.limit, min(answer.remaining, answer.limit), answer.reset_at)
    names = (b"x-ratelimit-limit", b"x-ratelimit-remaining", b"x-ratelimit-reset")
    return [(name, b"%d" % number) for name, number in zip(names, numbers, strict=True)]


async def _refuse(answer: Answer, send: Send) -> None:
    status = answer.http_status or HTTPStatus.TOO_MANY_REQUESTS
    body = json.dumps(_body(answer), separators=(",", ":")).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"cache-control", b"no-store"),
        *_standing(answer),
    ]
    if answer.retry_after:
        headers.append((b"retry-after", b"%d" % answer.retry_after))
    if status == HTTPStatus.UNAUTHORIZED:
        headers.append((b"www-authenticate", b"Bearer"))
    with suppress(OSError):  # how servers say that the client has left
        await send({"type": "http.response.start", "status": int(status), "headers": headers})
        await send({"type": "http.response.body", "body": body})


_MESSAGES = {
    "blocked": "this caller is blocked",
    "unauthorized": "the API key is not valid, or not any more",
    "no_answer": "the rate limiter does not answer",
    "not_understood": "the rate limiter does not understand who is calling",
}


def _body(answer: Answer) -> dict[str, Any]:
    error: dict[str, Any] = {
        "reason": answer.reason,
        "message": _MESSAGES.get(answer.reason, "too many requests"),
    }
    if answer.rule:
        error["rule"] = answer.rule
    if answer.is_limited:
        error["limit"] = answer.limit
    if answer.reset_at:
        error["reset_at"] = answer.reset_at
    if answer.retry_after:
        error["retry_after"] = answer.retry_after
    return {"error": error}
