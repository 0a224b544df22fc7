"""HTTP/2 connection of one gRPC client, without I/O: takes bytes and queues calls, takes responses and returns bytes.

    bytes ─► receive_data ─► cached header block + one message in one DATA frame ─► queue       nearly every call
                  └────────► _handle_frame ─► every other frame, valid or not
    responses ─► respond, fail ─► data_to_send ─► bytes

Guarantees, whatever the client sends:
* At most `max_streams` calls are open, and at most four times as many are being decided, cancelled ones included.
* At most MAX_UNFINISHED_BYTES of unfinished messages are buffered, and every buffered byte is reported.
* Slow input can be deferred after any frame, so that the owner can share its time between connections.
* Frames that cost the server more than the client have budgets (flood_budgets.py); unfinished input has timeouts.

The layers are classes in their own files, because a Python call to another object for each call would be measurable:
Hooks ◄ Streams (responses) ◄ FrameHandlers ◄ Connection ◄ the owner of the socket.
"""

from __future__ import annotations

import struct
from enum import StrEnum

from ratelimit_rls.h2 import frames, response_frames
from ratelimit_rls.h2.call_headers import CallHeaders
from ratelimit_rls.h2.config import WINDOW_UPDATE_BYTES, Config, server_preface
from ratelimit_rls.h2.frame_handlers import DRAIN_PING, FrameHandlers
from ratelimit_rls.h2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME_HEADER_BYTES,
    HEADERS,
    MAX_FRAME_BYTES,
    ErrorCode,
    Http2ConnectionError,
    Setting,
    frame,
)
from ratelimit_rls.h2.reasons import Reason
from ratelimit_rls.h2.status import RpcError
from ratelimit_rls.h2.streams import PENDING, RESPONDING

MESSAGE_FRAME = struct.Struct(frames.HEADER.format + response_frames.PREFIX.format.removeprefix(">"))
"""Header of a DATA frame, followed by the prefix of the gRPC message in it."""

MESSAGE_FRAME_BYTES = MESSAGE_FRAME.size

RAPID_RESET_S = 0.005
"""A call that is cancelled within this time, or up to twice as late, counts as a rapid reset. Envoy's default timeout
is 20 ms, and a client whose calls all time out is not an attacker."""

KEEPALIVE_PING = b"alive?  "

ANNOUNCED_S = 5.0
"""Time after which a client is expected to know a new limit on streams."""


