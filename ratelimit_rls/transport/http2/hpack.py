"""Header blocks (HPACK, RFC 7541): a peer's are read with a table that follows its own, ours are written without one.

What a block means depends on all blocks before it, so every block of a connection is read to its end, whatever becomes
of its stream.
"""

from __future__ import annotations

from functools import lru_cache

from ratelimit_rls.transport.http2 import huffman
from ratelimit_rls.transport.http2.huffman import HpackError

__all__ = ["Decoder", "HpackError", "literal"]

Field = tuple[bytes, bytes]

_NAMES_ALONE = (
    b"accept-language accept-ranges accept access-control-allow-origin age allow authorization cache-control "
    b"content-disposition content-encoding content-language content-length content-location content-range content-type "
    b"cookie date etag expect expires from host if-match if-modified-since if-none-match if-range if-unmodified-since "
    b"last-modified link location max-forwards proxy-authenticate proxy-authorization range referer refresh "
    b"retry-after server set-cookie strict-transport-security transfer-encoding user-agent vary via www-authenticate"
)
STATIC_TABLE: tuple[Field, ...] = (
    (b":authority", b""),
    (b":method", b"GET"),
    (b":method", b"POST"),
    (b":path", b"/"),
    (b":path", b"/index.html"),
    (b":scheme", b"http"),
    (b":scheme", b"https"),
    (b":status", b"200"),
    (b":status", b"204"),
    (b":status", b"206"),
    (b":status", b"304"),
    (b":status", b"400"),
    (b":status", b"404"),
    (b":status", b"500"),
    (b"accept-charset", b""),
    (b"accept-encoding", b"gzip, deflate"),
    *((name, b"") for name in _NAMES_ALONE.split()),
)
"""Appendix A. The first one has index 1."""

FIRST_TABLE_BYTES = 4096
"""How large a peer's table is before it says otherwise, whatever our settings: they may not have reached it yet."""

FIELD_OVERHEAD_BYTES = 32
"""What a field counts for beyond its name and its value, in a table as in a list."""

MOST_INTEGER = 2**31
"""Beyond any length or index that could be meant."""

MOST_RECALLED = 512

_NEWEST = 1 + len(STATIC_TABLE)
_LARGEST_STATIC_BYTES = max(len(name) + len(value) for name, value in STATIC_TABLE) + FIELD_OVERHEAD_BYTES
_INDEX_OF_FIELD = {field: index for index, field in enumerate(STATIC_TABLE, 1)}
_INDEX_OF_NAME = {name: _INDEX_OF_FIELD[name, value] for name, value in reversed(STATIC_TABLE)}

_recalled = lru_cache(MOST_RECALLED)(huffman.decode)
"""For strings that come with every call. They are short: what is kept is a quarter of a megabyte at most."""


