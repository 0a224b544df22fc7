"""ResetLimit: the method with which an administrator resets the counters of a caller.

It is called rarely, so grpc.aio serves it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import grpc
import structlog
from grpc import aio

from ratelimit_rls.api.limiter.decode import LimiterDecoder, parse
from ratelimit_rls.core.client_ip import canonical
from ratelimit_rls.core.model import Request
from ratelimit_rls.core.refund import as_refund
from ratelimit_rls.errors import (
    BadRequest,
    DatabaseError,
    DatabaseUnavailable,
    NotReady,
    PermissionDenied,
    RateLimitRlsError,
    StoreError,
    TooManyRequests,
    Unauthenticated,
    one_line,
)
from ratelimit_rls.pipeline.limiter import RateLimiter
from ratelimit_rls.pipeline.request_id import request_id_from_metadata
from ratelimit_rls.protos.messages import RESET_LIMIT, ResetRequest, ResetResponse
from ratelimit_rls.transport.grpc.call_proxy import PEER_METADATA
from ratelimit_rls.transport.peers import UNIX

if TYPE_CHECKING:
    from ratelimit_rls.database.repository import Actor

BEARER = "bearer "

MAX_TOKEN_LENGTH = 512
"""Characters. A longer token cannot be valid, and is not looked up."""

MAX_CONCURRENT_CALLS = 64
"""Cancelled calls run to completion, so the limit on streams does not bound them."""

REQUEST_ID = "x-request-id"

_NO_DATABASE = "only administrators can reset counters, and they need a database: set RLS_DATABASE_URL"

_STATUS: dict[type[RateLimitRlsError], grpc.StatusCode] = {
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    TooManyRequests: grpc.StatusCode.RESOURCE_EXHAUSTED,
    BadRequest: grpc.StatusCode.INVALID_ARGUMENT,
    NotReady: grpc.StatusCode.UNAVAILABLE,
    StoreError: grpc.StatusCode.UNAVAILABLE,
}

_log = structlog.get_logger()


class AdminCall(NamedTuple):
    """Credentials and origin of an administrator's call."""

    token: str
    address: str = ""  # of the peer; "unix" for a Unix socket, empty if unknown
    request_id: str = ""


class Administration(Protocol):
    """Authenticates administrators, and carries out and audits their resets."""

    async def admit(self, call: AdminCall) -> Actor:
        """Return the administrator who calls.

        Raises Unauthenticated, PermissionDenied or TooManyRequests; DatabaseError if the token cannot be checked.
        """
        ...

    async def reset(self, actor: Actor, request: Request, keys: Sequence[bytes]) -> int:
        """Reset the counters of `request`, which have these keys, and return how many were in use.

        Raises DatabaseError if no audit entry can be written; nothing was reset then. Raises StoreError.
        """
        ...


class ResetLimit:
    """Implementation of the method."""

    def __init__(self, limiter: RateLimiter, decoder: LimiterDecoder, administration: Administration | None) -> None:
        """Create the method. Without `administration`, every call is rejected."""
        self._limiter = limiter
        self._decoder = decoder
        self._administration = administration
        self._calls: set[asyncio.Task[bytes]] = set()

    def attach(self, server: aio.Server) -> None:
        server.add_generic_rpc_handlers((_ResetLimitHandler(self._serve),))

    async def _serve(self, message: bytes, context: aio.ServicerContext[bytes, bytes]) -> bytes:
        administration = self._administration
        if administration is None:
            return await context.abort(grpc.StatusCode.UNIMPLEMENTED, _NO_DATABASE)
        try:
            return await self._run_to_completion(message, _admin_call(context), administration)
        except tuple(_STATUS) as error:
            code, text = next(code for kind, code in _STATUS.items() if isinstance(error, kind)), str(error)
        except DatabaseError as error:
            code, text = grpc.StatusCode.UNAVAILABLE, _database_error_message(error)
        except Exception as error:
            _log.error("reset_limit_failed", exc_info=error)
            code, text = grpc.StatusCode.INTERNAL, "internal error"
        return await context.abort(code, text)

    async def _run_to_completion(self, message: bytes, call: AdminCall, administration: Administration) -> bytes:
        """Run `_reset`, and let it finish even if the client cancels the call.

        Otherwise a failed login would not be counted, and a reset could have its audit entry only.
        """
        if len(self._calls) >= MAX_CONCURRENT_CALLS:
            raise TooManyRequests(f"{MAX_CONCURRENT_CALLS} administrator calls are in progress; try again", 1)
        task = asyncio.get_running_loop().create_task(self._reset(message, call, administration))
        self._calls.add(task)
        task.add_done_callback(self._on_done)
        return await asyncio.shield(task)

    def _on_done(self, task: asyncio.Task[bytes]) -> None:
        self._calls.discard(task)
        if not task.cancelled():
            task.exception()  # mark as retrieved: the call may have been cancelled

    async def _reset(self, message: bytes, call: AdminCall, administration: Administration) -> bytes:
        if not call.token:
            raise Unauthenticated(
                "this method needs an administrator's token in the metadata: authorization: Bearer rla_…",
                is_missing=True,
            )
        actor = await administration.admit(call)
        loaded = self._limiter.rules
        if loaded is None:
            raise NotReady("no rate limit configuration loaded")
        target = self._decoder.target(parse(ResetRequest, message), loaded.tree)
        if target.rejection is not None:
            raise BadRequest(f"{target.rejection.message}: use its public id instead")
        request = as_refund(target.subject_request(loaded.tree))
        deleted = await administration.reset(actor, request, self._limiter.plan(request).keys)
        return bytes(ResetResponse(counters=deleted).SerializeToString())


def _database_error_message(error: DatabaseError) -> str:
    """Log the error and return a text for the client, without the database's address and message."""
    if not isinstance(error, DatabaseUnavailable):
        _log.error("reset_limit_database_error", error=one_line(str(error)))
    return "the database is unavailable; nothing was reset"


def _admin_call(context: aio.ServicerContext[bytes, bytes]) -> AdminCall:
    metadata = context.invocation_metadata() or ()
    request_id = request_id_from_metadata(metadata, REQUEST_ID) or b""
    proxied_peer = request_id_from_metadata(metadata, PEER_METADATA)
    address = UNIX if proxied_peer is None else _proxied_address(proxied_peer.decode())
    return AdminCall(_token(metadata), address, request_id.decode(errors="replace"))


def _proxied_address(peer: str) -> str:
    return peer if peer == UNIX else canonical(peer) or ""


def _token(metadata: Any) -> str:
    for name, value in metadata:
        if name == "authorization" and isinstance(value, str) and value[: len(BEARER)].lower() == BEARER:
            token = value[len(BEARER) :].strip(" ")
            return token if len(token) <= MAX_TOKEN_LENGTH else ""
    return ""


class _ResetLimitHandler(grpc.GenericRpcHandler):
    """Serves the method with raw bytes as messages."""

    def __init__(self, serve: Callable[[bytes, Any], Awaitable[bytes]]) -> None:
        self._serve: grpc.RpcMethodHandler[Any, Any] = grpc.unary_unary_rpc_method_handler(serve)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        return self._serve if handler_call_details.method == RESET_LIMIT else None
