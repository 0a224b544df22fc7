"""Fast reader of a server's header blocks, which caches blocks by their bytes.

A block that consists of table indices does not change the HPACK table, so its meaning is cached until the table
changes. Strings are not decoded; the few relevant ones are known in both encodings.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import unquote

Header = tuple[bytes, bytes]

STATIC_ENTRIES = 61
TABLE_BYTES = 4096
ENTRY_OVERHEAD_BYTES = 32

# String literals as encoded in a block, including the length byte with the Huffman bit.
GRPC_STATUS = (b"\x0bgrpc-status", b"\x88\x9a\xca\xc8\xb2\x12\x34\xda\x8f")
ZERO = (b"\x010", b"\x81\x07")
STATIC = b"\x06static"  # placeholder for names of the static table, none of which matters here


class UnreadableBlock(Exception):
    """A header block with unsupported encoding."""


@dataclass(slots=True)
class HeaderBlockReader:
    """Reader of the header blocks of one connection."""

    known: set[bytes] = field(default_factory=set)  # cached blocks
    known_ok: set[bytes] = field(default_factory=set)  # cached blocks with grpc-status 0
    _last: list[Header] = field(default_factory=list)
    _table: list[Header] = field(default_factory=list)  # newest first
    _table_bytes: int = 0

    def read(self, block: bytes) -> bool:
        """Return True if the block contains grpc-status 0; cache it if it does not change the table."""
        headers, table_changed = self._decode(block)
        self._last = headers
        ok = any(name in GRPC_STATUS and value in ZERO for name, value in headers)
        if table_changed:
            self.known.clear()
            self.known_ok.clear()
        else:
            self.known.add(block)
            if ok:
                self.known_ok.add(block)
        return ok

    def last_headers(self) -> str:
        """Return the last block as text."""
        return ", ".join(f"{_text(name)}: {_text(value)}" for name, value in self._last if name != STATIC)

    def _decode(self, block: bytes) -> tuple[list[Header], bool]:
        headers: list[Header] = []
        changed = False
        at = 0
        while at < len(block):
            first = block[at]
            if first & 0x80:  # indexed field
                index, at = _integer(block, at, 7)
                headers.append(self._entry(index))
            elif first & 0xE0 == 0x20:  # dynamic table size update: 0 and then 4096 clears it
                size, at = _integer(block, at, 5)
                if size < TABLE_BYTES:
                    self._table, self._table_bytes = [], 0
                changed = True
            else:
                adds = first & 0xC0 == 0x40
                header, at = self._literal(block, at, 6 if adds else 4)
                headers.append(header)
                if adds:
                    self._add(header)
                    changed = True
        return headers, changed

    def _literal(self, block: bytes, at: int, prefix_bits: int) -> tuple[Header, int]:
        index, at = _integer(block, at, prefix_bits)
        if index:
            name = self._entry(index)[0]
        else:
            name, at = _string(block, at)
        value, at = _string(block, at)
        return (name, value), at

    def _entry(self, index: int) -> Header:
        if index <= STATIC_ENTRIES:
            return (STATIC, bytes([index]))
        try:
            return self._table[index - STATIC_ENTRIES - 1]
        except IndexError:
            raise UnreadableBlock(f"header index {index} with {len(self._table)} entries in the table") from None

    def _add(self, header: Header) -> None:
        # Huffman-coded text has at most 8/5 of its bytes; below this bound nothing was evicted, whatever the encoding.
        self._table_bytes += sum(len(part) * 8 // 5 for part in header) + ENTRY_OVERHEAD_BYTES
        if self._table_bytes > TABLE_BYTES:
            raise UnreadableBlock("the server sends ever new headers: its table has begun to forget the first ones")
        self._table.insert(0, header)


def _integer(block: bytes, at: int, prefix_bits: int) -> tuple[int, int]:
    most = (1 << prefix_bits) - 1
    value = block[at] & most
    at += 1
    if value < most:
        return value, at
    shift = 0
    while True:
        byte = block[at]
        at += 1
        value += (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            return value, at


def _string(block: bytes, at: int) -> tuple[bytes, int]:
    start = at
    size, at = _integer(block, at, 7)
    return block[start : at + size], at + size


def _text(string: bytes) -> str:
    length, start = _integer(string, 0, 7)
    raw = string[start : start + length]
    if string[0] & 0x80:
        # Only needed for an error message, so the hpack package is optional.
        try:
            from hpack.huffman_table import decode_huffman
        except ImportError:
            return f"(Huffman) {raw.hex()}"
        raw = decode_huffman(raw)
    return unquote(raw.decode(errors="replace"))
