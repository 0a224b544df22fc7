"""Encoder: Decision ─► CheckResponse, joined from cached parts.

    allowed   status OK          ok_response{headers, headers_to_remove, response_headers_to_add}    dynamic_metadata
    denied    status exhausted   denied_response{status, headers, body}                              dynamic_metadata

Every header replaces an existing one of the same name, so that neither a client nor an upstream can forge it.
"""

from __future__ import annotations

import json
import math
from functools import lru_cache
from time import time
from typing import Any, NamedTuple

from ratelimit_rls.api.responses import ResponseBuilder, ResponseOptions
from ratelimit_rls.api.responses.builder import DENIED_STATUS
from ratelimit_rls.api.responses.dynamic_metadata import encode_struct, has_metadata, merge_rule_metadata
from ratelimit_rls.api.responses.formatting import printable
from ratelimit_rls.api.rls.encode import varint
from ratelimit_rls.core.attributes import AttributeMapping
from ratelimit_rls.core.identity import Identity
from ratelimit_rls.core.model import Code, Decision, Rejection
from ratelimit_rls.core.names import encode_header_value
from ratelimit_rls.core.plan import per_template
from ratelimit_rls.protos.messages import CheckResponse

RULE_HEADER = "X-RateLimit-Rule"
"""The only response header that is sent to the upstream, too: the rule that allowed the request."""

IDENTITY_HEADERS = ("x-ratelimit-user", "x-ratelimit-tier", "x-ratelimit-org", "x-ratelimit-api-key")
ADDRESS_HEADER = "x-ratelimit-ip"
CALLER_HEADERS = (*IDENTITY_HEADERS, ADDRESS_HEADER)
"""Headers for the upstream about an authenticated caller. Each is either set or removed, so that none can be forged."""

MAX_CACHED_IDENTITIES = 20_000
"""Identities whose encoded headers are cached: at most 10 MiB."""

INVALID_ARGUMENT = 3
MAX_HYPHENS = 4
"""Hyphens of a header name, from the left, whose spellings with underscores are removed: at most 15 names."""

PERMISSION_DENIED = 7
UNAUTHENTICATED = 16
RESOURCE_EXHAUSTED = 8
"""gRPC status that a gRPC client behind Envoy receives instead of an HTTP status. Envoy alone would send UNAVAILABLE
for a 429, which clients retry at once."""

_STATUS_CODES = {"blocked": PERMISSION_DENIED, "unauthorized": UNAUTHENTICATED, "malformed": INVALID_ARGUMENT}

_OVERWRITE = 2  # HeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD

# The tag of a field is its number times 8, plus 2 for length-delimited bytes.
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


class CheckContext(NamedTuple):
    """Properties of the checked request that the response depends on, besides the decision."""

    mapping: AttributeMapping | None  # None: the domain has none
    request_id: str = ""  # may be repeated in a body
    is_grpc: bool = False  # the checked request is a gRPC call
    caller: Identity | None = None  # None: the domain does not authenticate callers
    address: str = ""  # client address for the upstream; empty: none
    hidden: tuple[str, ...] = ()  # headers to remove before the upstream


_has_metadata = per_template(has_metadata)


class AuthzEncoder:
    """Encodes decisions as CheckResponse messages."""

    def __init__(self, options: ResponseOptions) -> None:
        self._builder = ResponseBuilder(options)

    def encode(self, decision: Decision, context: CheckContext) -> bytes:
        if decision.template.rejection is not None and decision.code is Code.OVER_LIMIT:
            return _encode_rejection(decision.template.rejection, context)
        headers, body, status = self._builder.build(decision, context.request_id)
        if decision.code is Code.OVER_LIMIT:
            parts = [_http_status(status)]
            parts += [_header(_HEADERS, name, value) for name, value in headers]
            if context.is_grpc:
                parts.append(_GRPC_STATUS)
            if body:
                parts.append(_field(_DENIED_BODY, body))
            return _DENIED + _field(_DENIED_RESPONSE, b"".join(parts)) + self._metadata(decision)
        parts = [_header(_OK_RESPONSE_HEADERS, name, value) for name, value in headers]
        parts += self._upstream(decision, headers, context)
        return _ALLOWED + _field(_OK_RESPONSE, b"".join(parts)) + self._metadata(decision)

    def _upstream(self, decision: Decision, headers: tuple[tuple[str, str], ...], context: CheckContext) -> list[bytes]:
        """Return the headers for the upstream. Headers without a value are removed, in case a client sent them."""
        parts = [_header(_HEADERS, name, value) for name, value in headers if name == RULE_HEADER]
        if not parts:
            parts.append(_remove_header(RULE_HEADER))
        parts.append(_RULE_LOOKALIKES)
        if context.caller is not None:
            parts.append(_CALLER_LOOKALIKES)
            parts.append(_identity_headers(context.caller, context.hidden))
            parts.append(_address(context.address))
        mapping = context.mapping
        if mapping is not None and mapping.upstream_headers:
            values = self._builder.placeholder_values(decision)
            for name, template in mapping.upstream_headers:
                if values is None:
                    parts.append(_remove_header(name))
                else:
                    parts.append(_header(_HEADERS, name, printable(template.render(values))))
                parts.append(_remove_lookalikes(name))
        return parts

    def _metadata(self, decision: Decision) -> bytes:
        """Return the dynamic metadata: the reported rule, and the metadata of the rules that allowed the request."""
        rule_metadata = self._builder.rule_metadata(decision)
        fields = b"".join([_struct_field(key, tuple(values.items())) for key, values in rule_metadata.items()])
        if _has_metadata(decision.template) and (metadata := merge_rule_metadata(decision)):
            fields += encode_struct({"metadata": metadata})
        return _field(_DYNAMIC_METADATA, fields) if fields else b""


