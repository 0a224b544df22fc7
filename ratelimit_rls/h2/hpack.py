"""HPACK (RFC 7541): a decoder with a dynamic table, and an encoder without one.

The meaning of a block depends on all blocks before it, so every block of a connection is decoded completely, even if
its stream is rejected.
"""

from __future__ import annotations

from functools import lru_cache

from ratelimit_rls.h2 import huffman
from ratelimit_rls.h2.huffman import HpackError

__all__ = ["Decoder", "HpackError", "HpackLimitError", "literal"]

Field = tuple[bytes, bytes]

_NAMES_WITHOUT_VALUE = (
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
    *((name, b"") for name in _NAMES_WITHOUT_VALUE.split()),
)
"""RFC 7541, appendix A. The first entry has index 1."""

INITIAL_TABLE_BYTES = 4096
"""Initial size of the peer's table, regardless of our settings, which may not have reached the peer yet."""

FIELD_OVERHEAD_BYTES = 32
"""Size of a field beyond its name and value, both in the table and in a header list (RFC 7541, section 4.1)."""

MAX_INTEGER = 2**31
"""Larger than any valid length or index."""

MAX_FIELDS = 100
"""Maximum number of fields in a header list, as in Envoy (`max_headers_count`). A longer list is not returned."""

MAX_FIELDS_READ = 1000
"""Maximum number of fields in a block. A list that is too long is decoded to its end to keep the table in sync; beyond
this many fields, closing the connection is cheaper."""

MAX_SIZE_UPDATES = 2
"""Table size updates at the start of a block: the smallest size since the last block, and the current one (RFC 7541,
section 4.2)."""

MAX_CACHED_STRINGS = 512

_FIRST_DYNAMIC = 1 + len(STATIC_TABLE)
_MAX_STATIC_BYTES = max(len(name) + len(value) for name, value in STATIC_TABLE) + FIELD_OVERHEAD_BYTES
_INDEX_OF_FIELD = {field: index for index, field in enumerate(STATIC_TABLE, 1)}
_INDEX_OF_NAME = {name: _INDEX_OF_FIELD[name, value] for name, value in reversed(STATIC_TABLE)}

_decode_huffman = lru_cache(MAX_CACHED_STRINGS)(huffman.decode)
"""Caches strings that are repeated with every call. They are short: the cache takes at most a quarter of a megabyte."""


class HpackLimitError(HpackError):
    """A block has too many fields or table size updates."""


