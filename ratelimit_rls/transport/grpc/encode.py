"""Decision ─► RateLimitResponse, written by hand: a few small numbers between constants.

Filling message objects and serialising them costs several times as much as everything else an answer needs. What does
not depend on the moment (`Wording`) is worked out once per distinct request. The tests hold every byte against the
protobuf library's.
"""

from __future__ import annotations

import random
import struct as binary
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from ratelimit_rls.core.model import Code, Decision, Limit, Outline, Refusal, Request, Rule, Status
from ratelimit_rls.core.plan import per_outline
from ratelimit_rls.transport.answers import AnswerOptions, Answers
from ratelimit_rls.transport.answers.fired import KEY, RETRY_AFTER, known_before
from ratelimit_rls.transport.answers.subject import blamed, retry_after_s, spoken_of, subject
from ratelimit_rls.transport.metadata import described, has_metadata, merged, struct

_OVER_LIMIT = Code.OVER_LIMIT  # looking it up in the enumeration takes longer than all that is asked of it

# A field's tag is its number times 8, plus 0 for a number, 1 for eight bytes or 2 for bytes of a given length.
_CODE = tuple(bytes((1 << 3, code)) if code else b"" for code in Code)
_STATUS = bytes((2 << 3 | 2,))
_RESPONSE_HEADER = bytes((3 << 3 | 2,))
_RAW_BODY = bytes((5 << 3 | 2,))
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
_STRUCT_FIELD = bytes((1 << 3 | 2,))
_FIELD_KEY = bytes((1 << 3 | 2,))
_FIELD_VALUE = bytes((2 << 3 | 2,))
_VALUE_NUMBER = bytes((2 << 3 | 1,))
_VALUE_STRUCT = bytes((5 << 3 | 2,))

_double = binary.Struct("<d").pack
_DOUBLE_BYTES = 8


_UNDECIDED = _STATUS + bytes((len(_CODE[Code.OK]),)) + _CODE[Code.OK]
"""The status of a descriptor to which no limit applied."""


@dataclass(frozen=True, slots=True)
class Wording:
    """The parts of one call's answer that are known before it is decided."""

    current_limits: Mapping[int, bytes]  # by the identity of the step that is spoken of
    metadata: bytes = b""  # the request, described
    rules_have_metadata: bool = False
    styled: bool = False  # a rule of the call chooses headers
    denies: bool = False  # a rule of the call says how it refuses
    undecided: tuple[int, ...] = ()  # descriptors of the message, in order, that the decision knows nothing of
    # Which rule is spoken of, as metadata, by the identity of the step (0: no limit applied), written when first told;
    # a refusal's ends just before its `retry_after`.
    refused_by: dict[int, bytes] = field(default_factory=dict)
    passed_by: dict[int, bytes] = field(default_factory=dict)


