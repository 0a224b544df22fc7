"""ResetLimit: an administrator has what was counted for a caller forgotten. Asked rarely, so an ordinary method."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol
from urllib.parse import unquote

import grpc
from grpc import aio

from ratelimit_rls.core.client_ip import canonical
from ratelimit_rls.core.model import Request
from ratelimit_rls.errors import BadRequest, NotReady, RecordsError, RecordsUnavailable, StoreError, one_line
from ratelimit_rls.service import RateLimiter
from ratelimit_rls.transport.grpc.limiter_read import Reader, parse
from ratelimit_rls.transport.grpc.messages import RESET_LIMIT, ResetRequest, ResetResponse
from ratelimit_rls.transport.grpc.request_id import sent_along

BEARER = "bearer "

LONGEST_TOKEN = 512
"""Characters: what is longer is nobody's, and is not looked at."""

REQUEST_ID = "x-request-id"

_log = logging.getLogger(__name__)


class Asking(NamedTuple):
    """How an administrator's call came."""

    token: str
    address: str = ""  # empty: behind the native transport, or TLS, it is not known here
    request_id: str = ""


class Administrator(NamedTuple):
    """Who may reset, as records have them."""

    name: str
    token_id: str = ""


class Why(Enum):
    NOBODY = grpc.StatusCode.UNAUTHENTICATED
    FORBIDDEN = grpc.StatusCode.PERMISSION_DENIED
    TOO_MANY = grpc.StatusCode.RESOURCE_EXHAUSTED
    NO_ADMINISTRATORS = grpc.StatusCode.UNIMPLEMENTED


class NotAdmitted(Exception):
    """An administrator's call is not let in; the message says what would help."""

    def __init__(self, why: Why, message: str) -> None:
        super().__init__(message)
        self.why = why


Forget = Callable[[], Awaitable[int]]
"""Does it, and says how many counters there were."""


class Administration(Protocol):
    """What stands behind an administrator's method."""

    async def admit(self, asking: Asking) -> Administrator:
        """Whoever may reset. Raises NotAdmitted, or RecordsError if that cannot be found out."""
        ...

    async def reset(self, who: Administrator, asking: Asking, request: Request, forget: Forget) -> int:
        """What `forget` says, with a record of it, and not at all if there can be none. Raises RecordsError."""
        ...


class Counters(Protocol):
    async def forget(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """Drop the states under these keys; returns those that had one. Raises StoreError."""
        ...


class _Unrecorded(RecordsError):
    """Counters were forgotten, and then the record of it could not be kept."""


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
        except NotAdmitted as refusal:
            code, words = refusal.why.value, str(refusal)
        except BadRequest as fault:
            code, words = grpc.StatusCode.INVALID_ARGUMENT, str(fault)
        except (NotReady, StoreError) as fault:
            code, words = grpc.StatusCode.UNAVAILABLE, str(fault)
        except RecordsError as fault:
            code, words = grpc.StatusCode.UNAVAILABLE, _without_records(fault)
        except Exception as fault:
            _log.error("ResetLimit failed unexpectedly", exc_info=fault)
            code, words = grpc.StatusCode.INTERNAL, "internal error"
        return await context.abort(code, words)

    async def _reset(self, message: bytes, context: aio.ServicerContext[bytes, bytes]) -> bytes:
        administration = self._administration
        if administration is None:
            raise NotAdmitted(
                Why.NO_ADMINISTRATORS,
                "counters are reset by administrators, and this service has none: set RLS_DATABASE_URL",
            )
        asking = _asking(context)
        if not asking.token:
            raise NotAdmitted(Why.NOBODY, "send an administrator's token as metadata: authorization: Bearer rla_…")
        who = await administration.admit(asking)
        loaded = self._limiter.rules
        if loaded is None:
            raise NotReady("no rate limit configuration loaded")
        asked = self._reader.asked(parse(ResetRequest, message), loaded.tree)
        if asked.refusal is not None:
            raise BadRequest(f"{asked.refusal.message}: name it by its public id")
        request = _whatever_holds(asked.own_request(loaded.tree))
        keys = self._limiter.plan(request).keys
        forgotten = 0

        async def forget() -> int:
            nonlocal forgotten
            forgotten = len(await self._counters.forget(keys)) if keys else 0
            return forgotten

        try:
            await administration.reset(who, asking, request, forget)
        except RecordsError as fault:
            if not forgotten:
                raise
            raise _Unrecorded(str(fault)) from None
        return bytes(ResetResponse(counters=forgotten).SerializeToString())


def _whatever_holds(request: Request) -> Request:
    """Of those who are blocked, too: nothing is asked of a blocked caller's limits, but what it is given back is."""
    return request._replace(descriptors=tuple([one._replace(is_refund=True) for one in request.descriptors]))


def _without_records(fault: RecordsError) -> str:
    """Where the database is, and what it said, is for the log alone."""
    if isinstance(fault, _Unrecorded) or not isinstance(fault, RecordsUnavailable):
        _log.error("ResetLimit and the database: %s", one_line(str(fault)))
    if isinstance(fault, _Unrecorded):
        return "the counters were reset, but the database is away and has no record of it"
    return "the database is away; nothing was reset"


def _asking(context: aio.ServicerContext[bytes, bytes]) -> Asking:
    metadata = context.invocation_metadata() or ()
    request_id = sent_along(metadata, REQUEST_ID) or b""
    return Asking(_token(metadata), _address(context.peer()), request_id.decode(errors="replace"))


def _address(peer: str) -> str:
    """Of `ipv4:192.0.2.1:1234` or `ipv6:%5B2001:db8::1%5D:1234`; of a Unix socket there is none."""
    kind, _, place = peer.partition(":")
    return (canonical(unquote(place)) or "") if kind in ("ipv4", "ipv6") else ""


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
