"""Encoding of client requests: HTTP/2 frames, HPACK blocks and RateLimitRequest messages.

Everything here runs before a measurement; the load generator only copies prebuilt bytes and sets stream ids.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple


class Method(NamedTuple):
    """gRPC method, and the first bytes of a response that allows the request."""

    path: str
    passes: bytes


SHOULD_RATE_LIMIT = Method(
    "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit",
    b"\x08\x01",  # overall_code: OK
)
CHECK = Method(
    "/envoy.service.auth.v3.Authorization/Check",
    b"\x0a\x00",  # empty status: code 0
)
HTTP = Method("", b"")  # HTTP requests with their own headers; the response is judged by its headers only
METHOD = SHOULD_RATE_LIMIT.path
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20

SETTINGS_HEADER_TABLE_SIZE, SETTINGS_ENABLE_PUSH, SETTINGS_MAX_CONCURRENT_STREAMS = 1, 2, 3
SETTINGS_INITIAL_WINDOW_SIZE = 4
DEFAULT_WINDOW_BYTES = 65_535
WIDE_WINDOW_BYTES = 2**31 - 1

NEWEST_ENTRY = 62
"""Index of the newest entry of the dynamic table of HPACK."""

STATIC_NAMES = {":authority": 1, ":path": 4, "content-type": 31}
"""Indices in the static table of HPACK."""

Entry = tuple[str, str]
Descriptor = Sequence[Entry]


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """Encode an HTTP/2 frame."""
    return struct.pack(">IBI", len(payload) << 8 | kind, flags, stream_id) + payload


def settings(values: dict[int, int]) -> bytes:
    """Encode a SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", key, value) for key, value in values.items()))


def opening() -> bytes:
    """Return the start of a connection: preface, no push, and windows so large that no response is delayed."""
    wide = settings({SETTINGS_ENABLE_PUSH: 0, SETTINGS_INITIAL_WINDOW_SIZE: WIDE_WINDOW_BYTES})
    return PREFACE + wide + window_update(WIDE_WINDOW_BYTES - DEFAULT_WINDOW_BYTES)


def window_update(more_bytes: int) -> bytes:
    """Encode a WINDOW_UPDATE of the connection."""
    return frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", more_bytes))


def header_blocks(scheme: str, authority: str, timeout: str | None, path: str = METHOD) -> tuple[bytes, bytes]:
    """Return the header block of a connection's first call and that of all later ones.

    The first adds every header to the peer's dynamic table, the later ones use indices, as Envoy does: servers are
    measured with the few bytes per call that real clients send.
    """
    headers = call_headers(authority, timeout, path)
    first = b"".join(indexed_literal(name, value) for name, value in headers)
    later = bytes(0x80 | NEWEST_ENTRY + age for age in reversed(range(len(headers))))
    return method_and_scheme(scheme) + first, method_and_scheme(scheme) + later


def call_headers(authority: str, timeout: str | None, path: str) -> list[Entry]:
    """Return the headers of a call that are not in the static table of HPACK."""
    headers = [
        (":path", path),
        (":authority", authority),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ]
    return [*headers, ("grpc-timeout", timeout)] if timeout is not None else headers


def method_and_scheme(scheme: str) -> bytes:
    """Return the headers of a call that are in the static table of HPACK."""
    return bytes([0x83, 0x87 if scheme == "https" else 0x86])


def indexed_literal(name: str, value: str) -> bytes:
    """Encode a header that becomes the newest entry of the dynamic table."""
    static_index = STATIC_NAMES.get(name)
    if static_index is not None:
        return bytes([0x40 | static_index]) + _string(value)
    return b"\x40" + _string(name) + _string(value)


def _string(text: str) -> bytes:
    raw = text.encode()
    assert len(raw) < 127, "longer strings need HPACK's multi-byte lengths, which no header of the bench has"
    return bytes([len(raw)]) + raw


def get(headers: Mapping[str, str]) -> bytes:
    """Encode the HEADERS frame of a GET without body. Headers are not indexed, since all of them vary."""
    block = b"\x82\x86"  # GET, http
    for name, value in headers.items():
        index = STATIC_NAMES.get(name, 0)
        assert index < 15, "a larger one needs HPACK's multi-byte integers"
        block += (bytes([index]) if index else b"\x00" + _string(name)) + _string(value)
    return frame(HEADERS, END_HEADERS | END_STREAM, 0, block)


def data(message: bytes) -> bytes:
    """Encode the DATA frame that contains one message and ends the request."""
    return frame(DATA, END_STREAM, 0, struct.pack(">BI", 0, len(message)) + message)


STREAM_ID_OFFSET = 5
"""Offset of the stream id in a frame. Prebuilt frames contain 0; the sender sets it."""


def rate_limit_request(domain: str, descriptors: Iterable[Descriptor]) -> bytes:
    """Encode a RateLimitRequest."""
    return encoded_request(domain, map(descriptor, descriptors))


def encoded_request(domain: str, descriptors: Iterable[bytes]) -> bytes:
    """Encode a RateLimitRequest with descriptors that are already encoded as its fields."""
    return _field(1, domain.encode()) + b"".join(descriptors)


def descriptor(entries: Descriptor) -> bytes:
    """Encode a descriptor as a field of a RateLimitRequest."""
    return _field(2, b"".join(_field(1, _field(1, key.encode()) + _field(2, value.encode())) for key, value in entries))


def _field(number: int, value: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(value)) + value


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