class Decoder:
    """What the header blocks of one connection mean, in the order in which they come.

    Guarantee: a block that is read without a change of `changes` means the same again until the next change.
    """

    def __init__(self, most_table_bytes: int = FIRST_TABLE_BYTES, most_list_bytes: int = 16_384) -> None:
        """`most_table_bytes`: as our settings have it (SETTINGS_HEADER_TABLE_SIZE)."""
        self.changes = 0  # of the table's entries or its size
        self._most_table_bytes = most_table_bytes
        self._most_list_bytes = most_list_bytes
        self._fields = [(b"", b""), *STATIC_TABLE]  # by index, so that the newest is the first after the static ones
        self._table_bytes = FIRST_TABLE_BYTES
        self._free_bytes = FIRST_TABLE_BYTES
        self._largest_bytes = _LARGEST_STATIC_BYTES  # of all fields there ever were

    def decode(self, block: bytes) -> list[Field] | None:
        """The header list; None if it is too large. The table is then as the peer believes it to be, all the same.

        Raises HpackError. Fields that the block refers to are not copied: however large they are, a list takes no more
        than forty bytes for each byte of its block.
        """
        fields = self._fields
        headers: list[Field] = []
        at, end = 0, len(block)
        try:
            while at < end:
                first = block[at]
                at += 1
                if first > 0x80:  # a field of the table: most are, so nothing is called for it
                    index = first - 0x80
                    if index == 0x7F:
                        index, at = _integer(block, at, 0x7F)
                    headers.append(fields[index])
                    continue
                added = first & 0x40
                if added:
                    prefix = 0x3F
                elif first < 0x20:  # from 0x10 on, whoever passes the field on must not add it either: we pass on none
                    prefix = 0x0F
                elif first < 0x40:
                    if headers:
                        raise HpackError("a table size update after a field")
                    at = self._resize(block, at, first - 0x20)
                    continue
                else:
                    raise HpackError("a field with index 0")
                index = first & prefix
                if index == prefix:
                    index, at = _integer(block, at, prefix)
                if index:
                    name = fields[index][0]
                else:
                    name, at = _string(block, at)
                value, at = _string(block, at)
                field = name, value
                headers.append(field)
                size = len(name) + len(value) + FIELD_OVERHEAD_BYTES
                if size > self._largest_bytes:
                    self._largest_bytes = size
                if added:
                    self._add(field, size)
        except IndexError:
            raise HpackError("a block that ends within a field, or an index outside the table") from None
        # Most lists need not be measured: even of the largest field so many would fit.
        if len(headers) * self._largest_bytes > self._most_list_bytes and _size(headers) > self._most_list_bytes:
            return None
        return headers

    def _resize(self, block: bytes, at: int, size: int) -> int:
        if size == 0x1F:
            size, at = _integer(block, at, 0x1F)
        if size > self._most_table_bytes:
            raise HpackError(f"a table of {size} bytes, where {self._most_table_bytes} are allowed")
        if size != self._table_bytes:
            self.changes += 1
            self._free_bytes = self._evict(self._free_bytes + size - self._table_bytes)
            self._table_bytes = size
        return at

    def _add(self, field: Field, size: int) -> None:
        self.changes += 1
        free = self._free_bytes - size
        if free < 0:
            free = self._evict(free)
        if free >= 0:
            self._fields.insert(_NEWEST, field)
            self._free_bytes = free
        else:  # larger than the table, which is empty now: as the RFC wants it, and no error
            self._free_bytes = self._table_bytes

    def _evict(self, free: int) -> int:
        """How many bytes are free, where so many would be, after as many of the oldest fields have gone as must."""
        fields = self._fields
        while free < 0 and len(fields) > _NEWEST:
            name, value = fields.pop()
            free += len(name) + len(value) + FIELD_OVERHEAD_BYTES
        return free


def literal(name: bytes, value: bytes) -> bytes:
    """A field as it means the same on every connection: of the static table, or written out; never added to a table."""
    index = _INDEX_OF_FIELD.get((name, value))
    if index is not None:
        return bytes([0x80 + index])
    index = _INDEX_OF_NAME.get(name)
    if index is not None:
        return _written_integer(index, 0x0F) + _written_string(value)
    return b"\x00" + _written_string(name) + _written_string(value)


def _integer(block: bytes, at: int, value: int) -> tuple[int, int]:
    """What an integer is that has more than its prefix, and where it ends. `value` is the prefix: all ones."""
    byte = block[at]
    if byte < 0x80:
        return value + byte, at + 1
    for shift in (0, 7, 14, 21, 28):
        byte = block[at]
        at += 1
        value += (byte & 0x7F) << shift
        if byte < 0x80:
            if value > MOST_INTEGER:
                break
            return value, at
    raise HpackError("an integer that is too large")


def _string(block: bytes, at: int) -> tuple[bytes, int]:
    first = block[at]
    at += 1
    length = first & 0x7F
    if length == 0x7F:
        length, at = _integer(block, at, 0x7F)
    end = at + length
    if end > len(block):
        raise HpackError("a string that ends after its block")
    string = block[at:end]
    if first >= 0x80:
        string = _recalled(string) if length < 0x7F else huffman.decode(string)
    return string, end


def _size(headers: list[Field]) -> int:
    return sum(len(name) + len(value) + FIELD_OVERHEAD_BYTES for name, value in headers)


def _written_integer(value: int, prefix: int) -> bytes:
    if value < prefix:
        return bytes([value])
    octets = bytearray([prefix])
    value -= prefix
    while value >= 0x80:
        octets.append(0x80 | value & 0x7F)
        value >>= 7
    octets.append(value)
    return bytes(octets)


def _written_string(string: bytes) -> bytes:
    return _written_integer(len(string), 0x7F) + string
