"""Encoder: Decision ─► RateLimitResponse, encoded by hand as a few small numbers between constants.

Filling and serialising message objects would cost several times as much as the rest of a response. The parts that do
not depend on the decision (`ResponseTemplate`) are computed once per distinct request. The tests compare every byte
with the output of the protobuf library.
"""

from __future__ import annotations

import random
import struct as binary
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from ratelimit_rls.api.responses import ResponseBuilder, ResponseOptions
from ratelimit_rls.api.responses.dynamic_metadata import (
    describe_request,
    encode_struct,
    has_metadata,
    merge_rule_metadata,
)
from ratelimit_rls.api.responses.rule_metadata import KEY, RETRY_AFTER, static_rule_fields
from ratelimit_rls.api.responses.status_selection import (
    denying_statuses,
    headline_status,
    reported_status,
    retry_after_s,
)
from ratelimit_rls.core.decision import SECOND_US, UNLIMITED_REMAINING, decision_of, reported_limit, unlimited_status
from ratelimit_rls.core.model import (
    Code,
    Decision,
    DescriptorPlan,
    Limit,
    PlanTemplate,
    Rejection,
    Request,
    Rule,
    Status,
    StoreResult,
)
from ratelimit_rls.core.plan import per_template

_TEMPLATE_BYTES = 150

_OVER_LIMIT = Code.OVER_LIMIT  # the enum lookup would take longer than the comparison

# The tag of a field is its number times 8, plus 0 for a varint, 1 for eight bytes or 2 for length-delimited bytes.
_CODE = tuple(bytes((1 << 3, code)) if code else b"" for code in Code)
_PASS = _CODE[Code.OK]
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


_NO_LIMIT_STATUS = _STATUS + bytes((len(_CODE[Code.OK]),)) + _CODE[Code.OK]
"""Status of a descriptor to which no limit applied."""


@dataclass(frozen=True, slots=True)
class ResponseTemplate:
    """Parts of a response that are known before the call is decided."""

    current_limits: Mapping[int, bytes]  # by the id() of the reported step
    metadata: bytes = b""  # description of the request
    rules_have_metadata: bool = False
    has_header_policy: bool = False  # a rule of the call chooses headers
    has_deny_policy: bool = False  # a rule of the call has a `deny` policy
    undecided: tuple[int, ...] = ()  # indexes of descriptors, in order, that are not part of the decision
    # For a call that passes, and if responses have nothing else: the status of each descriptor, or the beginning of its
    # body for each of its limits.
    passing: tuple[bytes | tuple[bytes, ...], ...] | None = None
    # Metadata of the reported rule by the id() of its step (0: no limit applied), encoded on first use. For denials, it
    # ends just before the value of `retry_after`.
    denied_by: dict[int, bytes] = field(default_factory=dict)
    allowed_by: dict[int, bytes] = field(default_factory=dict)

    @property
    def own_bytes(self) -> int:
        """Memory that is not shared with other requests: the metadata, and this object if it has metadata."""
        return len(self.metadata) + _TEMPLATE_BYTES if self.metadata else 0


