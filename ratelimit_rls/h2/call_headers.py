"""Request headers of a gRPC call: its method, timeout and metadata."""

from __future__ import annotations

import binascii
import re
import zlib
from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from ratelimit_rls.h2.reasons import Reason
from ratelimit_rls.h2.request_headers import Fields, parse_content_length, validate_request
from ratelimit_rls.h2.status import RpcError, StatusCode, message_too_large

DEFAULT_MAX_MESSAGE_BYTES = 4 * 2**20
"""Limit on messages of methods without a limit of their own; gRPC's own default."""

TIMEOUT_ROUNDING = 0.01
"""Clients send timeouts of a second and more with few digits, rounded up by at most this fraction."""

_TIMEOUT_UNITS_S = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_MAX_TIMEOUT_DIGITS = 8
_TRANSPORT_FIELDS = frozenset({b"te", b"content-type", b"content-length", b"user-agent"})
_CONTENT_TYPE = re.compile(rb"application/grpc([+;]|$)")
"""Any suffix such as +proto is accepted, but application/grpc-web is another protocol."""

MAX_BINARY_VALUES = 100
"""Maximum number of values of all -bin metadata in one call. A comma separates two values."""

# Measured with tracemalloc on CPython 3.11: the object with its fixed fields, and a metadata pair with two strings.
_HEADERS_BYTES = 280
_PAIR_BYTES = 170

Metadata = Sequence[tuple[str, str | bytes]]
"""Metadata of a call, with keys in lower case."""

BinaryMetadata = list[tuple[str, bytes]]
"""Metadata whose names end in -bin, still encoded in base64."""

_WINDOW_BITS = {b"gzip": 31, b"deflate": 15}


QueuedCall = tuple[Any, int, bytes, float, "CallHeaders"]
"""A call whose message has arrived: connection, stream id, message, time of arrival, headers. A plain tuple, because
one is created for every call, and a named tuple takes four times as long."""

STREAMING: list[QueuedCall] = []
"""Sentinel queue of calls whose method has no queue. They are streaming calls (`Hooks.open_stream`)."""


@dataclass(frozen=True, slots=True, eq=False)
class CallHeaders:
    """Parsed headers, shared by all calls with the same header block, so that each block is parsed once."""

    path: str
    deadline_in_s: float  # time from now until the deadline; inf: no deadline
    metadata: Metadata  # text values; for streaming calls, decoded binary values as well
    encoding: bytes  # of compressed messages
    request_id: bytes | None
    content_length: int | None
    queue: list[QueuedCall]  # receives the calls of this method
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES  # limit of the method, before and after decompression

    @property
    def memory_bytes(self) -> int:
        """Memory that the object keeps alive, slightly overestimated."""
        texts = sum([len(name) + len(value) + _PAIR_BYTES for name, value in self.metadata])
        return _HEADERS_BYTES + len(self.path) + len(self.encoding) + len(self.request_id or b"") + texts


