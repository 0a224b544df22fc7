"""Header blocks of a connection: assembled from frames, decoded, and cached while their meaning cannot change."""

from __future__ import annotations

from typing import Generic, NamedTuple, Protocol, TypeVar

from ratelimit_rls.h2.frames import (
    END_HEADERS,
    FRAME_HEADER_BYTES,
    PRIORITY_BYTES,
    PRIORITY_FLAG,
    ErrorCode,
    Http2ConnectionError,
    check_priority,
    strip_padding,
)
from ratelimit_rls.h2.hpack import MAX_FIELDS, Decoder, HpackError, HpackLimitError
from ratelimit_rls.h2.reasons import Reason
from ratelimit_rls.h2.request_headers import Fields

MAX_BLOCK_BYTES = 65_536
"""Size of one header block, over all its frames."""

MAX_BLOCK_FRAMES = 64
"""Frames of one header block. Four suffice for the largest block."""

MAX_LIST_BYTES = 32_768
"""Size of a decoded header list, as in SETTINGS_MAX_HEADER_LIST_SIZE."""

MAX_CACHED_BLOCKS = 256
MAX_CACHED_BYTES = 2**17
"""Memory of the cached blocks and their parsed headers. A block that a client repeats takes 1 or 2 KiB."""

_ENTRY_BYTES = 140  # a dictionary entry and the object header of its key, on CPython 3.11 to 3.13


class Cacheable(Protocol):
    """Parsed form of a header block."""

    @property
    def memory_bytes(self) -> int:
        """Memory that the object keeps alive."""
        ...


T = TypeVar("T", bound=Cacheable)


class HeaderBlock(NamedTuple):
    """A complete, decoded header block."""

    flags: int  # of the HEADERS frame
    stream_id: int
    data: bytes
    fields: Fields | None  # None: the list is too large
    is_cacheable: bool  # the same bytes will decode to the same fields
    field_count: int  # number of decoded fields, also if the list is too large

    @property
    def rejection(self) -> str:
        """Reason why `fields` is None, as a sentence for the client."""
        if self.field_count > MAX_FIELDS:
            return f"the request has {self.field_count} header fields; at most {MAX_FIELDS} are allowed"
        return f"the headers are too large; at most {MAX_LIST_BYTES} bytes are allowed"


class HeaderBlocks(Generic[T]):
    """Assembles, decodes and caches the header blocks of one connection.

    A client repeats a block byte by byte as long as no field changes, and then the dynamic table stays the same. So
    `cache` maps the bytes of a block to its parsed form until the table changes.
    """

    def __init__(self) -> None:
        self.cache: dict[bytes, T] = {}
        self.cache_bytes = 0  # memory of `cache`
        self._decoder = Decoder(max_list_bytes=MAX_LIST_BYTES)
        self._table_version = 0
        self._flags = 0
        self._stream_id = 0
        self._data = bytearray()
        self._frames = 0  # of an incomplete block
        self.is_unfinished = False  # the next frame must be CONTINUATION

    @property
    def unfinished_bytes(self) -> int:
        return len(self._data)

    def start(self, flags: int, stream_id: int, payload: bytes) -> HeaderBlock | None:
        """Process the payload of HEADERS. Return None if the block is incomplete."""
        data = strip_padding(flags, payload)
        if flags & PRIORITY_FLAG:
            check_priority(stream_id, data)
            data = data[PRIORITY_BYTES:]
        if flags & END_HEADERS:
            return self._decode(flags, stream_id, data)
        self._flags, self._stream_id, self._data, self._frames = flags, stream_id, bytearray(data), 1
        self.is_unfinished = True
        return None

    def add_continuation(self, flags: int, stream_id: int, payload: bytes) -> HeaderBlock | None:
        """Process the payload of CONTINUATION. Return None if the block is incomplete."""
        if stream_id != self._stream_id:
            raise Http2ConnectionError(
                ErrorCode.PROTOCOL_ERROR, "CONTINUATION must be on the stream of its HEADERS frame"
            )
        self._data += payload
        self._frames += 1
        if len(self._data) + FRAME_HEADER_BYTES * self._frames > MAX_BLOCK_BYTES:
            raise Http2ConnectionError(
                ErrorCode.ENHANCE_YOUR_CALM, f"header block exceeds {MAX_BLOCK_BYTES} bytes", Reason.HEADERS_TOO_LARGE
            )
        if self._frames > MAX_BLOCK_FRAMES:
            raise Http2ConnectionError(
                ErrorCode.ENHANCE_YOUR_CALM,
                f"header block exceeds {MAX_BLOCK_FRAMES} frames",
                Reason.CONTINUATION_FLOOD,
            )
        if not flags & END_HEADERS:
            return None
        self.is_unfinished = False
        data, self._data = bytes(self._data), bytearray()
        return self._decode(self._flags, stream_id, data)

    def store(self, block: HeaderBlock, parsed: T) -> None:
        if block.is_cacheable:
            size = _ENTRY_BYTES + len(block.data) + parsed.memory_bytes
            if len(self.cache) >= MAX_CACHED_BLOCKS or self.cache_bytes + size > MAX_CACHED_BYTES:
                self.clear_cache()
            self.cache[block.data] = parsed
            self.cache_bytes += size

    def clear_cache(self) -> None:
        self.cache.clear()
        self.cache_bytes = 0

    def _decode(self, flags: int, stream_id: int, data: bytes) -> HeaderBlock:
        try:
            fields = self._decoder.decode(data)
        except HpackLimitError as error:
            raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, str(error), Reason.HPACK_FLOOD) from error
        except HpackError as error:
            raise Http2ConnectionError(ErrorCode.COMPRESSION_ERROR, str(error)) from error
        is_cacheable = self._decoder.table_version == self._table_version
        if not is_cacheable:
            self._table_version = self._decoder.table_version
            self.clear_cache()
        return HeaderBlock(flags, stream_id, data, fields, is_cacheable, self._decoder.field_count)
