"""The HTTP port: ShouldRateLimit in JSON for callers without gRPC, and health for probes that cannot ask over gRPC.

/json goes through the same door as gRPC, so it means the same. The reference answers 400 to everything that goes
wrong; here the status says whose fault it was.
"""

from __future__ import annotations

import asyncio

from google.protobuf import json_format
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from ratelimit_rls.core.model import Code
from ratelimit_rls.transport.grpc.door import Failure, FailureCode, Held
from ratelimit_rls.transport.grpc.limiter_door import MOST_MESSAGE_BYTES
from ratelimit_rls.transport.grpc.messages import POOL, RateLimitRequest, RateLimitResponse
from ratelimit_rls.transport.grpc.rls import RlsDoor
from ratelimit_rls.transport.grpc.waiting import WaitingRoom
from ratelimit_rls.transport.health import Health
from ratelimit_rls.transport.http.lines import one_line

_ANY_METHOD = ["GET", "POST", "PUT", "PATCH", "DELETE"]
"""The reference looks at the path alone."""

_HTTP_STATUS = {
    FailureCode.INVALID_ARGUMENT: 400,
    FailureCode.RESOURCE_EXHAUSTED: 503,  # not its size: that is looked at before, and no message outgrows its JSON
    FailureCode.INTERNAL: 500,
    FailureCode.UNAVAILABLE: 503,
}


def json_app(door: RlsDoor, room: WaitingRoom, health: Health) -> Starlette:
    async def should_rate_limit(request: Request) -> Response:
        try:
            return await answer_to(request)
        except asyncio.CancelledError:  # by the server, when it stops, of whom it cannot wait for any longer
            return PlainTextResponse("the server is stopping and cannot answer this call; ask again\n", 503)

    async def answer_to(request: Request) -> Response:
        try:
            body = await _body(request)
        except ClientDisconnect:
            return _cut_short()
        if body is None:
            return PlainTextResponse(f"the body is too large; at most {MOST_MESSAGE_BYTES} bytes are read\n", 413)
        try:
            message = json_format.Parse(body, RateLimitRequest(), descriptor_pool=POOL).SerializeToString()
        except (json_format.ParseError, ValueError, RecursionError) as error:  # ValueError: not UTF-8
            return PlainTextResponse(f"not a RateLimitRequest in JSON: {one_line(str(error))}\n", 400)
        answer = await door.check(message)
        if isinstance(answer, Held):
            turn = await _turn(answer, room, request)
            return _answered(turn) if turn is not None else _cut_short()
        return _failed(answer) if isinstance(answer, Failure) else _answered(answer)

    async def healthcheck(_: Request) -> Response:
        if not health.serving:
            return PlainTextResponse(health.detail, 500)
        # The body of a healthy answer is the reference's; a remark must not change it.
        remark = {"X-Ratelimit-Detail": one_line(health.detail)} if health.detail else None
        return PlainTextResponse("OK", headers=remark)

    async def livez(_: Request) -> Response:
        return PlainTextResponse("OK") if health.alive else PlainTextResponse(health.detail, 500)

    return Starlette(
        routes=[
            Route("/json", should_rate_limit, methods=_ANY_METHOD),
            Route("/healthcheck", healthcheck, methods=_ANY_METHOD),
            Route("/livez", livez),
        ]
    )


async def _body(request: Request) -> bytes | None:
    """The body, or None as soon as it is seen to be too large."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_MESSAGE_BYTES:
            return None
    return bytes(body)


async def _turn(held: Held, room: WaitingRoom, request: Request) -> bytes | None:
    """The answer when its slot has come, or None as soon as nobody waits for it any more."""
    waiting: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    room.hold(waiting, held, asyncio.Future.set_result)
    leaving = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((waiting, leaving), return_when=asyncio.FIRST_COMPLETED)
        return waiting.result() if waiting.done() else None
    finally:
        leaving.cancel()
        room.leave(waiting)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _cut_short() -> Response:
    return PlainTextResponse("the request was cut short\n", 400)


def _answered(answer: bytes) -> Response:
    response = RateLimitResponse.FromString(answer)
    text = json_format.MessageToJson(response, indent=None, descriptor_pool=POOL)
    return Response(text, 429 if response.overall_code == Code.OVER_LIMIT else 200, media_type="application/json")


def _failed(failure: Failure) -> Response:
    return PlainTextResponse(f"{failure.message}\n", _HTTP_STATUS[failure.code])
