"""Bounds of one message, and the scans that enforce them before objects are created from it.

The defaults are above what a client of Envoy can make it send: Envoy accepts 60 KiB of headers, and 100 of them. They
keep a call under some 5 ms of CPU, even if none of it is cached.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ratelimit_rls.core.model import Request
from ratelimit_rls.errors import TooComplex
from ratelimit_rls.protos.messages import CheckRequest, RateLimitRequest
from ratelimit_rls.protos.scan import (
    MIN_FIELD_BYTES,
    FieldBound,
    FieldShape,
    MessageScan,
    MessageShape,
    field_tag,
    message_shape,
)

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
"""gRPC's own default for received messages. No setting exceeds it."""

MAX_LIMITER_MESSAGE_BYTES = 65_536
"""Maximum size of RateLimiter messages: each of their texts can occur in a dozen descriptors."""

MAX_LIMITER_FIELDS = 100

_PLAIN_BYTES = 4096
_MIN_PLAIN_ENTRY_BYTES = 6
"""Minimum size of an entry in decode.read_plain: tags and lengths of the entry, its key and its value."""

_OTHER_FIELDS = 64
_FIELDS_PER_DESCRIPTOR = 16  # the API has eight, apart from the entries
_FIELDS_PER_ENTRY = 4  # the API has the entry, its key and its value


@dataclass(frozen=True)
class MessageBounds:
    """The bounds on the content of messages."""

    descriptors: int = 256
    entries: int = 1024  # of all descriptors together
    entry_bytes: int = 65_536  # of a key or a value
    message_bytes: int = 1 << 19  # of a RateLimitRequest
    check_fields: int = 8192  # of a CheckRequest, those of submessages included

    # Computed once, as plain attributes: every message that is not cached is compared with one of them.
    plain_bytes: int = field(init=False)
    """A message of at most this size that decode.read_plain accepts can exceed only the bound of descriptors."""
    unscanned_bytes: int = field(init=False)
    """A RateLimitRequest of at most this size cannot exceed a bound."""
    unscanned_check_bytes: int = field(init=False)
    """A CheckRequest of at most this size cannot exceed a bound."""

    def __post_init__(self) -> None:
        fewest = min(self.descriptors, self.entries)
        plain_bytes = min(_PLAIN_BYTES, _MIN_PLAIN_ENTRY_BYTES * self.entries)
        object.__setattr__(self, "plain_bytes", plain_bytes)
        object.__setattr__(self, "unscanned_bytes", min(MIN_FIELD_BYTES * fewest, self.entry_bytes))
        unscanned_check_bytes = min(MIN_FIELD_BYTES * self.check_fields, self.entry_bytes)
        object.__setattr__(self, "unscanned_check_bytes", unscanned_check_bytes)

    def too_many_descriptors(self) -> TooComplex:
        return self._descriptors.exceeded()

    @cached_property
    def request_scan(self) -> MessageScan:
        maximum = _OTHER_FIELDS + _FIELDS_PER_DESCRIPTOR * self.descriptors + _FIELDS_PER_ENTRY * self.entries
        fields = FieldBound("fields", maximum, "RLS_MAX_DESCRIPTORS and RLS_MAX_ENTRIES")
        return self._scan(RateLimitRequest, fields, self._request_shape())

    @cached_property
    def check_scan(self) -> MessageScan:
        return self._scan(CheckRequest, FieldBound("fields", self.check_fields, "RLS_MAX_CHECK_FIELDS"))

    def limiter_scan(self, kind: Any) -> MessageScan:
        """`kind` is a message class of RateLimiter."""
        return self._scan(kind, FieldBound("fields", MAX_LIMITER_FIELDS))

    def check_descriptors(self, request: Request) -> None:
        """Check descriptors that rules made from a CheckRequest: one header can be in many. Raises TooComplex."""
        size = sum([len(value) for descriptor in request.descriptors for _, value in descriptor.entries])
        if size > self.message_bytes:
            raise TooComplex(
                f"the values of the request's descriptors have {size} characters; at most {self.message_bytes} are "
                "counted (RLS_MAX_MESSAGE_BYTES)"
            )

    @property
    def _descriptors(self) -> FieldBound:
        return FieldBound("descriptors", self.descriptors, "RLS_MAX_DESCRIPTORS")

    def _request_shape(self) -> MessageShape:
        request = RateLimitRequest.DESCRIPTOR
        descriptor = request.fields_by_name["descriptors"].message_type
        entries = descriptor.fields_by_name["entries"]
        counted = FieldBound("entries", self.entries, "RLS_MAX_ENTRIES")
        in_descriptor = message_shape(descriptor) | {
            field_tag(entries): FieldShape(message_shape(entries.message_type), counted)
        }
        in_request = {field_tag(request.fields_by_name["descriptors"]): FieldShape(in_descriptor, self._descriptors)}
        return message_shape(request) | in_request

    def _scan(self, kind: Any, fields: FieldBound, shape: MessageShape | None = None) -> MessageScan:
        descriptor = kind.DESCRIPTOR
        texts = FieldBound("bytes", self.entry_bytes, "RLS_MAX_ENTRY_BYTES")
        return MessageScan(descriptor.full_name, shape or message_shape(descriptor), fields, texts)


DEFAULT_BOUNDS = MessageBounds()