class Encoder:
    def __init__(self, options: AnswerOptions, draw: Callable[[int], int] = random.randrange) -> None:
        """`draw` as in Answers."""
        self._answers = Answers(options, draw)
        self._metadata_enabled = options.dynamic_metadata
        self._headers_enabled = options.headers_enabled
        self._limit_key, self._remaining_key, self._reset_key = map(
            _header_key, (options.limit_header, options.remaining_header, options.reset_header)
        )
        # Only the metadata is a request's own; the rest is its outline's, and requests of one kind share it.
        self._shared_wording = per_outline(_wording)

    def wording(self, request: Request, outline: Outline) -> Wording:
        shared = self._shared_wording(outline)
        return replace(shared, metadata=struct(described(request))) if self._metadata_enabled else shared

    def encode(self, decision: Decision, wording: Wording) -> bytes:
        code = decision.code
        if code is _OVER_LIMIT and decision.outline.refusal is not None:
            return self._turned_away(decision, decision.outline.refusal, wording)
        parts = [_CODE[code]]
        for status in decision.statuses:
            body = _status(status, wording.current_limits)
            parts.append(_STATUS + varint(len(body)) + body)
        for number in wording.undecided:
            parts.insert(1 + number, _UNDECIDED)
        if wording.styled or (code is _OVER_LIMIT and wording.denies):
            parts.extend(self._told(decision))
        elif self._headers_enabled:
            parts.extend(self._headers(decision))
        if self._metadata_enabled:
            said = self._rules_metadata(decision, wording) + self._fired(decision, wording)
            parts.append(_bytes(_DYNAMIC_METADATA, wording.metadata + said))
        elif code is _OVER_LIMIT:
            parts.append(_metadata(self._fired(decision, wording)))
        return b"".join(parts)

    def _turned_away(self, decision: Decision, refusal: Refusal, wording: Wording) -> bytes:
        """Of a caller that no limit refused. Envoy's filter decides the status; access logs are told the reason."""
        statuses = [_status(status, {}) for status in decision.statuses]
        parts = [_CODE[decision.code], *(_bytes(_STATUS, status) for status in statuses)]
        for number in wording.undecided:
            parts.insert(1 + number, _UNDECIDED)
        said = wording.metadata if self._metadata_enabled else b""
        parts.append(_metadata(said + struct({KEY: {"refused": refusal.reason}})))
        return b"".join(parts)

    def _headers(self, decision: Decision) -> tuple[bytes, ...]:
        """The reference's three, which rules without a choice of their own have."""
        status = spoken_of(decision)
        if status is None or status.step is None:
            return ()
        return (
            _header(self._limit_key, status.step.limit.requests_per_unit),
            _header(self._remaining_key, status.remaining),
            _header(self._reset_key, status.reset_s),
        )

    def _told(self, decision: Decision) -> Iterable[bytes]:
        headers, body, _ = self._answers.tell(decision)
        for name, value in headers:
            yield _bytes(
                _RESPONSE_HEADER, _header_key(name) + (_bytes(_HEADER_VALUE, value.encode()) if value else b"")
            )
        if body:
            yield _bytes(_RAW_BODY, body)

    def _rules_metadata(self, decision: Decision, wording: Wording) -> bytes:
        said = merged(decision) if wording.rules_have_metadata else None
        return struct({"metadata": said}) if said else b""

    def _fired(self, decision: Decision, wording: Wording) -> bytes:
        """`Answers.fired` as a Struct's field."""
        refusals = blamed(decision)
        status = subject(decision, refusals)
        if status is not None and status.slot.watchers:  # how they stand is told, too
            return struct(self._answers.fired(decision))
        step = 0 if status is None else id(status.step)
        if status is None or decision.code is not _OVER_LIMIT:
            known = wording.passed_by.get(step)
            if known is None:
                known = wording.passed_by[step] = struct(self._answers.fired(decision))
            return known
        known = wording.refused_by.get(step)
        if known is None:
            known = wording.refused_by[step] = _before_retry_after(known_before(decision.outline.domain, status))
        return _with_number(known, retry_after_s(refusals))


def _wording(outline: Outline) -> Wording:
    rules = [slot.rule for slot in outline.slots if slot.rule is not None and slot.steps]
    return Wording(
        current_limits={id(step): _current_limit(step.limit) for step in outline.steps},
        rules_have_metadata=has_metadata(outline),
        styled=any(map(_is_styled, rules)),
        denies=any(rule.deny is not None for rule in rules),
    )


def _is_styled(rule: Rule) -> bool:
    return rule.style.headers is not None or rule.warn_at is not None


def _before_retry_after(words: Mapping[str, str]) -> bytes:
    """A Struct's field with these words and `retry_after`, up to the eight bytes of that number, which follow."""
    number = _until(_FIELD_VALUE, _VALUE_NUMBER)
    words_and_number = struct(words) + _until(_STRUCT_FIELD, _bytes(_FIELD_KEY, RETRY_AFTER.encode()) + number)
    value = _until(_FIELD_VALUE, _until(_VALUE_STRUCT, words_and_number))
    return _until(_STRUCT_FIELD, _bytes(_FIELD_KEY, KEY.encode()) + value)


def _until(tag: bytes, value: bytes) -> bytes:
    """As `_bytes`, for a value that still lacks a double at its end."""
    return tag + varint(len(value) + _DOUBLE_BYTES) + value


def _status(status: Status, current_limits: Mapping[int, bytes]) -> bytes:
    remaining = _STATUS_REMAINING + varint(status.remaining) if status.remaining else b""
    if status.step is None:
        return _CODE[status.code] + remaining
    return _CODE[status.code] + current_limits[id(status.step)] + remaining + _reset(status.reset_s)


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
def _with_number(known: bytes, number: int) -> bytes:
    return known + _double(number)


@lru_cache(4096)
def _metadata(fields: bytes) -> bytes:
    return _bytes(_DYNAMIC_METADATA, fields) if fields else b""


@lru_cache(4096)
def _reset(seconds: int) -> bytes:
    return _bytes(_STATUS_RESET, _DURATION_SECONDS + varint(seconds) if seconds else b"")


@lru_cache(1024)
def _header_key(name: str) -> bytes:
    """Of any header: the names are the rules', not the requests'."""
    return _bytes(_HEADER_KEY, name.encode())


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
