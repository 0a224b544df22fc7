"""HTTP port: ShouldRateLimit as JSON for clients without gRPC, and health for probes that cannot use gRPC.

/json uses the codec and the pipeline of gRPC, so it behaves the same. envoyproxy/ratelimit responds to every error with
400; here the status distinguishes client errors from server errors.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from google.protobuf import json_format
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from ratelimit_rls.core.model import Code
from ratelimit_rls.errors import TooComplex
from ratelimit_rls.h2.reasons import Reason
from ratelimit_rls.h2.status import RpcError, StatusCode
from ratelimit_rls.pipeline.batch import DelayedResponse
from ratelimit_rls.pipeline.pipeline import Pipeline
from ratelimit_rls.pipeline.throttle_queue import ThrottleQueue
from ratelimit_rls.protos.messages import POOL, RateLimitRequest, RateLimitResponse
from ratelimit_rls.telemetry.abuse import Abuse, AbuseLog
from ratelimit_rls.transport.call_budget import BUDGET_SPENT, CallBudget
from ratelimit_rls.transport.health import Health
from ratelimit_rls.transport.http.header_value import header_value
from ratelimit_rls.transport.http.json_bounds import check_json
from ratelimit_rls.transport.peers import UNIX

MAX_BODY_BYTES = 1 << 16
MAX_ERROR_CHARACTERS = 1000
"""Maximum length of a parser's error text, which may quote the body."""

_MAX_CONTENT_LENGTH_DIGITS = 18  # digits

_ANY_METHOD = ["GET", "POST", "PUT", "PATCH", "DELETE"]
"""envoyproxy/ratelimit ignores the method, too."""

_HTTP_STATUS = {
    StatusCode.INVALID_ARGUMENT: 400,
    StatusCode.RESOURCE_EXHAUSTED: 503,
    StatusCode.INTERNAL: 500,
    StatusCode.UNAVAILABLE: 503,
}


def json_app(
    pipeline: Pipeline[Any],
    throttle_queue: ThrottleQueue,
    health: Health,
    *,
    max_body_bytes: int = MAX_BODY_BYTES,
    abuse: AbuseLog | None = None,
    call_budget: CallBudget | None = None,
) -> Starlette:
    abuse_log = abuse or AbuseLog()

    async def should_rate_limit(request: Request) -> Response:
        try:
            return await respond(request)
        except asyncio.CancelledError:  # by the stopping server, after its grace period
            return PlainTextResponse("the server is stopping and cannot answer this call; try again\n", 503)

    async def respond(request: Request) -> Response:
        rejection = call_budget.spend(_peer(request)) if call_budget is not None else None
        if rejection is not None:
            abuse_log.record(rejection, _peer(request))
            return PlainTextResponse(f"{BUDGET_SPENT}\n", 503, {"Retry-After": "1", "Connection": "close"})
        try:
            body = await _read_body(request, max_body_bytes)
        except ClientDisconnect:
            return _incomplete_request()
        if body is None:
            abuse_log.record(Abuse.MESSAGE_TOO_LARGE, _peer(request))
            return PlainTextResponse(
                f"the body is too large; at most {max_body_bytes} bytes are allowed (RLS_MAX_JSON_BYTES)\n", 413
            )
        try:
            message = _parse(body)
        except TooComplex as error:
            abuse_log.record(Abuse.MESSAGE_TOO_COMPLEX, _peer(request))
            return PlainTextResponse(f"{error}\n", 400)
        except (json_format.ParseError, ValueError, RecursionError) as error:  # ValueError: not UTF-8
            return PlainTextResponse(f"not a RateLimitRequest in JSON: {_cause(error)}\n", 400)
        result = await pipeline.check(message)
        if isinstance(result, DelayedResponse):
            response = await _wait_for_slot(result, throttle_queue, request)
            return _to_http(response) if response is not None else _incomplete_request()
        if isinstance(result, RpcError):
            if result.reason is not None:
                abuse_log.record(Abuse(result.reason), _peer(request))
            return _error_to_http(result)
        return _to_http(result)

    async def healthcheck(_: Request) -> Response:
        if not health.serving:
            return PlainTextResponse(health.detail, 500)
        # The body of a healthy response is that of envoyproxy/ratelimit, so details go into a header.
        details = {"X-Ratelimit-Detail": header_value(health.detail)} if health.detail else None
        return PlainTextResponse("OK", headers=details)

    async def livez(_: Request) -> Response:
        return PlainTextResponse("OK") if health.alive else PlainTextResponse(health.detail, 500)

    return Starlette(
        routes=[
            Route("/json", should_rate_limit, methods=_ANY_METHOD),
            Route("/healthcheck", healthcheck, methods=_ANY_METHOD),
            Route("/livez", livez),
        ]
    )


async def _read_body(request: Request, max_bytes: int) -> bytes | None:
    """Return the body, or None as soon as it is known to be too large; with Content-Length, before reading anything."""
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and (len(length) > _MAX_CONTENT_LENGTH_DIGITS or int(length) > max_bytes):
        return None
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            return None
    return bytes(body)


def _parse(body: bytes) -> bytes:
    """Convert JSON to a protobuf message. Raises TooComplex, ParseError, ValueError or RecursionError."""
    check_json(body)
    message: bytes = json_format.Parse(body, RateLimitRequest(), descriptor_pool=POOL).SerializeToString()
    return message


def _cause(error: Exception) -> str:
    text = str(error)
    if "; use sys.set_int_max_str_digits() to " in text:  # Python's hint is useless for a client
        return f"a number has more than {sys.get_int_max_str_digits()} digits"
    return header_value(text[:MAX_ERROR_CHARACTERS])


def _peer(request: Request) -> str:
    return request.client.host if request.client is not None else UNIX


async def _wait_for_slot(delayed: DelayedResponse, throttle_queue: ThrottleQueue, request: Request) -> bytes | None:
    """Return the response when its time has come, or None as soon as the client disconnects."""
    waiting: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    throttle_queue.hold(waiting, delayed, asyncio.Future.set_result)
    disconnected = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait((waiting, disconnected), return_when=asyncio.FIRST_COMPLETED)
        return waiting.result() if waiting.done() else None
    finally:
        disconnected.cancel()
        throttle_queue.leave(waiting)


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _incomplete_request() -> Response:
    return PlainTextResponse("the request is incomplete\n", 400)


def _to_http(message: bytes) -> Response:
    response = RateLimitResponse.FromString(message)
    text = json_format.MessageToJson(response, indent=None, descriptor_pool=POOL)
    return Response(text, 429 if response.overall_code == Code.OVER_LIMIT else 200, media_type="application/json")


def _error_to_http(error: RpcError) -> Response:
    is_large = error.reason == Reason.MESSAGE_TOO_LARGE  # RLS_MAX_MESSAGE_BYTES is smaller than RLS_MAX_JSON_BYTES
    return PlainTextResponse(f"{error.message}\n", 413 if is_large else _HTTP_STATUS[error.code])
