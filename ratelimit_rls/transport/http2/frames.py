"""Frames (RFC 9113, §4 and §6): their numbers, how they are written, and what a peer may not do with them."""

from __future__ import annotations

import struct
from enum import IntEnum

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)

END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
WITH_PRIORITY = 0x20

FRAME_HEADER_BYTES = 9
MOST_FRAME_BYTES = 16_384
"""Of a payload, as long as nobody has said that they take more. We do not say so."""

PRIORITY_BYTES = 5
LARGEST_FRAME_BYTES = 2**24 - 1
DEFAULT_WINDOW_BYTES = 65_535
DEFAULT_TABLE_BYTES = 4096
NO_TABLE = b"\x20"
"""In a header block, first: from here on nothing is kept in the table behind it."""

LARGEST_WINDOW_BYTES = 2**31 - 1
LARGEST_STREAM_ID = 2**31 - 1
STREAM_ID_BITS = 0x7FFFFFFF

HEADER = struct.Struct(">IBi")
"""Length and kind in one word (length << 8 | kind), flags, stream id.

The id's first bit means nothing, and nobody sets it. Read with a sign, an id that has it equals no other, and whoever
looks closer takes it off with STREAM_ID_BITS.
"""


class Setting(IntEnum):
    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class ErrorCode(IntEnum):
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


class ConnectionFault(Exception):
    """The peer broke the protocol in a way that ends the connection."""

    def __init__(self, code: ErrorCode, words: str) -> None:
        super().__init__(words)
        self.code = code


class StreamFault(Exception):
    """The peer broke the protocol in a way that ends one stream."""

    def __init__(self, code: ErrorCode) -> None:
        super().__init__(code.name)
        self.code = code


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    return HEADER.pack(len(payload) << 8 | kind, flags, stream_id) + payload


def settings(values: dict[Setting, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", name, value) for name, value in values.items()))


def window_update(stream_id: int, more_bytes: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream_id, more_bytes.to_bytes(4, "big"))


def reset(stream_id: int, code: ErrorCode) -> bytes:
    return frame(RST_STREAM, 0, stream_id, code.to_bytes(4, "big"))


def go_away(last_stream_id: int, code: ErrorCode, words: str = "") -> bytes:
    return frame(GOAWAY, 0, 0, struct.pack(">II", last_stream_id, code) + words.encode())


def read_settings(payload: bytes) -> dict[int, int]:
    """Raises ConnectionFault if a value cannot be. Settings that nobody knows are there, too; they mean nothing."""
    if len(payload) % 6:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS that end within a setting")
    values: dict[int, int] = dict(struct.iter_unpack(">HI", payload))
    if values.get(Setting.ENABLE_PUSH, 0) > 1:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "ENABLE_PUSH is neither 0 nor 1")
    if values.get(Setting.INITIAL_WINDOW_SIZE, 0) > LARGEST_WINDOW_BYTES:
        raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "INITIAL_WINDOW_SIZE is too large")
    if not MOST_FRAME_BYTES <= values.get(Setting.MAX_FRAME_SIZE, MOST_FRAME_BYTES) <= LARGEST_FRAME_BYTES:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "MAX_FRAME_SIZE is out of range")
    return values


def read_window_update(payload: bytes) -> int:
    """By how much a window grows; 0 is an error that the caller knows how far it reaches."""
    return int.from_bytes(payload, "big") & LARGEST_WINDOW_BYTES


def without_padding(flags: int, payload: bytes) -> bytes:
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "more padding than there is payload")
    return payload[1 : len(payload) - payload[0]]


def check_priority(stream_id: int, priority: bytes) -> None:
    """Raises ConnectionFault if it is none. What it says is not heeded: calls are answered as they are decided."""
    if len(priority) < PRIORITY_BYTES:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "a priority is cut short")
    if int.from_bytes(priority[:4], "big") & STREAM_ID_BITS == stream_id:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a stream depends on itself")


def check_length(kind: int, stream_id: int, payload: bytes) -> None:
    """Raises ConnectionFault for frames whose length, or stream, is fixed and another."""
    fixed = _LENGTHS.get(kind)
    if fixed is not None and len(payload) != fixed:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"a frame of kind {kind} with {len(payload)} bytes")
    if (kind in _OF_STREAMS and not stream_id) or (kind in _OF_THE_CONNECTION and stream_id):
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"a frame of kind {kind} on stream {stream_id}")


_LENGTHS = {RST_STREAM: 4, PING: 8, WINDOW_UPDATE: 4}
_OF_STREAMS = frozenset({DATA, HEADERS, PRIORITY, RST_STREAM, CONTINUATION})
_OF_THE_CONNECTION = frozenset({SETTINGS, PING, GOAWAY})
