"""Encoding of gRPC responses. Header blocks use no dynamic table, so they are valid on every connection."""

from __future__ import annotations

import struct
from base64 import b64encode
from collections.abc import Callable, Iterable
from functools import lru_cache
from urllib.parse import quote

from ratelimit_rls.h2.frames import DATA, END_HEADERS, END_STREAM, HEADERS
from ratelimit_rls.h2.hpack import literal

PREFIX = struct.Struct(">BI")
"""Length prefix of a gRPC message: compressed flag and length."""

PREFIX_BYTES = PREFIX.size

RESPONSE_HEADERS = literal(b":status", b"200") + literal(b"content-type", b"application/grpc")
OK_TRAILERS = literal(b"grpc-status", b"0")

_PRINTABLE = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")
_MAX_MESSAGE_LENGTH = 1000
"""Characters of a grpc-message. Each may take twelve bytes, and the header block must fit into one frame."""

_HEADERS_WORD = len(RESPONSE_HEADERS) << 8 | HEADERS
_TRAILERS_WORD = len(OK_TRAILERS) << 8 | HEADERS
_LAST_FLAGS = END_HEADERS | END_STREAM

Metadata = Iterable[tuple[str, str | bytes]]


@lru_cache(4096)
def response_writer(size: int) -> Callable[[int, bytes], bytes]:
    """Return a function (stream id, message) ─► HEADERS, DATA and trailers, for messages of this size.

    It packs all three frames at once, in a third of the time of packing each frame separately.
    """
    pack = struct.Struct(f">IBI{len(RESPONSE_HEADERS)}sIBIBI{size}sIBI{len(OK_TRAILERS)}s").pack
    data_word = size + PREFIX_BYTES << 8 | DATA

    def write(stream_id: int, message: bytes) -> bytes:
        return pack(
            *(_HEADERS_WORD, END_HEADERS, stream_id, RESPONSE_HEADERS),
            *(data_word, 0, stream_id, 0, size, message),
            *(_TRAILERS_WORD, _LAST_FLAGS, stream_id, OK_TRAILERS),
        )

    return write


def add_prefix(message: bytes) -> bytes:
    return PREFIX.pack(0, len(message)) + message


def trailers(code: int, message: str, metadata: Metadata = ()) -> bytes:
    """Return the header block of the trailers, which end a response."""
    block = literal(b"grpc-status", b"%d" % code)
    if message:
        block += _message(message[:_MAX_MESSAGE_LENGTH])
    for name, value in metadata:
        block += literal(name.encode(), b64encode(value) if isinstance(value, bytes) else value.encode())
    return block


@lru_cache(256)
def _message(message: str) -> bytes:
    """Return the encoded field. Most are the same few rejections; encoding takes longer than the rest of a block."""
    return literal(b"grpc-message", quote(message, _PRINTABLE).encode())


def http_headers(code: int) -> bytes:
    """Return the header block of a plain-text HTTP response to a request that is not gRPC."""
    return literal(b":status", b"%d" % code) + literal(b"content-type", b"text/plain")
