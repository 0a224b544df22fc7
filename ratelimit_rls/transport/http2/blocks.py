"""Header blocks: put together from their frames, read, and remembered for as long as they mean the same."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

from ratelimit_rls.transport.http2.frames import (
    END_HEADERS,
    FRAME_HEADER_BYTES,
    PRIORITY_BYTES,
    WITH_PRIORITY,
    ConnectionFault,
    ErrorCode,
    check_priority,
    without_padding,
)
from ratelimit_rls.transport.http2.hpack import Decoder, HpackError
from ratelimit_rls.transport.http2.requests import Fields

MOST_BLOCK_BYTES = 65_536
"""Of one block, over all its frames."""

MOST_LIST_BYTES = 32_768
"""Of what it says."""

MOST_KNOWN = 256
MOST_KNOWN_BYTES = 2**20
"""Of what they say and how it is written. Blocks that callers repeat have a few hundred bytes."""

T = TypeVar("T")


class Block(NamedTuple):
    """One that is whole."""

    flags: int  # of its first frame
    stream_id: int
    written: bytes
    fields: Fields | None  # None: it says more than is read
    is_lasting: bool  # the same bytes will mean the same


class Blocks(Generic[T]):
    """Of one connection.

    A client repeats a block to the byte as long as nothing in it changes, and the table behind it stays as it is. So
    what was made of a block is in `known` under its bytes, until the table changes.
    """

    def __init__(self) -> None:
        self.known: dict[bytes, T] = {}
        self._known_bytes = 0
        self._decoder = Decoder(most_list_bytes=MOST_LIST_BYTES)
        self._changes = 0
        self._flags = 0
        self._stream_id = 0
        self._written = bytearray()
        self._frames = 0  # of a block that is not whole

    @property
    def is_unfinished(self) -> bool:
        """The next frame must be a continuation."""
        return self._frames > 0

    def begin(self, flags: int, stream_id: int, payload: bytes) -> Block | None:
        """The payload of HEADERS; None: more is to come."""
        written = without_padding(flags, payload)
        if flags & WITH_PRIORITY:
            check_priority(stream_id, written)
            written = written[PRIORITY_BYTES:]
        if flags & END_HEADERS:
            return self._read(flags, stream_id, written)
        self._flags, self._stream_id, self._written, self._frames = flags, stream_id, bytearray(written), 1
        return None

    def go_on(self, flags: int, stream_id: int, payload: bytes) -> Block | None:
        """The payload of CONTINUATION; None: more is to come."""
        if stream_id != self._stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a header block is continued on another stream")
        self._written += payload
        self._frames += 1
        if len(self._written) + FRAME_HEADER_BYTES * self._frames > MOST_BLOCK_BYTES:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "a header block is too large")
        if not flags & END_HEADERS:
            return None
        self._frames = 0
        written, self._written = bytes(self._written), bytearray()
        return self._read(self._flags, stream_id, written)

    def remember(self, block: Block, meaning: T) -> None:
        if block.is_lasting:
            size = len(block.written) + sum(len(name) + len(value) for name, value in block.fields or ())
            if len(self.known) >= MOST_KNOWN or self._known_bytes + size > MOST_KNOWN_BYTES:
                self._forget()
            self.known[block.written] = meaning
            self._known_bytes += size

    def _forget(self) -> None:
        self.known.clear()
        self._known_bytes = 0

    def _read(self, flags: int, stream_id: int, written: bytes) -> Block:
        try:
            fields = self._decoder.decode(written)
        except HpackError as error:
            raise ConnectionFault(ErrorCode.COMPRESSION_ERROR, str(error)) from error
        is_lasting = self._decoder.changes == self._changes
        if not is_lasting:
            self._changes = self._decoder.changes
            self._forget()
        return Block(flags, stream_id, written, fields, is_lasting)