@lru_cache(MAX_CACHED_IDENTITIES)
def _identity_headers(caller: Identity, hidden: tuple[str, ...]) -> bytes:
    """Encode the identity headers of a caller. Cached, because callers repeat."""
    values = zip(IDENTITY_HEADERS, caller, strict=True)
    return b"".join([*[_set_or_remove(name, value) for name, value in values], *map(_remove_header, hidden)])


@lru_cache(8192)
def _address(address: str) -> bytes:
    return _set_or_remove(ADDRESS_HEADER, address)


def _set_or_remove(name: str, value: str) -> bytes:
    return _uncached_header(_HEADERS, name, encode_header_value(value)) if value else _remove_header(name)


def _field(tag: bytes, value: bytes) -> bytes:
    return tag + varint(len(value)) + value


@lru_cache(4096)
def _struct_field(key: str, values: tuple[tuple[str, Any], ...]) -> bytes:
    return encode_struct({key: dict(values)})


def _encode_rejection(rejection: Rejection, context: CheckContext) -> bytes:
    """Encode a denial without a limit: the caller is blocked or unauthenticated, or the request is malformed."""
    code = RESOURCE_EXHAUSTED if rejection.status == DENIED_STATUS else _STATUS_CODES[rejection.reason]
    parts = [_http_status(rejection.status), _header(_HEADERS, "content-type", "application/json")]
    if rejection.reason == "unauthorized":
        parts.append(_header(_HEADERS, "www-authenticate", "Bearer"))
    if rejection.until_s is not None:
        left_s = max(1, math.ceil(rejection.until_s - time()))
        parts.append(_uncached_header(_HEADERS, "retry-after", str(left_s)))
    if context.is_grpc:
        parts.append(_header(_HEADERS, "grpc-status", str(code)))
    error: dict[str, Any] = {"code": rejection.status, "message": rejection.message}
    body = json.dumps({"error": error} | ({"request_id": context.request_id} if context.request_id else {}))
    parts.append(_field(_DENIED_BODY, body.encode()))
    fields = _struct_field("rule", (("rejection", rejection.reason),))
    return (
        _status(code, rejection.message) + _field(_DENIED_RESPONSE, b"".join(parts)) + _field(_DYNAMIC_METADATA, fields)
    )


@lru_cache(4096)
def _header(tag: bytes, name: str, value: str) -> bytes:
    """Encode a header. Cached: its value consists of numbers and texts of the rules, never of the request."""
    return _uncached_header(tag, name, value)


def _uncached_header(tag: bytes, name: str, value: str) -> bytes:
    """Encode a header that is specific to a request or a point in time. Caching it would evict reusable ones."""
    encoded = value.encode()
    return _header_prefix(tag, name, len(encoded)) + encoded + _APPEND_ACTION


@lru_cache(4096)
def _header_prefix(tag: bytes, name: str, value_bytes: int) -> bytes:
    """Encode everything before the value of a header, which depends only on the length of the value."""
    key = name.lower().encode()
    pair = _field(_PAIR_KEY, key) + _PAIR_VALUE + varint(value_bytes)
    option = _OPTION_HEADER + varint(len(pair) + value_bytes) + pair
    return tag + varint(len(option) + value_bytes + len(_APPEND_ACTION)) + option


@lru_cache(256)
def _remove_header(name: str) -> bytes:
    return _field(_OK_HEADERS_TO_REMOVE, name.lower().encode())


@lru_cache(256)
def _remove_lookalikes(name: str) -> bytes:
    """Remove all spellings of a header with underscores instead of hyphens, which CGI and WSGI servers treat as equal.

    Envoy can reject or drop them itself (headers_with_underscores_action). The headers that it sends here may be
    filtered (allowed_headers), so the spellings are removed whether they are present or not.
    """
    first, *parts = name.lower().split("-", MAX_HYPHENS)
    spellings = [first]
    for part in parts:
        spellings = [f"{spelling}{mark}{part}" for spelling in spellings for mark in "-_"]
    return b"".join([_field(_OK_HEADERS_TO_REMOVE, spelling.encode()) for spelling in spellings[1:]])


@lru_cache(256)
def _http_status(status: int) -> bytes:
    response = CheckResponse()
    response.denied_response.status.code = status
    return bytes(response.denied_response.SerializeToString())


@lru_cache(16)
def _status(code: int, message: str) -> bytes:
    response = CheckResponse()
    response.status.SetInParent()  # Envoy treats a missing status as OK; other clients may not
    response.status.code, response.status.message = code, message
    return bytes(response.SerializeToString())


_ALLOWED = _status(0, "")
_DENIED = _status(RESOURCE_EXHAUSTED, "over limit")
_GRPC_STATUS = _header(_HEADERS, "grpc-status", str(RESOURCE_EXHAUSTED))
_RULE_LOOKALIKES = _remove_lookalikes(RULE_HEADER)
_CALLER_LOOKALIKES = b"".join(map(_remove_lookalikes, CALLER_HEADERS))
