"""The ASGI middleware with a fake client: requests it sends and responses it makes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import pytest

from ratelimit_rls.client import AsyncRateLimiterClient, CheckResult, RateLimiterError
from ratelimit_rls.client.asgi import Message, RateLimitMiddleware, Receive, Scope, Send

PASSES = CheckResult(True, current_count=1, limit=5, remaining=4, reset_at=1_800_000_000, rule="edge.user")
OVER = CheckResult(
    False,
    current_count=5,
    limit=5,
    reset_at=1_800_000_000,
    retry_after=7,
    rule="edge.user",
    reason="over_limit",
    http_status=429,
)


class FixedResult(AsyncRateLimiterClient):
    """A client with a prepared result."""

    def __init__(self, answer: CheckResult | BaseException) -> None:
        super().__init__("127.0.0.1:1")
        self.answer = answer
        self.calls: list[tuple[Any, ...]] = []

    async def check(self, identifier: str, dimension: Any = "user", **more: Any) -> CheckResult:
        self.calls.append((identifier, dimension, more))
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    own = [(b"content-type", b"text/plain"), (b"X-RateLimit-Limit", b"forged")]
    await send({"type": "http.response.start", "status": 200, "headers": own})
    await send({"type": "http.response.body", "body": b"hello"})


def by_user(scope: Scope) -> tuple[Any, str] | None:
    user = dict(scope["headers"]).get(b"x-user")
    return None if user is None else ("user", user.decode("latin-1"))


async def unheard() -> Message:
    raise AssertionError("the middleware reads no body")


async def get(app: Any, path: str = "/a", kind: str = "http", **headers: str) -> list[Message]:
    """Return the ASGI messages sent for a request."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    lines = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    await app({"type": kind, "path": path, "headers": lines}, unheard, send)
    return sent


async def test_allowed_response_gets_ratelimit_headers_and_app_cannot_override() -> None:
    client = FixedResult(PASSES)
    start, body = await get(RateLimitMiddleware(hello, client, by_user), x_user="ann")
    assert client.calls == [("ann", "user", {"endpoint": "/a", "cost": 1, "domain": ""})]
    assert (start["status"], body["body"]) == (200, b"hello")
    assert start["headers"] == [
        (b"content-type", b"text/plain"),
        (b"x-ratelimit-limit", b"5"),
        (b"x-ratelimit-remaining", b"4"),
        (b"x-ratelimit-reset", b"1800000000"),
    ]


async def test_over_limit_request_does_not_reach_the_app() -> None:
    start, body = await get(RateLimitMiddleware(hello, FixedResult(OVER), by_user), x_user="ann")
    headers = dict(start["headers"])
    assert (start["status"], headers[b"retry-after"], headers[b"x-ratelimit-remaining"]) == (429, b"7", b"0")
    assert headers[b"content-type"] == b"application/json"
    assert int(headers[b"content-length"]) == len(body["body"])
    assert json.loads(body["body"]) == {
        "error": {
            "reason": "over_limit",
            "message": "too many requests",
            "rule": "edge.user",
            "limit": 5,
            "reset_at": 1_800_000_000,
            "retry_after": 7,
        }
    }


@pytest.mark.parametrize(
    ("answer", "status", "headers", "reason"),
    [
        (CheckResult(False, reason="blocked", http_status=403, rule="edge.user"), 403, {}, "blocked"),
        (
            CheckResult(False, reason="unauthorized", http_status=401),
            401,
            {b"www-authenticate": b"Bearer"},
            "unauthorized",
        ),
        (
            CheckResult(False, reason="no_answer", http_status=503, retry_after=1),
            503,
            {b"retry-after": b"1"},
            "no_answer",
        ),
        (CheckResult(False, reason="new in a later version"), 429, {}, "new in a later version"),
    ],
)
async def test_other_denials_have_their_own_status_and_reason(
    answer: CheckResult, status: int, headers: dict[bytes, bytes], reason: str
) -> None:
    start, body = await get(RateLimitMiddleware(hello, FixedResult(answer), by_user), x_user="ann")
    result = dict(start["headers"])
    assert start["status"] == status
    assert {name: result.get(name) for name in (b"www-authenticate", b"retry-after") if name in result} == headers
    assert json.loads(body["body"])["error"]["reason"] == reason
    assert b"x-ratelimit-limit" not in result


async def test_response_is_unchanged_if_no_limit_applied() -> None:
    start, _ = await get(RateLimitMiddleware(hello, FixedResult(CheckResult(True)), by_user), x_user="ann")
    assert (b"X-RateLimit-Limit", b"forged") in start["headers"]


@pytest.mark.parametrize("kind", ["lifespan", "websocket"])
async def test_lifespan_and_websocket_scopes_pass_through(kind: str) -> None:
    client, seen = FixedResult(OVER), []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append((receive is unheard, scope["type"]))

    await get(RateLimitMiddleware(app, client, by_user), kind=kind, x_user="ann")
    assert (seen, client.calls) == ([(True, kind)], [])


async def test_unidentified_and_exempt_requests_are_not_checked() -> None:
    client = FixedResult(OVER)
    app = RateLimitMiddleware(hello, client, by_user, exempt=lambda scope: scope["path"] == "/healthz")
    for path, headers in (("/a", {}), ("/a", {"x_user": ""}), ("/healthz", {"x_user": "ann"})):
        assert (await get(app, path, **headers))[0]["status"] == 200
    assert client.calls == []


async def test_endpoint_cost_and_domain_are_configurable() -> None:
    client = FixedResult(PASSES)
    app = RateLimitMiddleware(
        hello,
        client,
        lambda scope: ("ip", "192.0.2.1"),
        endpoint=lambda scope: "/all",
        cost=lambda scope: 9 if scope["path"] == "/export" else 1,
        domain="shop",
    )
    await get(app, "/export")
    assert client.calls == [("192.0.2.1", "ip", {"endpoint": "/all", "cost": 9, "domain": "shop"})]


@pytest.mark.parametrize("fault", [RateLimiterError(grpc.StatusCode.UNAVAILABLE, "away"), asyncio.CancelledError()])
async def test_client_errors_propagate_to_the_server(fault: BaseException) -> None:
    with pytest.raises(type(fault)):
        await get(RateLimitMiddleware(hello, FixedResult(fault), by_user), x_user="ann")


async def test_disconnect_before_the_denial_is_ignored() -> None:
    async def send_to_closed(message: Message) -> None:
        raise OSError("the client has left")

    scope: Scope = {"type": "http", "path": "/", "headers": [(b"x-user", b"ann")]}
    await RateLimitMiddleware(hello, FixedResult(OVER), by_user)(scope, unheard, send_to_closed)
