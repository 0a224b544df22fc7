"""What is written to a peer: in one write a turn of the loop, and data only as its windows have room."""

from __future__ import annotations

import asyncio

from ratelimit_rls.transport.http2.frames import (
    DATA,
    DEFAULT_TABLE_BYTES,
    DEFAULT_WINDOW_BYTES,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    LARGEST_WINDOW_BYTES,
    MOST_FRAME_BYTES,
    NO_TABLE,
    ConnectionFault,
    ErrorCode,
    Setting,
    StreamFault,
    frame,
)


class _Body:
    """What a stream has still to send."""

    __slots__ = ("at", "data", "end")

    def __init__(self) -> None:
        self.data = b""
        self.at = 0  # what was sent of it
        self.end: bytes | None = None  # a header block after the data; empty: the stream just ends; None: it goes on


class Sending:
    """Of one connection.

    Whoever is in a hurry may append whole frames to `ready` and call `flush_soon`, if it takes what is DATA in them off
    `window`, and sends no more than `most_at_once` of it on a stream that nothing was sent on.
    """

    __slots__ = (
        "_bodies",
        "_frame_bytes",
        "_loop",
        "_stream_window",
        "_table_update",
        "_transport",
        "given",
        "most_at_once",
        "ready",
        "will_flush",
        "window",
    )

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self.ready: list[bytes] = []
        self.will_flush = False
        self.window = DEFAULT_WINDOW_BYTES  # of the connection
        self.given: dict[int, int] = {}  # what a stream's window has more than others, or less
        self._stream_window = DEFAULT_WINDOW_BYTES  # of a stream that nothing was sent on
        self._frame_bytes = MOST_FRAME_BYTES
        self.most_at_once = MOST_FRAME_BYTES
        self._table_update = b""  # has to stand at the beginning of the next header block
        self._bodies: dict[int, _Body] = {}

    def write(self, frames: bytes) -> None:
        self.ready.append(frames)
        self.flush_soon()

    def headers(self, stream_id: int, block: bytes, flags: int = 0) -> None:
        if self._table_update:
            block, self._table_update = self._table_update + block, b""
            self._reckon()
        self.write(frame(HEADERS, END_HEADERS | flags, stream_id, block))

    def send(self, stream_id: int, data: bytes, end: bytes | None = None) -> bool:
        """Send data as the windows have room. True: all of it is on its way.

        `end` is the header block that ends the stream then; an empty one: nothing but the end; None: more is to come.
        """
        body = self._bodies.get(stream_id)
        if body is None:
            body = self._bodies[stream_id] = _Body()
        body.data = body.data[body.at :] + data
        body.at = 0
        body.end = end
        return self._pump(stream_id, body)

    def forget(self, stream_id: int) -> None:
        """The stream is over."""
        self._bodies.pop(stream_id, None)
        self.given.pop(stream_id, None)

    def apply(self, settings: dict[int, int]) -> list[int]:
        """The peer's settings. Returns the streams all of whose data is on its way by that."""
        if settings.get(Setting.HEADER_TABLE_SIZE, DEFAULT_TABLE_BYTES) < DEFAULT_TABLE_BYTES:
            # We keep nothing in the table, but a peer that shrinks it waits for a word that we know.
            self._table_update = NO_TABLE
        self._frame_bytes = settings.get(Setting.MAX_FRAME_SIZE, self._frame_bytes)
        self._stream_window = settings.get(Setting.INITIAL_WINDOW_SIZE, self._stream_window)
        if max(self.given.values(), default=0) + self._stream_window > LARGEST_WINDOW_BYTES:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "a stream's window grows too large")
        self._reckon()
        return self._pump_all()

    def grow(self, more_bytes: int) -> list[int]:
        """The connection's window. Returns as `apply` does."""
        self.window += more_bytes
        if self.window > LARGEST_WINDOW_BYTES:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "the connection's window grows too large")
        return self._pump_all()

    def grow_stream(self, stream_id: int, more_bytes: int) -> list[int]:
        """The window of an open stream. Returns as `apply` does. Raises StreamFault."""
        given = self.given.get(stream_id, 0) + more_bytes
        if self._stream_window + given > LARGEST_WINDOW_BYTES:
            raise StreamFault(ErrorCode.FLOW_CONTROL_ERROR)
        self.given[stream_id] = given
        body = self._bodies.get(stream_id)
        return [stream_id] if body is not None and self._pump(stream_id, body) else []

    def flush_soon(self) -> None:
        """With whatever else is written until then."""
        if not self.will_flush:
            self.will_flush = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        self.will_flush = False
        if self.ready and not self._transport.is_closing():
            self._transport.write(b"".join(self.ready))
        self.ready.clear()

    def _reckon(self) -> None:
        """A header block that has to begin with something is not written in a hurry."""
        self.most_at_once = -1 if self._table_update else min(self._stream_window, self._frame_bytes)

    def _pump_all(self) -> list[int]:
        return [stream_id for stream_id, body in list(self._bodies.items()) if self._pump(stream_id, body)]

    def _pump(self, stream_id: int, body: _Body) -> bool:
        while body.at < len(body.data):
            given = self.given.get(stream_id, 0)
            size = min(self.window, self._stream_window + given, self._frame_bytes, len(body.data) - body.at)
            if size <= 0:
                return False
            self.write(frame(DATA, 0, stream_id, body.data[body.at : body.at + size]))
            body.at += size
            self.given[stream_id] = given - size
            self.window -= size
        if body.end is None:
            del self._bodies[stream_id]
            return True
        if body.end:  # written only now: settings that came since may have a say in it
            self.headers(stream_id, body.end, END_STREAM)
        else:
            self.write(frame(DATA, END_STREAM, stream_id))
        self.forget(stream_id)
        return True
