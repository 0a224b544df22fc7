"""The head of a gRPC call: what is called, for how long, with which metadata."""

from __future__ import annotations

import binascii
import re
import zlib
from base64 import b64decode
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ratelimit_rls.telemetry.traces import Metadata
from ratelimit_rls.transport.grpc.deadlines import deadline_s
from ratelimit_rls.transport.grpc.door import Failure, FailureCode
from ratelimit_rls.transport.grpc.request_id import sent_along
from ratelimit_rls.transport.http2.requests import Fields, checked_request, content_length

if TYPE_CHECKING:
    from ratelimit_rls.transport.grpc.connection import Connection

_TIMEOUT_UNITS_S = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_MOST_TIMEOUT_DIGITS = 8
_OF_THE_TRANSPORT = frozenset({b"te", b"content-type", b"content-length", b"user-agent"})
_CONTENT_TYPE = re.compile(rb"application/grpc([+;]|$)")
"""What stands after it is the caller's affair; but application/grpc-web is another protocol."""

_WINDOW_BITS = {b"gzip": 31, b"deflate": 15}


Arrived = tuple["Connection", int, bytes, float, "Head"]
"""A call whose message is there: on which stream of whose connection, and since when. A tuple without names: it is made
for every call, and one with names takes four times as long."""

NOWHERE: list[Arrived] = []
"""Where calls are gathered that are served the ordinary way."""


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """Shared by all calls with the same header block, so whatever can be worked out from that is worked out once."""

    path: str
    allowed_s: float  # the caller waits so long, counted from now; inf: for ever
    metadata: Metadata
    encoding: bytes  # of messages that say they are compressed
    request_id: bytes | None
    content_length: int | None
    gathering: list[Arrived]  # where the calls of its method come together


class NotGrpc(Exception):
    """A request that is proper HTTP and not gRPC: with which status, and which words, it is turned away."""

    def __init__(self, status: int, words: str, content_length: int | None = None) -> None:
        super().__init__(words)
        self.status = status
        self.content_length = content_length


class HeadReader:
    def __init__(self, gathering: dict[str, list[Arrived]], request_id_metadata: str = "") -> None:
        self._gathering = gathering
        self._request_id_metadata = request_id_metadata.lower()

    def read(self, fields: Fields) -> Head | Failure:
        """Raises StreamFault if it is malformed, NotGrpc if it is something else; a Failure is what gRPC says then."""
        pseudo = checked_request(fields)
        length = content_length(fields)
        named = dict(fields)
        if pseudo[b":method"] != b"POST":
            raise NotGrpc(405, "this is a gRPC port: calls are POST requests", length)
        if not _CONTENT_TYPE.match(named.get(b"content-type", b"")):
            raise NotGrpc(415, "this is a gRPC port: calls have a content-type of application/grpc", length)
        path = pseudo[b":path"].decode("latin-1")
        try:
            left_s = _timeout_s(named.get(b"grpc-timeout"))
            metadata = _metadata(fields[len(pseudo) :])
        except ValueError as error:
            return Failure(FailureCode.INTERNAL, f"the call's headers cannot be read: {error}")
        return Head(
            path=path,
            allowed_s=deadline_s(0.0, left_s),
            metadata=metadata,
            encoding=named.get(b"grpc-encoding", b"identity"),
            request_id=sent_along(metadata, self._request_id_metadata) if self._request_id_metadata else None,
            content_length=length,
            gathering=self._gathering.get(path, NOWHERE),
        )


def decompressed(message: bytes, encoding: bytes, most_bytes: int) -> bytes | Failure:
    """A message that says it is compressed. Of one that is larger than allowed no more is unpacked than that shows."""
    window_bits = _WINDOW_BITS.get(encoding)
    if window_bits is None:
        return Failure(FailureCode.UNIMPLEMENTED, "messages may be compressed with gzip or deflate, if at all")
    unpacking = zlib.decompressobj(window_bits)
    try:
        plain = unpacking.decompress(message, most_bytes + 1)
    except zlib.error:
        return Failure(FailureCode.INTERNAL, "the message says that it is compressed, and cannot be unpacked")
    if len(plain) > most_bytes:
        return too_large(most_bytes)
    if not unpacking.eof:
        return Failure(FailureCode.INTERNAL, "the message is compressed and cut short")
    return plain


def too_large(most_bytes: int) -> Failure:
    return Failure(FailureCode.RESOURCE_EXHAUSTED, f"the message is too large; at most {most_bytes} bytes are read")


def _timeout_s(text: bytes | None) -> float | None:
    if text is None:
        return None
    digits, unit_s = text[:-1], _TIMEOUT_UNITS_S.get(text[-1:])
    if unit_s is None or not digits.isdigit() or len(digits) > _MOST_TIMEOUT_DIGITS:
        raise ValueError("grpc-timeout is not a number of up to eight digits and a unit")
    return int(digits) * unit_s


def _metadata(fields: Fields) -> Metadata:
    metadata: list[tuple[str, str | bytes]] = []
    for name, value in fields:
        if name in _OF_THE_TRANSPORT or name.startswith(b"grpc-"):
            continue
        if name.endswith(b"-bin"):
            # Whoever passes a call on may join fields of one name, and no comma is part of a value here.
            metadata += [(name.decode(), _binary(part.strip())) for part in value.split(b",")]
        else:
            metadata.append((name.decode(), value.decode("latin-1")))
    return tuple(metadata)


def _binary(value: bytes) -> bytes:
    """Base64, with its padding or without."""
    try:
        return b64decode(value + b"=" * (-len(value) % 4), validate=True)
    except binascii.Error as error:
        raise ValueError("metadata whose name ends in -bin is not base64") from error