class NotGrpc(Exception):
    """Raised for a valid HTTP request that is not gRPC, with the HTTP status and text of the response."""

    def __init__(self, status: int, message: str, content_length: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.content_length = content_length


class CallHeadersParser:
    """Parses the header fields of requests."""

    def __init__(
        self,
        queues: Mapping[str, list[QueuedCall]],
        request_id_metadata: str = "",
        max_message_bytes: Mapping[str, int] | None = None,
    ) -> None:
        """Map the path of each method to its queue and its message limit.

        `request_id_metadata` is the metadata key whose value becomes `CallHeaders.request_id`; empty: none.
        """
        self._queues = queues
        self._max_message_bytes = max_message_bytes or {}
        self._request_id_metadata = request_id_metadata.lower()

    def read(self, fields: Fields) -> CallHeaders | RpcError:
        """Parse header fields, or return the gRPC error to respond with.

        Raises Http2StreamError if the request is malformed, and NotGrpc if it is not gRPC.
        """
        pseudo = validate_request(fields)
        length = parse_content_length(fields)
        named = dict(fields)
        if pseudo[b":method"] != b"POST":
            raise NotGrpc(405, "this is a gRPC port: the method must be POST", length)
        if not _CONTENT_TYPE.match(named.get(b"content-type", b"")):
            raise NotGrpc(415, "this is a gRPC port: the content-type must be application/grpc", length)
        path = pseudo[b":path"].decode("latin-1")
        queue = self._queues.get(path, STREAMING)
        try:
            left_s = _parse_timeout(named.get(b"grpc-timeout"))
            metadata, binaries = _split_metadata(fields, len(pseudo))
            # Binary values are decoded only where they are used: for streaming calls, and for the request id.
            if queue is STREAMING and binaries:
                metadata = (*metadata, *_decode_binaries(binaries))
            request_id = self._request_id(metadata, binaries) if self._request_id_metadata else None
        except ValueError as error:
            return RpcError(StatusCode.INTERNAL, f"invalid request headers: {error}")
        return CallHeaders(
            path=path,
            deadline_in_s=deadline_in_s(left_s),
            metadata=metadata,
            encoding=named.get(b"grpc-encoding", b"identity"),
            request_id=request_id,
            content_length=length,
            queue=queue,
            max_message_bytes=self._max_message_bytes.get(path, DEFAULT_MAX_MESSAGE_BYTES),
        )

    def _request_id(self, metadata: Metadata, binaries: BinaryMetadata) -> bytes | None:
        """Return the request id, or None if it is missing or empty. Raises ValueError."""
        for name, value in binaries:
            if name == self._request_id_metadata:
                return _decode_base64(value.split(b",", 1)[0].strip()) or None
        for name, text in metadata:
            if name == self._request_id_metadata:
                return (text.encode() if isinstance(text, str) else text) or None
        return None


def decompress(message: bytes, encoding: bytes, max_bytes: int) -> bytes | RpcError:
    """Decompress a message. Stops as soon as the result is larger than allowed."""
    window_bits = _WINDOW_BITS.get(encoding)
    if window_bits is None:
        return RpcError(
            StatusCode.UNIMPLEMENTED, "the message is compressed with an unsupported encoding; use gzip or deflate"
        )
    unpacking = zlib.decompressobj(window_bits)
    try:
        plain = unpacking.decompress(message, max_bytes + 1)
    except zlib.error:
        return RpcError(StatusCode.INTERNAL, "the message cannot be decompressed")
    if len(plain) > max_bytes:
        return replace(message_too_large(max_bytes), reason=Reason.DECOMPRESSION_BOMB)
    if not unpacking.eof:
        return RpcError(StatusCode.INTERNAL, "the compressed message is truncated")
    return plain


def deadline_in_s(timeout_s: float | None) -> float:
    """Return the time until a client stops waiting; never more than the client really waits."""
    if timeout_s is None:
        return inf
    return timeout_s if timeout_s < 1 else timeout_s * (1 - TIMEOUT_ROUNDING)


def _parse_timeout(text: bytes | None) -> float | None:
    if text is None:
        return None
    digits, unit_s = text[:-1], _TIMEOUT_UNITS_S.get(text[-1:])
    if unit_s is None or not digits.isdigit() or len(digits) > _MAX_TIMEOUT_DIGITS:
        raise ValueError("grpc-timeout must be up to eight digits and a unit")
    return int(digits) * unit_s


def _split_metadata(fields: Fields, start: int) -> tuple[Metadata, BinaryMetadata]:
    """Return the text metadata and the undecoded binary metadata of the fields from `start` on."""
    texts: list[tuple[str, str]] = []
    binaries: BinaryMetadata = []
    for name, value in fields[start:]:
        if name in _TRANSPORT_FIELDS or name.startswith(b"grpc-"):
            continue
        if name.endswith(b"-bin"):
            binaries.append((name.decode(), value))
        else:
            texts.append((name.decode(), value.decode("latin-1")))
    return tuple(texts), binaries


def _decode_binaries(binaries: BinaryMetadata) -> Metadata:
    """Decode binary metadata. Raises ValueError if a value is not base64, or if there are too many."""
    # A proxy may join fields of the same name with commas; base64 contains no comma.
    if sum([value.count(b",") + 1 for _, value in binaries]) > MAX_BINARY_VALUES:
        raise ValueError(f"at most {MAX_BINARY_VALUES} values of -bin metadata are allowed")
    return tuple([(name, _decode_base64(part.strip())) for name, value in binaries for part in value.split(b",")])


def _decode_base64(value: bytes) -> bytes:
    """Decode base64 with or without padding. Raises ValueError."""
    try:
        return b64decode(value + b"=" * (-len(value) % 4), validate=True)
    except binascii.Error as error:
        raise ValueError("-bin metadata must be base64") from error
