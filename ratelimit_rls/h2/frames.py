"""HTTP/2 frames (RFC 9113, sections 4 and 6): constants, encoding and validation."""

from __future__ import annotations

import struct
from enum import IntEnum, StrEnum

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)

END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
PRIORITY_FLAG = 0x20

FRAME_HEADER_BYTES = 9
MAX_FRAME_BYTES = 16_384
"""Largest payload by default (initial SETTINGS_MAX_FRAME_SIZE). We never announce a larger one."""

PRIORITY_BYTES = 5
MAX_FRAME_SIZE_SETTING = 2**24 - 1
DEFAULT_WINDOW_BYTES = 65_535
DEFAULT_TABLE_BYTES = 4096
EMPTY_TABLE_UPDATE = b"\x20"
"""Dynamic table size update to 0, at the start of a header block."""

MAX_WINDOW_BYTES = 2**31 - 1
MAX_STREAM_ID = 2**31 - 1
STREAM_ID_BITS = 0x7FFFFFFF

HEADER = struct.Struct(">IBi")
"""Frame header: length and type in one word (length << 8 | type), flags, stream id.

The first bit of the id is reserved and never set in practice. The id is read as a signed number, so that an id with
this bit equals no other; the slow path removes the bit with STREAM_ID_BITS.
"""


class Setting(IntEnum):
    """Identifiers of SETTINGS parameters."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class ErrorCode(IntEnum):
    """Error codes of RST_STREAM and GOAWAY."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class Http2ConnectionError(Exception):
    """Connection error (RFC 9113, section 5.4.1): the peer violated the protocol, and the connection must be closed."""

    def __init__(self, code: ErrorCode, message: str, reason: StrEnum | None = None) -> None:
        """`reason` is a Reason, or one of the application; None for an ordinary mistake."""
        super().__init__(message)
        self.code = code
        self.reason = reason


class Http2StreamError(Exception):
    """Stream error (RFC 9113, section 5.4.2): the peer violated the protocol, and the stream must be reset."""

    def __init__(self, code: ErrorCode) -> None:
        super().__init__(code.name)
        self.code = code


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    return HEADER.pack(len(payload) << 8 | kind, flags, stream_id) + payload


def settings(values: dict[Setting, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", name, value) for name, value in values.items()))


def window_update(stream_id: int, more_bytes: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream_id, more_bytes.to_bytes(4, "big"))


def rst_stream(stream_id: int, code: ErrorCode) -> bytes:
    return frame(RST_STREAM, 0, stream_id, code.to_bytes(4, "big"))


def goaway(last_stream_id: int, code: ErrorCode, message: str = "") -> bytes:
    return frame(GOAWAY, 0, 0, struct.pack(">II", last_stream_id, code) + message.encode())


def parse_settings(payload: bytes) -> dict[int, int]:
    """Parse SETTINGS, including unknown settings. Raises Http2ConnectionError if a value is invalid."""
    if len(payload) % 6:
        raise Http2ConnectionError(
            ErrorCode.FRAME_SIZE_ERROR, f"SETTINGS: length {len(payload)}, expected a multiple of 6"
        )
    values: dict[int, int] = dict(struct.iter_unpack(">HI", payload))
    if values.get(Setting.ENABLE_PUSH, 0) > 1:
        raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "ENABLE_PUSH must be 0 or 1")
    if values.get(Setting.INITIAL_WINDOW_SIZE, 0) > MAX_WINDOW_BYTES:
        raise Http2ConnectionError(ErrorCode.FLOW_CONTROL_ERROR, "INITIAL_WINDOW_SIZE must be at most 2**31 - 1")
    if not MAX_FRAME_BYTES <= values.get(Setting.MAX_FRAME_SIZE, MAX_FRAME_BYTES) <= MAX_FRAME_SIZE_SETTING:
        raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "MAX_FRAME_SIZE must be from 2**14 to 2**24 - 1")
    return values


def parse_window_update(payload: bytes) -> int:
    """Return the increment. 0 is an error; whether of the stream or of the connection, the caller decides."""
    return int.from_bytes(payload, "big") & MAX_WINDOW_BYTES


def strip_padding(flags: int, payload: bytes) -> bytes:
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "padding must be shorter than the payload")
    return payload[1 : len(payload) - payload[0]]


def check_priority(stream_id: int, priority: bytes) -> None:
    """Validate a priority, which is otherwise ignored. Raises Http2ConnectionError.

    Responses are sent in the order in which calls are decided.
    """
    if len(priority) < PRIORITY_BYTES:
        raise Http2ConnectionError(
            ErrorCode.FRAME_SIZE_ERROR, f"priority: length {len(priority)}, expected {PRIORITY_BYTES}"
        )
    if int.from_bytes(priority[:4], "big") & STREAM_ID_BITS == stream_id:
        raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "a stream must not depend on itself")


def check_length(kind: int, stream_id: int, payload: bytes) -> None:
    """Check length and stream id of frame types that fix them. Raises Http2ConnectionError."""
    fixed = _LENGTHS.get(kind)
    if fixed is not None and len(payload) != fixed:
        raise Http2ConnectionError(
            ErrorCode.FRAME_SIZE_ERROR, f"{_NAMES[kind]}: length {len(payload)}, expected {fixed}"
        )
    if (kind in _STREAM_FRAMES and not stream_id) or (kind in _CONNECTION_FRAMES and stream_id):
        raise Http2ConnectionError(
            ErrorCode.PROTOCOL_ERROR, f"{_NAMES[kind]} must {'not ' if stream_id == 0 else ''}be on stream 0"
        )


_NAMES = {
    DATA: "DATA",
    HEADERS: "HEADERS",
    PRIORITY: "PRIORITY",
    RST_STREAM: "RST_STREAM",
    SETTINGS: "SETTINGS",
    PING: "PING",
    GOAWAY: "GOAWAY",
    WINDOW_UPDATE: "WINDOW_UPDATE",
    CONTINUATION: "CONTINUATION",
}
_LENGTHS = {RST_STREAM: 4, PING: 8, WINDOW_UPDATE: 4}
_STREAM_FRAMES = frozenset({DATA, HEADERS, PRIORITY, RST_STREAM, CONTINUATION})
_CONNECTION_FRAMES = frozenset({SETTINGS, PING, GOAWAY})
