"""HPACK header blocks of traced callers: no two are equal, since each contains a new traceparent.

Like grpc-go and Envoy, the encoder adds every header that it has not sent recently to the dynamic table, and compresses
strings with Huffman codes. Each traceparent moves all other entries, and evicts them from the table after about forty
calls, when they are sent again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from random import Random
from typing import Self

from bench import wire

HEADER_TABLE_BYTES = 4096
"""Default size of the dynamic table."""

TRACEPARENT = "traceparent"
VALUE_BYTES = 55
ENTRY_OVERHEAD_BYTES = 32
POOL = 1024
"""Random groups of 16 digits from which trace ids are combined: there are a million, and as many span ids."""

_HUFFMAN = {
    5: {"0": 0x0, "1": 0x1, "2": 0x2, "a": 0x3, "c": 0x4, "e": 0x5},
    6: {"-": 0x16, **{str(digit): 0x16 + digit for digit in range(3, 10)}, "b": 0x23, "d": 0x24, "f": 0x25},
}
"""Codes of the characters of a traceparent by their number of bits (RFC 7541, Appendix B)."""

_CODES = {character: (code, length) for length, codes in _HUFFMAN.items() for character, code in codes.items()}
_INDEXED, _LITERAL = 0x80, 0x40  # first bits of a field; an index follows in the other seven or six

Huffman = tuple[int, int]
"""Bits of a text as a number, and how many they are."""


class TracedHeaderBlocks(Iterator[bytes]):
    """Header blocks of the calls on one connection, in order."""

    def __init__(self, headers: Sequence[wire.Entry], scheme: str) -> None:
        self._headers = headers
        self._start = wire.method_and_scheme(scheme)
        self._random = Random()
        self._groups = [_huffman(f"{self._random.getrandbits(64):016x}") for _ in range(POOL)]
        self._added = 0  # entries that were ever added to the table
        self._entry_bytes: deque[int] = deque()  # of the entries in the table, oldest first
        self._table_bytes = 0
        self._numbers: dict[str, int] = {}  # number of the last entry with this name, counted from the first one

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> bytes:
        block = self._start
        for name, value in self._headers:
            index = self._index(name)
            if index is not None:
                block += _integer(_INDEXED, 7, index)
                continue
            block += wire.indexed_literal(name, value)
            self._add(name, len(value))
        return block + self._traceparent()

    def _traceparent(self) -> bytes:
        index = self._index(TRACEPARENT)
        name = _integer(_LITERAL, 6, index) if index is not None else b"\x40\x0b" + TRACEPARENT.encode()
        self._add(TRACEPARENT, VALUE_BYTES)
        choose, groups = self._random.choice, self._groups
        return name + _string((_VERSION, choose(groups), choose(groups), _DASH, choose(groups), _UNSAMPLED))

    def _index(self, name: str) -> int | None:
        """Return the current index of the last entry with this name; None if it is not in the table."""
        number = self._numbers.get(name)
        if number is None or number < self._added - len(self._entry_bytes):
            return None
        return wire.NEWEST_ENTRY + self._added - 1 - number

    def _add(self, name: str, value_bytes: int) -> None:
        entry_bytes = len(name) + value_bytes + ENTRY_OVERHEAD_BYTES
        while self._table_bytes + entry_bytes > HEADER_TABLE_BYTES:
            self._table_bytes -= self._entry_bytes.popleft()
        self._entry_bytes.append(entry_bytes)
        self._table_bytes += entry_bytes
        self._numbers[name] = self._added
        self._added += 1


def _integer(first_bits: int, prefix_bits: int, value: int) -> bytes:
    """Encode an integer below 128 + the largest that fits into the prefix."""
    largest = (1 << prefix_bits) - 1
    return bytes([first_bits | value]) if value < largest else bytes([first_bits | largest, value - largest])


def _huffman(text: str) -> Huffman:
    bits = length = 0
    for character in text:
        code, code_length = _CODES[character]
        bits, length = bits << code_length | code, length + code_length
    return bits, length


_VERSION, _DASH, _UNSAMPLED = map(_huffman, ("00-", "-", "-00"))


def _string(parts: Sequence[Huffman]) -> bytes:
    """Encode a string of fewer than 127 bytes with Huffman codes, padded with ones."""
    bits = length = 0
    for part_bits, part_length in parts:
        bits, length = bits << part_length | part_bits, length + part_length
    padding = -length % 8
    encoded = (bits << padding | (1 << padding) - 1).to_bytes((length + padding) // 8, "big")
    return bytes([0x80 | len(encoded)]) + encoded
