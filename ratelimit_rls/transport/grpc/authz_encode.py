"""Decision ─► CheckResponse, joined from pieces that come again and again.

    allowed   status OK          ok_response{headers, headers_to_remove, response_headers_to_add}    dynamic_metadata
    refused   status exhausted   denied_response{status, headers, body}                              dynamic_metadata

Every header takes the place of one of its name, so that neither a client nor an upstream can say it first.
"""

from __future__ import annotations

import json
import math
from functools import lru_cache
from time import time
from typing import Any, NamedTuple

from ratelimit_rls.core.attributes import AttributeMapping
from ratelimit_rls.core.identity import Identity
from ratelimit_rls.core.model import Code, Decision, Refusal
from ratelimit_rls.core.plan import per_outline
from ratelimit_rls.transport.answers import AnswerOptions, Answers
from ratelimit_rls.transport.answers.tell import REFUSED
from ratelimit_rls.transport.answers.words import printable
from ratelimit_rls.transport.grpc.encode import varint
from ratelimit_rls.transport.grpc.messages import CheckResponse
from ratelimit_rls.transport.metadata import has_metadata, merged, struct

RULE_HEADER = "X-RateLimit-Rule"
"""The one response header that the upstream is told, too: which rule let the request through."""

IDENTITY_HEADERS = ("x-ratelimit-user", "x-ratelimit-tier", "x-ratelimit-org", "x-ratelimit-api-key")
ADDRESS_HEADER = "x-ratelimit-ip"
CALLER_HEADERS = (*IDENTITY_HEADERS, ADDRESS_HEADER)
"""What the upstream is told of a caller who was asked to prove who it is. Each is set or taken away: none is forged."""

MOST_CALLERS = 20_000
"""Of whom it is remembered how they are told of: 10 MiB, where there are so many."""

PERMISSION_DENIED = 7
UNAUTHENTICATED = 16
RESOURCE_EXHAUSTED = 8
"""What a gRPC caller behind Envoy is told in place of an HTTP status. Left to itself, Envoy says UNAVAILABLE for a 429,
which clients take for an invitation to try again at once."""

_OVERWRITE = 2  # HeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD

# A field's tag is its number times 8, plus 2 for bytes of a given length.
_DENIED_RESPONSE = bytes((2 << 3 | 2,))
_OK_RESPONSE = bytes((3 << 3 | 2,))
_DYNAMIC_METADATA = bytes((4 << 3 | 2,))
_HEADERS = bytes((2 << 3 | 2,))  # of both
_OK_HEADERS_TO_REMOVE = bytes((5 << 3 | 2,))
_OK_RESPONSE_HEADERS = bytes((6 << 3 | 2,))
_DENIED_BODY = bytes((3 << 3 | 2,))
_OPTION_HEADER = bytes((1 << 3 | 2,))  # of a HeaderValueOption
_APPEND_ACTION = bytes((3 << 3, _OVERWRITE))
_PAIR_KEY = bytes((1 << 3 | 2,))  # of a HeaderValue
_PAIR_VALUE = bytes((2 << 3 | 2,))


class Asked(NamedTuple):
    """What the wording of an answer depends on besides the decision."""

    mapping: AttributeMapping | None  # None: the domain has none
    request_id: str = ""  # a body may repeat it
    is_grpc: bool = False  # the request that Envoy asks about
    caller: Identity | None = None  # None: nobody is asked to prove anything
    address: str = ""  # of the caller, if it is to be told
    hidden: tuple[str, ...] = ()  # headers that the upstream is not shown


class AuthzEncoder:
    def __init__(self, options: AnswerOptions) -> None:
        self._answers = Answers(options)
        self._has_metadata = per_outline(has_metadata)

    def encode(self, decision: Decision, asked: Asked) -> bytes:
        if decision.outline.refusal is not None and decision.code is Code.OVER_LIMIT:
            return _turned_away(decision.outline.refusal, asked)
        headers, body, status = self._answers.tell(decision, asked.request_id)
        if decision.code is Code.OVER_LIMIT:
            parts = [_http_status(status)]
            parts += [_header(_HEADERS, name, value) for name, value in headers]
            if asked.is_grpc:
                parts.append(_GRPC_STATUS)
            if body:
                parts.append(_field(_DENIED_BODY, body))
            return _REFUSED + _field(_DENIED_RESPONSE, b"".join(parts)) + self._metadata(decision)
        parts = [_header(_OK_RESPONSE_HEADERS, name, value) for name, value in headers]
        parts += self._upstream(decision, headers, asked)
        return _ALLOWED + _field(_OK_RESPONSE, b"".join(parts)) + self._metadata(decision)

    def _upstream(self, decision: Decision, told: tuple[tuple[str, str], ...], asked: Asked) -> list[bytes]:
        """What the upstream is told. Where there is nothing to tell, what a client wrote there is taken away."""
        parts = [_header(_HEADERS, name, value) for name, value in told if name == RULE_HEADER]
        if not parts:
            parts.append(_removed(RULE_HEADER))
        if asked.caller is not None:
            parts.append(_told_of(asked.caller, asked.hidden))
            parts.append(_address(asked.address))
        mapping = asked.mapping
        if mapping is not None and mapping.upstream_headers:
            holes = self._answers.holes(decision)
            for name, template in mapping.upstream_headers:
                if holes is None:
                    parts.append(_removed(name))
                else:
                    parts.append(_header(_HEADERS, name, printable(template.render(holes))))
        return parts

    def _metadata(self, decision: Decision) -> bytes:
        """Which rule fired, and what the rules that let it pass say of themselves."""
        fired = self._answers.fired(decision)
        said = b"".join([_words(key, tuple(words.items())) for key, words in fired.items()])
        if self._has_metadata(decision.outline) and (metadata := merged(decision)):
            said += struct({"metadata": metadata})
        return _field(_DYNAMIC_METADATA, said) if said else b""


