"""Outgoing frames and flow control: DATA is sent only as the peer's windows allow."""

from __future__ import annotations

from collections.abc import Callable

from ratelimit_rls.h2.frames import (
    DATA,
    DEFAULT_TABLE_BYTES,
    DEFAULT_WINDOW_BYTES,
    EMPTY_TABLE_UPDATE,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    MAX_FRAME_BYTES,
    MAX_WINDOW_BYTES,
    ErrorCode,
    Http2ConnectionError,
    Http2StreamError,
    Setting,
    frame,
)


class _PendingData:
    """Data that a stream has not sent yet."""

    __slots__ = ("at", "data", "end")

    def __init__(self) -> None:
        self.data = b""
        self.at = 0  # bytes of `data` already sent
        self.end: bytes | None = None  # header block after the data; empty: only END_STREAM; None: the stream continues


class OutboundFlow:
    """Outgoing side of one connection.

    As a fast path, a caller may append complete frames to `ready` and call `on_output` itself, unless `is_announced`.
    It must subtract their DATA from `window`, and send at most `max_inline_bytes` of DATA, on a stream on which nothing
    was sent before.
    """

    __slots__ = (
        "_frame_bytes",
        "_on_output",
        "_pending",
        "_stream_window",
        "_table_update",
        "buffered_bytes",
        "is_announced",
        "max_inline_bytes",
        "ready",
        "stream_credit",
        "window",
    )

    def __init__(self, on_output: Callable[[], object]) -> None:
        """`on_output` is called when there is something to take, once until it is taken."""
        self._on_output = on_output
        self.ready: list[bytes] = []
        self.is_announced = False  # on_output was called for what is ready
        self.window = DEFAULT_WINDOW_BYTES  # send window of the connection
        self.stream_credit: dict[int, int] = {}  # difference of a stream's window to `_stream_window`
        self._stream_window = DEFAULT_WINDOW_BYTES  # initial window of a stream
        self._frame_bytes = MAX_FRAME_BYTES
        self.max_inline_bytes = MAX_FRAME_BYTES
        self._table_update = b""  # must begin the next header block
        self._pending: dict[int, _PendingData] = {}
        self.buffered_bytes = 0  # data that waits for the peer's windows

    def write(self, frames: bytes) -> None:
        self.ready.append(frames)
        if not self.is_announced:
            self.is_announced = True
            self._on_output()

    def headers(self, stream_id: int, block: bytes, flags: int = 0) -> None:
        if self._table_update:
            block, self._table_update = self._table_update + block, b""
            self._update_inline_limit()
        self.write(frame(HEADERS, END_HEADERS | flags, stream_id, block))

    def send(self, stream_id: int, data: bytes, end: bytes | None = None) -> bool:
        """Send data as the windows allow. Return True if all of it was written.

        `end` is the header block that then ends the stream. If it is empty, only END_STREAM is sent; if it is None, the
        stream continues.
        """
        pending = self._pending.get(stream_id)
        if pending is None:
            pending = self._pending[stream_id] = _PendingData()
        pending.data = pending.data[pending.at :] + data
        pending.at = 0
        pending.end = end
        self.buffered_bytes += len(data)
        return self._pump(stream_id, pending)

    def forget(self, stream_id: int) -> None:
        """Discard the state of a stream that has ended."""
        pending = self._pending.pop(stream_id, None)
        if pending is not None:
            self.buffered_bytes -= len(pending.data) - pending.at
        self.stream_credit.pop(stream_id, None)

    def apply_settings(self, settings: dict[int, int]) -> list[int]:
        """Apply the peer's settings. Return the streams whose data could be written completely as a result."""
        if settings.get(Setting.HEADER_TABLE_SIZE, DEFAULT_TABLE_BYTES) < DEFAULT_TABLE_BYTES:
            # We do not use the dynamic table, but a peer that shrinks it expects an acknowledging size update.
            self._table_update = EMPTY_TABLE_UPDATE
        self._frame_bytes = settings.get(Setting.MAX_FRAME_SIZE, self._frame_bytes)
        self._stream_window = settings.get(Setting.INITIAL_WINDOW_SIZE, self._stream_window)
        if max(self.stream_credit.values(), default=0) + self._stream_window > MAX_WINDOW_BYTES:
            raise Http2ConnectionError(
                ErrorCode.FLOW_CONTROL_ERROR, "INITIAL_WINDOW_SIZE makes the window of a stream larger than 2**31 - 1"
            )
        self._update_inline_limit()
        return self._pump_all()

    def grow_window(self, more_bytes: int) -> list[int]:
        """Increase the connection's window. Return the same as `apply_settings`."""
        self.window += more_bytes
        if self.window > MAX_WINDOW_BYTES:
            raise Http2ConnectionError(ErrorCode.FLOW_CONTROL_ERROR, "the window of the connection exceeds 2**31 - 1")
        return self._pump_all()

    def grow_stream_window(self, stream_id: int, more_bytes: int) -> list[int]:
        """Increase the window of an open stream. Return the same as `apply_settings`. Raises Http2StreamError."""
        credit = self.stream_credit.get(stream_id, 0) + more_bytes
        if self._stream_window + credit > MAX_WINDOW_BYTES:
            raise Http2StreamError(ErrorCode.FLOW_CONTROL_ERROR)
        self.stream_credit[stream_id] = credit
        pending = self._pending.get(stream_id)
        return [stream_id] if pending is not None and self._pump(stream_id, pending) else []

    def take(self) -> bytes:
        """Return everything that is ready to be sent."""
        self.is_announced = False
        data = b"".join(self.ready)
        self.ready.clear()
        return data

    def close(self) -> None:
        """Drop the callback, which refers to the connection: a reference cycle would keep both in memory."""
        self._on_output = _ignore

    def _update_inline_limit(self) -> None:
        """Disable the fast path while the next header block must begin with a table size update."""
        self.max_inline_bytes = -1 if self._table_update else min(self._stream_window, self._frame_bytes)

    def _pump_all(self) -> list[int]:
        return [stream_id for stream_id, pending in list(self._pending.items()) if self._pump(stream_id, pending)]

    def _pump(self, stream_id: int, pending: _PendingData) -> bool:
        while pending.at < len(pending.data):
            credit = self.stream_credit.get(stream_id, 0)
            size = min(self.window, self._stream_window + credit, self._frame_bytes, len(pending.data) - pending.at)
            if size <= 0:
                return False
            self.write(frame(DATA, 0, stream_id, pending.data[pending.at : pending.at + size]))
            pending.at += size
            self.buffered_bytes -= size
            self.stream_credit[stream_id] = credit - size
            self.window -= size
        if pending.end is None:
            del self._pending[stream_id]
            return True
        if pending.end:  # written only now, because settings may have changed in the meantime
            self.headers(stream_id, pending.end, END_STREAM)
        else:
            self.write(frame(DATA, END_STREAM, stream_id))
        self.forget(stream_id)
        return True


def _ignore() -> None:
    """Replace the callback of a closed connection."""
