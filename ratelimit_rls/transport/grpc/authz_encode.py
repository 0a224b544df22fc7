"""Decision ─► CheckResponse, joined from pieces that come again and again.

    allowed   status OK          ok_response{headers, headers_to_remove, response_headers_to_add}    dynamic_metadata
    refused   status exhausted   denied_response{status, headers, body}                              dynamic_metadata

Every header takes the place of one of its name, so that neither a client nor an upstream can say it first.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from ratelimit_rls.core.attributes import AttributeMapping
from ratelimit_rls.core.model import Code, Decision
from ratelimit_rls.core.plan import per_outline
from ratelimit_rls.transport.answers import AnswerOptions, Answers
from ratelimit_rls.transport.answers.words import printable
from ratelimit_rls.transport.grpc.encode import varint
from ratelimit_rls.transport.grpc.messages import CheckResponse
from ratelimit_rls.transport.metadata import has_metadata, merged, struct

RULE_HEADER = "X-RateLimit-Rule"
"""The one response header that the upstream is told, too: which rule let the request through."""

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


class Asked(NamedTuple):
    """What the wording of an answer depends on besides the decision."""

    mapping: AttributeMapping | None  # None: the domain has none
    request_id: str = ""  # a body may repeat it
    is_grpc: bool = False  # the request that Envoy asks about


class AuthzEncoder:
    def __init__(self, options: AnswerOptions) -> None:
        self._answers = Answers(options)
        self._has_metadata = per_outline(has_metadata)

    def encode(self, decision: Decision, asked: Asked) -> bytes:
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
        parts += self._upstream(decision, headers, asked.mapping)
        return _ALLOWED + _field(_OK_RESPONSE, b"".join(parts)) + self._metadata(decision)

    def _upstream(
        self, decision: Decision, told: tuple[tuple[str, str], ...], mapping: AttributeMapping | None
    ) -> list[bytes]:
        """What the upstream is told. Where there is nothing to tell, what a client wrote there is taken away."""
        parts = [_header(_HEADERS, name, value) for name, value in told if name == RULE_HEADER]
        if not parts:
            parts.append(_removed(RULE_HEADER))
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


def _field(tag: bytes, value: bytes) -> bytes:
    return tag + varint(len(value)) + value


@lru_cache(4096)
def _words(key: str, words: tuple[tuple[str, Any], ...]) -> bytes:
    return struct({key: dict(words)})


@lru_cache(4096)
def _header(tag: bytes, name: str, value: str) -> bytes:
    """Few are new: they hold numbers and what the rules say, and nothing of the request."""
    header = CheckResponse().ok_response.headers.add(append_action=_OVERWRITE)
    header.header.key, header.header.value = name.lower(), value
    return _field(tag, bytes(header.SerializeToString()))


@lru_cache(256)
def _removed(name: str) -> bytes:
    return _field(_OK_HEADERS_TO_REMOVE, name.lower().encode())


@lru_cache(256)
def _http_status(status: int) -> bytes:
    response = CheckResponse()
    response.denied_response.status.code = status
    return bytes(response.denied_response.SerializeToString())


def _status(code: int, message: str) -> bytes:
    response = CheckResponse()
    response.status.SetInParent()  # Envoy takes an answer without a status for OK; other readers need not
    response.status.code, response.status.message = code, message
    return bytes(response.SerializeToString())


_ALLOWED = _status(0, "")
_REFUSED = _status(RESOURCE_EXHAUSTED, "over limit")
_GRPC_STATUS = _header(_HEADERS, "grpc-status", str(RESOURCE_EXHAUSTED))
