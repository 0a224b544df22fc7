"""Decision ─► RateLimitResponse, written by hand: a few small numbers between constants.

Filling message objects and serialising them costs several times as much as everything else an answer needs. What does
not depend on the moment (`Wording`) is worked out once per distinct request. The tests hold every byte against the
protobuf library's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from ratelimit_rls.core.model import Code, Decision, Limit, Outline, Request, Status
from ratelimit_rls.core.plan import per_outline
from ratelimit_rls.transport.answers import AnswerOptions
from ratelimit_rls.transport.headers import spoken_of
from ratelimit_rls.transport.metadata import described, has_metadata, merged, struct

# A field's tag is its number times 8, plus 0 for a number or 2 for bytes of a given length.
_CODE = tuple(bytes((1 << 3, code)) if code else b"" for code in Code)
_STATUS = bytes((2 << 3 | 2,))
_RESPONSE_HEADER = bytes((3 << 3 | 2,))
_DYNAMIC_METADATA = bytes((6 << 3 | 2,))
_STATUS_CURRENT_LIMIT = bytes((2 << 3 | 2,))
_STATUS_REMAINING = bytes((3 << 3,))
_STATUS_RESET = bytes((4 << 3 | 2,))
_DURATION_SECONDS = bytes((1 << 3,))
_LIMIT_REQUESTS_PER_UNIT = bytes((1 << 3,))
_LIMIT_UNIT = bytes((2 << 3,))
_LIMIT_NAME = bytes((3 << 3 | 2,))
_HEADER_KEY = bytes((1 << 3 | 2,))
_HEADER_VALUE = bytes((2 << 3 | 2,))


@dataclass(frozen=True, slots=True)
class Wording:
    """The parts of one call's answer that are known before it is decided."""

    current_limits: Mapping[int, bytes]  # by the identity of the step that is spoken of
    metadata: bytes = b""  # the request, described
    rules_have_metadata: bool = False


class Encoder:
    def __init__(self, options: AnswerOptions) -> None:
        self._metadata_enabled = options.dynamic_metadata
        self._headers_enabled = options.headers_enabled
        self._limit_key, self._remaining_key, self._reset_key = (
            _bytes(_HEADER_KEY, name.encode())
            for name in (options.limit_header, options.remaining_header, options.reset_header)
        )
        # Without metadata the wording is the outline's, and requests of one kind share it.
        self._shared_wording = per_outline(lambda outline: Wording(_current_limits(outline)))

    def wording(self, request: Request, outline: Outline) -> Wording:
        if not self._metadata_enabled:
            return self._shared_wording(outline)
        return Wording(_current_limits(outline), struct(described(request)), has_metadata(outline))

    def encode(self, decision: Decision, wording: Wording) -> bytes:
        parts = [_CODE[decision.code]]
        for status in decision.statuses:
            body = _status(status, wording.current_limits)
            parts.append(_STATUS + varint(len(body)) + body)
        if self._headers_enabled:
            parts.extend(self._headers(decision))
        if self._metadata_enabled:
            parts.append(_bytes(_DYNAMIC_METADATA, wording.metadata + self._rules_metadata(decision, wording)))
        return b"".join(parts)

    def _headers(self, decision: Decision) -> tuple[bytes, ...]:
        status = spoken_of(decision)
        if status is None or status.step is None:
            return ()
        return (
            _header(self._limit_key, status.step.limit.requests_per_unit),
            _header(self._remaining_key, status.remaining),
            _header(self._reset_key, status.reset_s),
        )

    def _rules_metadata(self, decision: Decision, wording: Wording) -> bytes:
        said = merged(decision) if wording.rules_have_metadata else None
        return struct({"metadata": said}) if said else b""


def _status(status: Status, current_limits: Mapping[int, bytes]) -> bytes:
    remaining = _STATUS_REMAINING + varint(status.remaining) if status.remaining else b""
    if status.step is None:
        return _CODE[status.code] + remaining
    return _CODE[status.code] + current_limits[id(status.step)] + remaining + _reset(status.reset_s)


def _current_limits(outline: Outline) -> dict[int, bytes]:
    return {id(step): _current_limit(step.limit) for step in outline.steps}


def _current_limit(limit: Limit) -> bytes:
    body = b""
    if limit.requests_per_unit:
        body += _LIMIT_REQUESTS_PER_UNIT + varint(limit.requests_per_unit)
    if limit.spoken_unit:
        body += _LIMIT_UNIT + varint(limit.spoken_unit)
    if limit.name:
        body += _bytes(_LIMIT_NAME, limit.name.encode())
    return _bytes(_STATUS_CURRENT_LIMIT, body)


@lru_cache(4096)
def _reset(seconds: int) -> bytes:
    return _bytes(_STATUS_RESET, _DURATION_SECONDS + varint(seconds) if seconds else b"")


@lru_cache(4096)
def _header(key: bytes, number: int) -> bytes:
    return _bytes(_RESPONSE_HEADER, key + _bytes(_HEADER_VALUE, b"%d" % number))


def _bytes(tag: bytes, value: bytes) -> bytes:
    return tag + varint(len(value)) + value


@lru_cache(4096)
def varint(number: int) -> bytes:
    """Seven bits a byte, the lowest first; the eighth bit says that more follow."""
    written = bytearray()
    while number > 0x7F:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)