class RlsEncoder:
    """Encodes decisions as RateLimitResponse messages."""

    def __init__(self, options: ResponseOptions, draw: Callable[[int], int] = random.randrange) -> None:
        """`draw` is passed to ResponseBuilder."""
        self._builder = ResponseBuilder(options, draw)
        self._metadata_enabled = options.dynamic_metadata
        self._headers_enabled = options.headers_enabled
        self._shared_template = per_template(self._make_shared_template)
        self._limit_key, self._remaining_key, self._reset_key = map(
            _header_key, (options.limit_header, options.remaining_header, options.reset_header)
        )

    @property
    def describes_requests(self) -> bool:
        """Return True if responses describe their request, so that few requests share a response template."""
        return self._metadata_enabled

    def response_template(self, request: Request, template: PlanTemplate) -> ResponseTemplate:
        shared = self._shared_template(template)
        return replace(shared, metadata=encode_struct(describe_request(request))) if self._metadata_enabled else shared

    def encode_pass(self, template: PlanTemplate, result: StoreResult, response_template: ResponseTemplate) -> bytes:
        """Encode the response to a call that passes all its limits, like `encode`, by the result of the store."""
        if response_template.passing is None or response_template.undecided:
            return self.encode(decision_of(template, result), response_template)
        numbers, at = result.numbers, 0
        parts = [_PASS]
        for passing in response_template.passing:
            if isinstance(passing, bytes):
                parts.append(passing)
                continue
            reported = reported_limit(numbers, at, len(passing))
            left = numbers[reported]
            body = passing[(reported - at) // 3]
            if left > 0:
                body += _STATUS_REMAINING + varint(left if left < UNLIMITED_REMAINING else UNLIMITED_REMAINING)
            body += _reset(-(-numbers[reported + 2] // SECOND_US))
            parts.append(_STATUS + varint(len(body)) + body)
            at += 3 * len(passing)
        return b"".join(parts)

    def encode(self, decision: Decision, response_template: ResponseTemplate) -> bytes:
        code = decision.code
        if code is _OVER_LIMIT and decision.template.rejection is not None:
            return self._encode_denial(decision, decision.template.rejection, response_template)
        parts = [_CODE[code]]
        for status in decision.statuses:
            body = _status(status, response_template.current_limits)
            parts.append(_STATUS + varint(len(body)) + body)
        for number in response_template.undecided:
            parts.insert(1 + number, _NO_LIMIT_STATUS)
        if response_template.has_header_policy or (code is _OVER_LIMIT and response_template.has_deny_policy):
            parts.extend(self._built_fields(decision))
        elif self._headers_enabled:
            parts.extend(self._headers(decision))
        if self._metadata_enabled:
            metadata = self._rules_metadata(decision, response_template) + self._rule_metadata(
                decision, response_template
            )
            parts.append(_field(_DYNAMIC_METADATA, response_template.metadata + metadata))
        elif code is _OVER_LIMIT:
            parts.append(_metadata(self._rule_metadata(decision, response_template)))
        return b"".join(parts)

    def _make_shared_template(self, template: PlanTemplate) -> ResponseTemplate:
        """Return what requests with the same plan template share. Only the metadata is specific to a request."""
        rules = [one.rule for one in template.descriptor_plans if one.rule is not None and one.steps]
        has_header_policy = any(map(_has_header_policy, rules))
        has_more = has_header_policy or self._headers_enabled or self._metadata_enabled
        return ResponseTemplate(
            current_limits={id(step): _current_limit(step.limit) for step in template.steps},
            rules_have_metadata=has_metadata(template),
            has_header_policy=has_header_policy,
            has_deny_policy=any(rule.deny is not None for rule in rules),
            passing=None if has_more else tuple(map(_passing, template.descriptor_plans)),
        )

    def _encode_denial(self, decision: Decision, rejection: Rejection, response_template: ResponseTemplate) -> bytes:
        """Encode a denial that no limit caused. Envoy's filter chooses the status; the metadata has the reason."""
        statuses = [_status(status, {}) for status in decision.statuses]
        parts = [_CODE[decision.code], *(_field(_STATUS, status) for status in statuses)]
        for number in response_template.undecided:
            parts.insert(1 + number, _NO_LIMIT_STATUS)
        metadata = response_template.metadata if self._metadata_enabled else b""
        parts.append(_metadata(metadata + encode_struct({KEY: {"rejection": rejection.reason}})))
        return b"".join(parts)

    def _headers(self, decision: Decision) -> tuple[bytes, ...]:
        """Return the three headers of envoyproxy/ratelimit, for rules that choose no headers."""
        status = headline_status(decision)
        if status is None or status.step is None:
            return ()
        return (
            _header(self._limit_key, status.step.limit.requests_per_unit),
            _header(self._remaining_key, status.remaining),
            _header(self._reset_key, status.reset_s),
        )

    def _built_fields(self, decision: Decision) -> Iterable[bytes]:
        headers, body, _ = self._builder.build(decision)
        for name, value in headers:
            yield _field(
                _RESPONSE_HEADER, _header_key(name) + (_field(_HEADER_VALUE, value.encode()) if value else b"")
            )
        if body:
            yield _field(_RAW_BODY, body)

    def _rules_metadata(self, decision: Decision, response_template: ResponseTemplate) -> bytes:
        metadata = merge_rule_metadata(decision) if response_template.rules_have_metadata else None
        return encode_struct({"metadata": metadata}) if metadata else b""

    def _rule_metadata(self, decision: Decision, response_template: ResponseTemplate) -> bytes:
        """Return `ResponseBuilder.rule_metadata` as an encoded field of a Struct."""
        denying = denying_statuses(decision)
        status = reported_status(decision, denying)
        if status is not None and status.descriptor_plan.watchers:  # the metadata includes their current state
            return encode_struct(self._builder.rule_metadata(decision))
        step = 0 if status is None else id(status.step)
        if status is None or decision.code is not _OVER_LIMIT:
            encoded = response_template.allowed_by.get(step)
            if encoded is None:
                encoded = response_template.allowed_by[step] = encode_struct(self._builder.rule_metadata(decision))
            return encoded
        encoded = response_template.denied_by.get(step)
        if encoded is None:
            encoded = response_template.denied_by[step] = _before_retry_after(
                static_rule_fields(decision.template.domain, status)
            )
        return _with_double(encoded, retry_after_s(denying))


def _passing(descriptor_plan: DescriptorPlan) -> bytes | tuple[bytes, ...]:
    """Return the status of a descriptor without limits; otherwise the beginning of its body for each of its limits."""
    if not descriptor_plan.steps:
        if not descriptor_plan.unlimited:
            return _NO_LIMIT_STATUS  # shared: a request may have hundreds of descriptors without a rule
        return _field(_STATUS, _status(unlimited_status(descriptor_plan), {}))
    return tuple(_CODE[Code.OK] + _current_limit(step.limit) for step in descriptor_plan.steps)


def _has_header_policy(rule: Rule) -> bool:
    return rule.response_policy.headers is not None or rule.warn_at is not None


def _before_retry_after(fields: Mapping[str, str]) -> bytes:
    """Encode a Struct field with `fields` and `retry_after`, without the eight bytes of that number, which follow."""
    number = _open_field(_FIELD_VALUE, _VALUE_NUMBER)
    fields_and_number = encode_struct(fields) + _open_field(
        _STRUCT_FIELD, _field(_FIELD_KEY, RETRY_AFTER.encode()) + number
    )
    value = _open_field(_FIELD_VALUE, _open_field(_VALUE_STRUCT, fields_and_number))
    return _open_field(_STRUCT_FIELD, _field(_FIELD_KEY, KEY.encode()) + value)


def _open_field(tag: bytes, value: bytes) -> bytes:
    """Encode a field whose value still lacks a double at its end."""
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
    if limit.wire_unit:
        body += _LIMIT_UNIT + varint(limit.wire_unit)
    if limit.name:
        body += _field(_LIMIT_NAME, limit.name.encode())
    return _field(_STATUS_CURRENT_LIMIT, body)


@lru_cache(4096)
def _with_double(encoded: bytes, number: int) -> bytes:
    return encoded + _double(number)


@lru_cache(4096)
def _metadata(fields: bytes) -> bytes:
    return _field(_DYNAMIC_METADATA, fields) if fields else b""


@lru_cache(4096)
def _reset(seconds: int) -> bytes:
    return _field(_STATUS_RESET, _DURATION_SECONDS + varint(seconds) if seconds else b"")


@lru_cache(1024)
def _header_key(name: str) -> bytes:
    """Encode a header name. Names come from rules, not from requests, so the cache cannot be flooded."""
    return _field(_HEADER_KEY, name.encode())


@lru_cache(4096)
def _header(key: bytes, number: int) -> bytes:
    return _field(_RESPONSE_HEADER, key + _field(_HEADER_VALUE, b"%d" % number))


def _field(tag: bytes, value: bytes) -> bytes:
    return tag + varint(len(value)) + value


@lru_cache(4096)
def varint(number: int) -> bytes:
    """Encode a number as a varint: seven bits per byte, lowest first; the eighth bit means that more follow."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