class Decoder:
    """Decoder for the header blocks of one connection, in the order in which they arrive.

    Guarantee: if `table_version` is the same before and after a block, the block decodes to the same list until the
    version changes.
    """

    def __init__(
        self,
        max_table_bytes: int = INITIAL_TABLE_BYTES,
        max_list_bytes: int = 16_384,
        max_fields: int = MAX_FIELDS,
    ) -> None:
        """`max_table_bytes` is SETTINGS_HEADER_TABLE_SIZE as we announce it."""
        self.table_version = 0  # incremented when the entries or the size of the table change
        self.field_count = 0  # fields of the last block, even if its list was not returned
        self._max_fields = max_fields
        self._max_table_bytes = max_table_bytes
        self._max_list_bytes = max_list_bytes
        self._fields = [(b"", b""), *STATIC_TABLE]  # by index: the newest follows the static table
        self._table_bytes = INITIAL_TABLE_BYTES
        self._free_bytes = INITIAL_TABLE_BYTES
        self._largest_bytes = _MAX_STATIC_BYTES  # largest field so far

    def decode(self, block: bytes) -> list[Field] | None:
        """Return the header list, or None if it is too large or has too many fields. Updates the table in either case.

        Raises HpackError. The work is proportional to the size of the block. Indexed fields are not copied: however
        large they are, a list takes at most forty bytes for each byte of its block.
        """
        fields = self._fields
        headers: list[Field] = []
        at, end = 0, len(block)
        size_updates = 0
        try:
            while at < end:
                first = block[at]
                at += 1
                if first > 0x80:  # indexed field: the most frequent case, so it is handled inline
                    index = first - 0x80
                    if index == 0x7F:
                        index, at = _decode_integer(block, at, 0x7F)
                    headers.append(fields[index])
                    continue
                added = first & 0x40
                if added:
                    prefix = 0x3F
                elif first < 0x20:  # from 0x10 on, intermediaries must not index the field either; we are none
                    prefix = 0x0F
                elif first < 0x40:
                    if headers:
                        raise HpackError("table size update must precede all fields of a block")
                    size_updates += 1
                    if size_updates > MAX_SIZE_UPDATES:
                        raise HpackLimitError(
                            f"at most {MAX_SIZE_UPDATES} table size updates are allowed in a header block"
                        )
                    at = self._resize(block, at, first - 0x20)
                    continue
                else:
                    raise HpackError("index must not be 0")
                index = first & prefix
                if index == prefix:
                    index, at = _decode_integer(block, at, prefix)
                if index:
                    name = fields[index][0]
                else:
                    name, at = _decode_string(block, at)
                value, at = _decode_string(block, at)
                field = name, value
                headers.append(field)
                size = len(name) + len(value) + FIELD_OVERHEAD_BYTES
                if size > self._largest_bytes:
                    self._largest_bytes = size
                if added:
                    self._add(field, size)
                if len(headers) > MAX_FIELDS_READ:  # a literal takes as long as 20 indexed fields
                    break
        except IndexError:
            raise HpackError("truncated field, or index outside the table") from None
        self.field_count = count = len(headers)
        if count > self._max_fields:
            if count > MAX_FIELDS_READ:
                raise HpackLimitError(f"at most {MAX_FIELDS_READ} fields are allowed in a header block")
            return None
        # Most lists need not be measured: even if all fields were as large as the largest one, they would fit.
        if count * self._largest_bytes > self._max_list_bytes and _list_bytes(headers) > self._max_list_bytes:
            return None
        return headers

    def _resize(self, block: bytes, at: int, size: int) -> int:
        if size == 0x1F:
            size, at = _decode_integer(block, at, 0x1F)
        if size > self._max_table_bytes:
            raise HpackError(f"table size must be at most {self._max_table_bytes} bytes, not {size}")
        if size != self._table_bytes:
            self.table_version += 1
            self._free_bytes = self._evict(self._free_bytes + size - self._table_bytes)
            self._table_bytes = size
        return at

    def _add(self, field: Field, size: int) -> None:
        self.table_version += 1
        free = self._free_bytes - size
        if free < 0:
            free = self._evict(free)
        if free >= 0:
            self._fields.insert(_FIRST_DYNAMIC, field)
            self._free_bytes = free
        else:  # larger than the table, which is now empty: not an error (RFC 7541, section 4.4)
            self._free_bytes = self._table_bytes

    def _evict(self, free: int) -> int:
        """Evict the oldest entries until `free` ≥ 0 or the table is empty. Return the number of free bytes."""
        fields = self._fields
        while free < 0 and len(fields) > _FIRST_DYNAMIC:
            name, value = fields.pop()
            free += len(name) + len(value) + FIELD_OVERHEAD_BYTES
        return free


def literal(name: bytes, value: bytes) -> bytes:
    """Encode a field so that it is valid on every connection: indexed in the static table, or literal; never added to
    the dynamic table."""
    index = _INDEX_OF_FIELD.get((name, value))
    if index is not None:
        return bytes([0x80 + index])
    index = _INDEX_OF_NAME.get(name)
    if index is not None:
        return _encode_integer(index, 0x0F) + _encode_string(value)
    return b"\x00" + _encode_string(name) + _encode_string(value)


def _decode_integer(block: bytes, at: int, value: int) -> tuple[int, int]:
    """Decode an integer that does not fit into its prefix. `value` is the prefix, all ones. Return the integer and its
    end."""
    byte = block[at]
    if byte < 0x80:
        return value + byte, at + 1
    for shift in (0, 7, 14, 21, 28):
        byte = block[at]
        at += 1
        value += (byte & 0x7F) << shift
        if byte < 0x80:
            if value > MAX_INTEGER:
                break
            return value, at
    raise HpackError(f"integer must be at most {MAX_INTEGER}")


def _decode_string(block: bytes, at: int) -> tuple[bytes, int]:
    first = block[at]
    at += 1
    length = first & 0x7F
    if length == 0x7F:
        length, at = _decode_integer(block, at, 0x7F)
    end = at + length
    if end > len(block):
        raise HpackError("string extends beyond its block")
    string = block[at:end]
    if first >= 0x80:
        string = _decode_huffman(string) if length < 0x7F else huffman.decode(string)
    return string, end


def _list_bytes(headers: list[Field]) -> int:
    return sum(len(name) + len(value) + FIELD_OVERHEAD_BYTES for name, value in headers)


def _encode_integer(value: int, prefix: int) -> bytes:
    if value < prefix:
        return bytes([value])
    octets = bytearray([prefix])
    value -= prefix
    while value >= 0x80:
        octets.append(0x80 | value & 0x7F)
        value >>= 7
    octets.append(value)
    return bytes(octets)


def _encode_string(string: bytes) -> bytes:
    return _encode_integer(len(string), 0x7F) + string