class Connection(FrameHandlers):
    """Server side of an HTTP/2 connection that carries gRPC calls. Times are of any monotonic clock, in seconds."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._has_preface = False
        self._mark_s, self._mark_id = 0.0, 0  # a point in time, and the last stream opened before it
        self._message_checkpoint = (0.0, 0)  # last check for expired streams: time, last stream id
        self._progress_s = 0.0  # when the last complete frame was read
        self._ping_s = 0.0  # when the unacknowledged keepalive PING was sent; 0: none

    def start(self, now_s: float) -> None:
        """Send the server connection preface. Call it once, before everything else."""
        self._progress_s = now_s
        self._message_checkpoint = now_s, 0
        self._outbound.write(server_preface(self._config.max_streams))

    def data_to_send(self) -> bytes:
        """Return the bytes to write to the client, and forget them."""
        return self._outbound.take()

    @property
    def is_closed(self) -> bool:
        """True if the connection has ended: nothing is read, and what there is to send ends with GOAWAY."""
        return self._is_closed

    @property
    def idle_order(self) -> tuple[bool, float]:
        """Sort key for eviction: connections that never made a call come first, then those idle for longest."""
        return self._last_id > 0, self._progress_s

    # Reading.

    def receive_data(self, data: bytes, now_s: float) -> None:
        """Process input. Complete calls are appended to the queues of their methods, each as a QueuedCall.

        With no data, continues with input that was deferred. Input after the end of the connection is ignored.
        """
        if self._is_closed:
            return
        if self._buffer:
            data = self._buffer + data
        try:
            at = 0
            if not self._has_preface:
                if not self._check_preface(data):
                    return
                at = len(frames.PREFACE)
            if now_s - self._mark_s > RAPID_RESET_S:
                self._old_id = self._last_id if now_s - self._progress_s > RAPID_RESET_S else self._mark_id
                self._mark_s, self._mark_id = now_s, self._last_id
            unpack, unpack_prefix, prefix_bytes = (
                frames.HEADER.unpack_from,
                response_frames.PREFIX.unpack_from,
                response_frames.PREFIX_BYTES,
            )
            unpack_message = MESSAGE_FRAME.unpack_from
            streams, cached = self._streams, self._header_blocks.cache
            max_streams = self._max_open() if self._cancelled_calls else self._config.max_streams
            is_slow = self._header_blocks.is_unfinished or self._is_draining
            has_slow_input = False
            received_bytes = 0
            end = len(data)
            while end - at >= FRAME_HEADER_BYTES:
                word, flags, stream_id = unpack(data, at)
                length = word >> 8
                if length > MAX_FRAME_BYTES:
                    raise Http2ConnectionError(
                        ErrorCode.FRAME_SIZE_ERROR, f"frame of {length} bytes, at most {MAX_FRAME_BYTES} are allowed"
                    )
                start = at + FRAME_HEADER_BYTES
                stop = start + length
                if stop > end:
                    break
                kind = word & 0xFF
                if is_slow:
                    pass
                elif kind == DATA:
                    headers = streams.get(stream_id)
                    if (
                        headers.__class__ is CallHeaders
                        and flags == END_STREAM
                        and length >= prefix_bytes
                        and unpack_prefix(data, start) == (0, length - prefix_bytes)
                    ):
                        at = stop
                        received_bytes += length
                        streams[stream_id] = PENDING
                        headers.queue.append((self, stream_id, data[start + prefix_bytes : stop], now_s, headers))
                        continue
                elif kind == HEADERS and flags == END_HEADERS and stream_id == self._last_id + 2:
                    headers = cached.get(data[start:stop])
                    if headers is not None and len(streams) < max_streams:
                        at = stop
                        self._last_id = stream_id
                        # Nearly always followed by the whole message in one frame.
                        if end - stop >= MESSAGE_FRAME_BYTES:
                            word, flags, data_id, compressed, size = unpack_message(data, stop)
                            message_at = stop + MESSAGE_FRAME_BYTES
                            stop = message_at + size
                            if (
                                word == size + prefix_bytes << 8 | DATA
                                and flags == END_STREAM
                                and data_id == stream_id
                                and not compressed
                                and stop <= end
                                and size <= MAX_FRAME_BYTES - prefix_bytes
                            ):
                                at = stop
                                received_bytes += size + prefix_bytes
                                streams[stream_id] = PENDING
                                headers.queue.append((self, stream_id, data[message_at:stop], now_s, headers))
                                continue
                        streams[stream_id] = headers
                        continue
                if not has_slow_input:
                    if not self.begin_slow_input():
                        break
                    has_slow_input = True
                    self._now_s = now_s
                at = stop
                self._handle_frame(kind, flags, stream_id & frames.STREAM_ID_BITS, data[start:stop])
                if self._is_closed or self.defer_slow_input():
                    break
                max_streams = self._max_open()
                is_slow = self._header_blocks.is_unfinished or self._is_draining
            if at:
                self._progress_s = now_s
            if has_slow_input or at < end or self._buffer:
                self._buffer = data[at:]
                self._report_buffered()
            if received_bytes:
                self.on_calls_queued()
                self._unacknowledged_bytes += received_bytes
                if self._unacknowledged_bytes >= WINDOW_UPDATE_BYTES:
                    self._replenish_window()
        except Http2ConnectionError as error:
            self.on_calls_queued()  # calls that were queued before the error are still decided
            self.fail_connection(error)

    def keep_data(self, data: bytes) -> None:
        """Keep input for the next `receive_data`."""
        self._buffer += data
        self._report_buffered()

    def _check_preface(self, data: bytes) -> bool:
        """Return True if the client preface is complete. Raises Http2ConnectionError if it is wrong."""
        if data.startswith(frames.PREFACE):
            self._has_preface = True
        elif frames.PREFACE.startswith(data):
            self._buffer = data
        else:
            raise Http2ConnectionError(
                ErrorCode.PROTOCOL_ERROR,
                "invalid connection preface: this port serves gRPC, with HTTP/2 by prior knowledge",
            )
        return self._has_preface

    # Limits on streams and time.

    def announce_streams(self, before: int, now_s: float) -> None:
        """Announce a change of `Config.max_streams`, which was `before`."""
        if not self._is_closed:
            known = max(before, self._known_streams) if now_s < self._known_until_s else before
            self._known_streams, self._known_until_s = known, now_s + ANNOUNCED_S
            self._outbound.write(frames.settings({Setting.MAX_CONCURRENT_STREAMS: self._config.max_streams}))

    def reject(self, stream_id: int, error: RpcError, now_s: float) -> None:
        """Fail a call that exceeds a limit. A client that keeps making these loses its connection."""
        self.fail(stream_id, error)
        if self._is_closed:
            return
        self._now_s = now_s
        try:
            self._count_reset(Reason.RESETS_PROVOKED)
        except Http2ConnectionError as flood:
            self.on_calls_queued()
            self.fail_connection(flood)

    def check_progress(self, now_s: float) -> bool:
        """Close or reset whatever makes no progress. Call it once a second, unless input is kept or deferred.

        Return False if the client does not acknowledge a PING: it cannot be reached, so the socket should be aborted.
        """
        if self._is_closed or not self._has_settings:
            return True
        timeouts = self._config.timeouts
        idle_s = now_s - self._progress_s
        if (self._buffer and idle_s > timeouts.frame_s) or (
            self._header_blocks.is_unfinished and now_s - self._block_s > timeouts.frame_s
        ):
            self.disconnect(Reason.IDLE_TIMEOUT, f"frame or header block not complete after {timeouts.frame_s:g} s")
            return True
        since_s, last_id = self._message_checkpoint
        if now_s - since_s > timeouts.message_s:
            self._message_checkpoint = now_s, self._last_id
            self._expire_until(last_id)
        return self._keep_alive(now_s, idle_s)

    def _keep_alive(self, now_s: float, idle_s: float) -> bool:
        timeouts = self._config.timeouts
        if not timeouts.keepalive_s or idle_s < timeouts.keepalive_s:
            self._ping_s = 0.0
        elif not self._ping_s:
            self._ping_s = now_s
            self._outbound.write(frame(frames.PING, 0, 0, KEEPALIVE_PING))
        elif now_s - self._ping_s > timeouts.keepalive_timeout_s:
            self.on_abuse(Reason.KEEPALIVE_TIMEOUT)
            return False
        return True

    # Closing.

    def drain(self) -> None:
        """Ask the client to make new calls on another connection. `on_draining` follows when it has read that."""
        if not (self._is_draining or self._is_closed):
            self._has_sent_drain_ping = True
            # When the client acknowledges the PING it has read the GOAWAY, and we have received all calls that it made
            # before that.
            self._outbound.write(frames.goaway(frames.MAX_STREAM_ID, ErrorCode.NO_ERROR))
            self._outbound.write(frame(frames.PING, 0, 0, DRAIN_PING))

    def close(self) -> None:
        """End the connection with GOAWAY."""
        if not self._is_closed:
            self._outbound.write(frames.goaway(self._last_id, ErrorCode.NO_ERROR))
            self._close(None)

    def refuse_streams(self) -> None:
        """Reset all streams, which wait for the client, and end the connection."""
        for stream_id, stream in list(self._streams.items()):
            self._close_stream(stream_id)
            # A call with REFUSED_STREAM may be made again; one that has its answer was counted.
            self._reset_stream(stream_id, ErrorCode.CANCEL if stream is RESPONDING else ErrorCode.REFUSED_STREAM)
        self.close()

    def disconnect(self, reason: StrEnum, message: str, code: ErrorCode = ErrorCode.ENHANCE_YOUR_CALM) -> None:
        """End the connection with an error, and report the reason."""
        if not self._is_closed:
            self.fail_connection(Http2ConnectionError(code, message, reason))

    def fail_connection(self, error: Http2ConnectionError) -> None:
        """End the connection with GOAWAY, and cancel all calls."""
        if error.reason is not None:
            self.on_abuse(error.reason)
        self._outbound.write(frames.goaway(self._last_id, error.code, str(error)))
        self._close_streams()
        self._buffer = b""
        self.clear_header_cache()
        self._close(error)

    def terminate(self) -> None:
        """End the connection without GOAWAY, because the client is gone, and cancel all calls."""
        self._is_closed = True
        self._close_streams()
        self._buffer = b""
        self._outbound.close()

    def _close(self, error: Http2ConnectionError | None) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.on_close(error)
