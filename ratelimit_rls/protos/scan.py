"""Bounds of a protobuf message, checked on its bytes before protobuf creates objects.

An empty submessage takes two bytes on the wire and hundreds in memory, so the length of a message says little about its
cost. `MessageScan.check` walks over the fields, skips strings by their lengths, and stops at the first exceeded bound.
Its work is proportional to the number of fields, which is bounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from google.protobuf.descriptor import FieldDescriptor

from ratelimit_rls.errors import BadRequest, TooComplex

MIN_FIELD_BYTES = 2
"""A tag and a value, so a message of n bytes has at most n / 2 fields."""

_VARINT, _FIXED_64, _BYTES, _GROUP, _GROUP_END, _FIXED_32 = range(6)
_MAX_VARINT_BYTES = 10


class FieldBound(NamedTuple):
    """Bound on the number of fields of one kind, anywhere in a message."""

    name: str  # plural
    maximum: int
    setting: str = ""  # that configures the bound; empty: the bound is fixed

    def exceeded(self) -> TooComplex:
        return TooComplex(f"at most {self.maximum} {self.name} are allowed in one message{self.by}")

    @property
    def by(self) -> str:
        return f" ({self.setting})" if self.setting else ""


class FieldShape(NamedTuple):
    """Type of a length-delimited field."""

    inner: MessageShape | None = None  # None: a string
    counted: FieldBound | None = None


MessageShape = dict[int, FieldShape]
"""Known fields of a message by their tags: the field number times 8, plus the wire type."""


class MessageScan:
    """Checks messages of one type against their bounds."""

    def __init__(self, name: str, shape: MessageShape, fields: FieldBound, texts: FieldBound) -> None:
        """`name` is the name of the message type. `fields` bounds the total number of fields, `texts` the bytes of each
        string. A field that is not in the shape is counted, and its contents are skipped."""
        self._name = name
        self._shape = shape
        self._fields = fields
        self._texts = texts

    def check(self, message: bytes) -> None:
        """Raise TooComplex if a bound is exceeded, or BadRequest if the bytes are not protobuf."""
        try:
            is_valid = self._walk(message)
        except IndexError:
            is_valid = False
        if not is_valid:
            raise decode_error(self._name)

    def _walk(self, message: bytes) -> bool:
        """Walk over all fields. Return False, or raise IndexError, if the bytes are not protobuf."""
        shape, at, end = self._shape, 0, len(message)
        outer: list[tuple[MessageShape, int]] = []  # enclosing messages, and where they end
        groups = 0  # open groups, whose contents are in no shape
        left = self._fields.maximum
        counts: dict[FieldBound, int] = {}
        while True:
            if at >= end:
                if at > end or groups:
                    return False
                if not outer:
                    return True
                shape, end = outer.pop()
                continue
            left -= 1
            if left < 0:
                raise self._fields.exceeded()
            tag = message[at]
            at += 1
            if tag >= 0x80:
                tag, at = _varint(message, at - 1)
            kind = tag & 7
            if kind == _BYTES:
                length = message[at]
                at += 1
                if length >= 0x80:
                    length, at = _varint(message, at - 1)
                if length > end - at:
                    return False
                field = None if groups else shape.get(tag)
                if field is None:
                    at += length
                    continue
                if field.counted is not None:
                    counts[field.counted] = count = counts.get(field.counted, 0) + 1
                    if count > field.counted.maximum:
                        raise field.counted.exceeded()
                if field.inner is not None:
                    outer.append((shape, end))
                    shape, end = field.inner, at + length
                    continue
                if length > self._texts.maximum:
                    raise TooComplex(
                        f"string of {length} bytes in the message; at most {self._texts.maximum} are allowed"
                        f"{self._texts.by}"
                    )
                at += length
            elif kind == _VARINT:
                _, at = _varint(message, at)
            elif kind == _FIXED_32:
                at += 4
            elif kind == _FIXED_64:
                at += 8
            elif kind == _GROUP:
                groups += 1
            elif kind == _GROUP_END and groups:
                groups -= 1
            else:
                return False


def message_shape(descriptor: Any) -> MessageShape:
    """Return the shape of a message type: every string and submessage, at any depth."""
    shapes: dict[str, MessageShape] = {}

    def shape_for(descriptor: Any) -> MessageShape:
        shape = shapes.get(descriptor.full_name)
        if shape is None:
            shape = shapes[descriptor.full_name] = {}
            shape.update(fields_of(descriptor))
        return shape

    def fields_of(descriptor: Any) -> Iterator[tuple[int, FieldShape]]:
        for field in descriptor.fields:
            if field.type == FieldDescriptor.TYPE_MESSAGE:
                yield field_tag(field), FieldShape(shape_for(field.message_type))
            elif field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
                yield field_tag(field), FieldShape()

    return shape_for(descriptor)


def field_tag(field: FieldDescriptor) -> int:
    """Return the tag of a length-delimited field."""
    return field.number << 3 | _BYTES


def decode_error(name: str) -> BadRequest:
    return BadRequest(
        f"the message cannot be decoded as {name}: it is truncated, not protobuf, or has a string that is not UTF-8"
    )


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Decode the varint at `at`. Return the number and its end. Raises IndexError if it is truncated or too long."""
    value = shift = 0
    for at in range(at, at + _MAX_VARINT_BYTES):  # noqa: B020 - the loop ends where the number ends
        byte = message[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at + 1
        shift += 7
    raise IndexError
