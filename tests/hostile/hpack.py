"""HPACK encoding for attackers: field by field, without an encoder that follows the rules."""

from __future__ import annotations

POST_HTTP = b"\x83\x86"


def integer(value: int, prefix_bits: int, pattern: int = 0) -> bytes:
    """Encode an integer (RFC 7541, section 5.1); `pattern` is the bits before the prefix."""
    most = 2**prefix_bits - 1
    if value < most:
        return bytes([pattern | value])
    octets = bytearray([pattern | most])
    value -= most
    while value >= 0x80:
        octets.append(0x80 | value & 0x7F)
        value >>= 7
    octets.append(value)
    return bytes(octets)


def string(text: bytes) -> bytes:
    return integer(len(text), 7) + text


def indexed(index: int) -> bytes:
    return integer(index, 7, 0x80)


def literal(name: bytes, value: bytes) -> bytes:
    """Encode a field that is not added to the peer's table."""
    return b"\x00" + string(name) + string(value)


def added(name: bytes, value: bytes) -> bytes:
    """Encode a field that is added to the peer's table as the newest."""
    return b"\x40" + string(name) + string(value)


def resized(table_bytes: int) -> bytes:
    return integer(table_bytes, 5, 0x20)


NEWEST = indexed(62)


def call(path: str, *more: bytes) -> bytes:
    """Encode the header block of a gRPC call; `more` are additional fields."""
    fields = [
        b"\x04" + string(path.encode()),
        b"\x01" + string(b"ratelimit"),
        integer(31, 4) + string(b"application/grpc"),
        literal(b"te", b"trailers"),
    ]
    return POST_HTTP + b"".join(fields) + b"".join(more)
