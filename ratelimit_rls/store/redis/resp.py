"""RESP encoding of commands."""

from __future__ import annotations


def bulk(value: bytes) -> bytes:
    """Encode a bulk string."""
    return b"$%d\r\n%s\r\n" % (len(value), value)


def bulk_value(encoded: bytes) -> bytes:
    """Return the value of an encoded bulk string."""
    return encoded[encoded.index(b"\n") + 1 : -2]


def command(*arguments: bytes) -> bytes:
    return b"*%d\r\n%s" % (len(arguments), b"".join(map(bulk, arguments)))