@lru_cache(MOST_CALLERS)
def _told_of(caller: Identity, hidden: tuple[str, ...]) -> bytes:
    """Of one caller, who calls again and again."""
    told = zip(IDENTITY_HEADERS, caller, strict=True)
    return b"".join([*[_told_or_removed(name, value) for name, value in told], *map(_removed, hidden)])


@lru_cache(8192)
def _address(address: str) -> bytes:
    return _told_or_removed(ADDRESS_HEADER, address)


def _told_or_removed(name: str, value: str) -> bytes:
    return _own_header(_HEADERS, name, printable(value)) if value else _removed(name)


def _field(tag: bytes, value: bytes) -> bytes:
    return tag + varint(len(value)) + value


@lru_cache(4096)
def _words(key: str, words: tuple[tuple[str, Any], ...]) -> bytes:
    return struct({key: dict(words)})


def _turned_away(refusal: Refusal, asked: Asked) -> bytes:
    """Of a caller that no limit refused: it is blocked, or does not prove who it is."""
    if refusal.status == REFUSED:
        code = RESOURCE_EXHAUSTED
    else:
        code = UNAUTHENTICATED if refusal.reason == "unauthorized" else PERMISSION_DENIED
    parts = [_http_status(refusal.status), _header(_HEADERS, "content-type", "application/json")]
    if refusal.reason == "unauthorized":
        parts.append(_header(_HEADERS, "www-authenticate", "Bearer"))
    if refusal.until_s is not None:
        left_s = max(1, math.ceil(refusal.until_s - time()))
        parts.append(_own_header(_HEADERS, "retry-after", str(left_s)))
    if asked.is_grpc:
        parts.append(_header(_HEADERS, "grpc-status", str(code)))
    error: dict[str, Any] = {"code": refusal.status, "message": refusal.message}
    body = json.dumps({"error": error} | ({"request_id": asked.request_id} if asked.request_id else {}))
    parts.append(_field(_DENIED_BODY, body.encode()))
    said = _words("rule", (("refused", refusal.reason),))
    return _status(code, refusal.message) + _field(_DENIED_RESPONSE, b"".join(parts)) + _field(_DYNAMIC_METADATA, said)


@lru_cache(4096)
def _header(tag: bytes, name: str, value: str) -> bytes:
    """Few are new: they hold numbers and what the rules say, and nothing of the request."""
    return _own_header(tag, name, value)


def _own_header(tag: bytes, name: str, value: str) -> bytes:
    """One that belongs to a request or a moment: to remember it would drive out those that come again."""
    written = value.encode()
    return _before_value(tag, name, len(written)) + written + _APPEND_ACTION


@lru_cache(4096)
def _before_value(tag: bytes, name: str, value_bytes: int) -> bytes:
    """All of a header that stands before its value, which depends on nothing of the value but its length."""
    key = name.lower().encode()
    pair = _field(_PAIR_KEY, key) + _PAIR_VALUE + varint(value_bytes)
    option = _OPTION_HEADER + varint(len(pair) + value_bytes) + pair
    return tag + varint(len(option) + value_bytes + len(_APPEND_ACTION)) + option


@lru_cache(256)
def _removed(name: str) -> bytes:
    return _field(_OK_HEADERS_TO_REMOVE, name.lower().encode())


@lru_cache(256)
def _http_status(status: int) -> bytes:
    response = CheckResponse()
    response.denied_response.status.code = status
    return bytes(response.denied_response.SerializeToString())


@lru_cache(16)
def _status(code: int, message: str) -> bytes:
    response = CheckResponse()
    response.status.SetInParent()  # Envoy takes an answer without a status for OK; other readers need not
    response.status.code, response.status.message = code, message
    return bytes(response.SerializeToString())


_ALLOWED = _status(0, "")
_REFUSED = _status(RESOURCE_EXHAUSTED, "over limit")
_GRPC_STATUS = _header(_HEADERS, "grpc-status", str(RESOURCE_EXHAUSTED))
