"""ResetLimit: an administrator has what was counted for a caller forgotten. Asked rarely, so an ordinary method."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, Protocol

import grpc
from grpc import aio

from ratelimit_rls.core.model import Request
from ratelimit_rls.errors import BadRequest, NotReady, RecordsError, StoreError
from ratelimit_rls.service import RateLimiter
from ratelimit_rls.transport.grpc.limiter_read import Reader, parse
from ratelimit_rls.transport.grpc.messages import RESET_LIMIT, ResetRequest, ResetResponse

BEARER = "bearer "

LONGEST_TOKEN = 512
"""Characters, as in the admin API: what is longer is nobody's, and is not looked at."""

_log = logging.getLogger(__name__)


class Administrator(NamedTuple):
    name: str  # as records have it
    may_write: bool


class Administration(Protocol):
    """What stands behind an administrator's method."""

    async def administrator(self, token: str) -> Administrator | None:
        """Whose token it is; None: nobody's, or not any more. Raises RecordsError if that cannot be found out."""
        ...

    async def was_reset(self, who: Administrator, request: Request, counters: int) -> None:
        """To be recorded: it has happened."""
        ...


class Counters(Protocol):
    async def forget(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """Drop the states under these keys; returns those that had one. Raises StoreError."""
        ...


class _Refused(Exception):
    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class ResetLimit:
    def __init__(
        self, limiter: RateLimiter, counters: Counters, reader: Reader, administration: Administration | None
    ) -> None:
        """Without `administration` nobody may reset anything."""
        self._limiter = limiter
        self._counters = counters
        self._reader = reader
        self._administration = administration

    def attach(self, server: aio.Server) -> None:
        server.add_generic_rpc_handlers((_Handler(self._answer),))

    async def _answer(self, message: bytes, context: aio.ServicerContext[bytes, bytes]) -> bytes:
        try:
            return await self._reset(message, context)
        except _Refused as refusal:
            code, words = refusal.code, str(refusal)
        except BadRequest as fault:
            code, words = grpc.StatusCode.INVALID_ARGUMENT, str(fault)
        except (NotReady, StoreError, RecordsError) as fault:
            code, words = grpc.StatusCode.UNAVAILABLE, str(fault)
        except Exception as fault:
            _log.error("ResetLimit failed unexpectedly", exc_info=fault)
            code, words = grpc.StatusCode.INTERNAL, "internal error"
        return await context.abort(code, words)

    async def _reset(self, message: bytes, context: aio.ServicerContext[bytes, bytes]) -> bytes:
        if self._administration is None:
            raise _Refused(
                grpc.StatusCode.UNIMPLEMENTED,
                "counters are reset by administrators, and this service has none: set RLS_DATABASE_URL",
            )
        who = await self._permitted(self._administration, context)
        loaded = self._limiter.rules
        if loaded is None:
            raise NotReady("no rate limit configuration loaded")
        asked = self._reader.asked(parse(ResetRequest, message), loaded.tree)
        if asked.refusal is not None:
            raise BadRequest(f"{asked.refusal.message}: name it by its public id")
        request = _whatever_holds(asked.own_request(loaded.tree))
        keys = self._limiter.plan(request).keys
        forgotten = len(await self._counters.forget(keys)) if keys else 0
        await self._administration.was_reset(who, request, forgotten)
        return bytes(ResetResponse(counters=forgotten).SerializeToString())

    async def _permitted(
        self, administration: Administration, context: aio.ServicerContext[bytes, bytes]
    ) -> Administrator:
        token = _token(context.invocation_metadata() or ())
        who = await administration.administrator(token) if token else None
        if who is None:
            raise _Refused(
                grpc.StatusCode.UNAUTHENTICATED,
                "send an administrator's token as metadata: authorization: Bearer rla_…"
                if not token
                else "the token is not valid, or not any more",
            )
        if not who.may_write:
            raise _Refused(grpc.StatusCode.PERMISSION_DENIED, "the token may read; counters are reset with role write")
        return who


def _whatever_holds(request: Request) -> Request:
    """Of those who are blocked, too: nothing is asked of a blocked caller's limits, but what it is given back is."""
    return request._replace(descriptors=tuple([one._replace(is_refund=True) for one in request.descriptors]))


def _token(metadata: Any) -> str:
    for name, value in metadata:
        if name == "authorization" and isinstance(value, str) and value[: len(BEARER)].lower() == BEARER:
            token = value[len(BEARER) :].strip(" ")
            return token if len(token) <= LONGEST_TOKEN else ""
    return ""


class _Handler(grpc.GenericRpcHandler):
    """The method, with bytes for messages."""

    def __init__(self, answer: Callable[[bytes, Any], Awaitable[bytes]]) -> None:
        self._answer: grpc.RpcMethodHandler[Any, Any] = grpc.unary_unary_rpc_method_handler(answer)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        return self._answer if handler_call_details.method == RESET_LIMIT else None
