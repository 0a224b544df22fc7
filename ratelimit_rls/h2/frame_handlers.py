"""Handling of every frame type, valid or not, and the budgets that frames are charged to.

This includes flow control of what is received: DATA uses up the flow-control window of the connection, and
`_replenish_window` sends WINDOW_UPDATE. Flow control of what is sent is in outbound_flow.py.
"""

from __future__ import annotations

from collections.abc import Callable

from ratelimit_rls.h2 import frames
from ratelimit_rls.h2.call_headers import STREAMING, CallHeaders, NotGrpc
from ratelimit_rls.h2.config import WINDOW_UPDATE_BYTES, Config
from ratelimit_rls.h2.flood_budgets import FloodBudget
from ratelimit_rls.h2.frames import (
    CONTINUATION,
    DATA,
    END_STREAM,
    HEADERS,
    ErrorCode,
    Http2ConnectionError,
    Http2StreamError,
    frame,
)
from ratelimit_rls.h2.header_blocks import HeaderBlock
from ratelimit_rls.h2.reasons import Reason
from ratelimit_rls.h2.request_headers import validate_fields
from ratelimit_rls.h2.request_stream import RejectedRequest, UnaryRequest
from ratelimit_rls.h2.status import RpcError, StatusCode
from ratelimit_rls.h2.streams import PENDING, Stream, Streams

MAX_UNFINISHED_BYTES = 16 * 2**20

TINY_DATA_BYTES = 64
"""A smaller DATA frame counts as empty, unless it ends its stream."""

FIELD_BYTES = 32
"""This many bytes of a header block count as one more field, because long Huffman strings take time to decode, too."""

DRAIN_PING = b"last one"


class FrameHandlers(Streams):
    """Handles the frames of one connection. Connection finds them in the input."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._flood_budget = FloodBudget()
        self._now_s = 0.0  # when the input being handled was received
        self._last_id = 0
        self._old_id = 0  # streams up to this one are too old for a rapid reset
        self._skipped_ids = 0  # stream ids that the client skipped
        self._block_s = 0.0  # when an unfinished header block began
        self._known_streams, self._known_until_s = 0, 0.0  # a former limit that the client may still use
        self._unacknowledged_bytes = 0  # received since the last WINDOW_UPDATE of the connection
        self._has_settings = False
        self._has_sent_drain_ping = False
        self._is_draining = False  # accepts no new calls

    @property
    def _opened_streams(self) -> int:
        """Number of streams that the client has opened."""
        return ((self._last_id + 1) >> 1) - self._skipped_ids

    @property
    def _answered_streams(self) -> int:
        return self._opened_streams - self._resets - len(self._streams)

    def _count_reset(self, reason: Reason) -> None:
        """Count a reset stream. Beyond a burst, at most half of a client's calls may be reset."""
        self._resets += 1
        self._flood_budget.spend(reason, self._now_s, self._answered_streams)

    def _handle_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        """Handle one frame of any type. Raises Http2ConnectionError."""
        if not self._has_settings:
            if kind != frames.SETTINGS or flags & frames.ACK:
                raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "first frame must be SETTINGS")
            self._has_settings = True
            self.on_ready()
        if self._header_blocks.is_unfinished is not (kind == CONTINUATION):
            raise Http2ConnectionError(
                ErrorCode.PROTOCOL_ERROR, "CONTINUATION frames must directly follow their HEADERS frame"
            )
        frames.check_length(kind, stream_id, payload)
        reason = _FLOOD_BUDGETS.get(kind)
        if reason is not None:
            self._flood_budget.spend(reason, self._now_s, self._opened_streams)
        if self._is_draining and stream_id > self._last_id and kind not in (HEADERS, CONTINUATION):
            self._flood_budget.spend(Reason.UNKNOWN_FRAME_FLOOD, self._now_s, self._opened_streams)
            return  # belongs to a call that was made after GOAWAY
        handler = _HANDLERS.get(kind)
        if handler is None:  # an extension of the protocol: RFC 9113 requires unknown types to be ignored
            self._flood_budget.spend(Reason.UNKNOWN_FRAME_FLOOD, self._now_s, self._opened_streams)
            return
        try:
            handler(self, flags, stream_id, payload)
        except Http2StreamError as error:
            self._close_stream(stream_id)
            self._reset_stream(stream_id, error.code)
            self._count_reset(Reason.RESETS_PROVOKED)

    # Header blocks.

    def _on_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        block = self._header_blocks.start(flags, stream_id, payload)
        if block is not None:
            self._on_block(block)
        else:
            self._block_s = self._now_s

    def _on_continuation(self, flags: int, stream_id: int, payload: bytes) -> None:
        self._flood_budget.spend(Reason.HPACK_FLOOD, self._now_s, self._opened_streams)
        block = self._header_blocks.add_continuation(flags, stream_id, payload)
        if block is not None:
            self._on_block(block)

    def _on_block(self, block: HeaderBlock) -> None:
        stream_id = block.stream_id
        work = 1 + block.field_count + len(block.data) // FIELD_BYTES
        self._flood_budget.spend(Reason.HPACK_FLOOD, self._now_s, self._opened_streams, work)
        if stream_id in self._streams:
            self._on_trailers(block)
        elif not stream_id & 1:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "stream ids of a client must be odd")
        elif stream_id > self._last_id:
            self._on_request(block)
        elif stream_id not in self._reset_ids:
            raise Http2ConnectionError(ErrorCode.STREAM_CLOSED, "HEADERS on a closed stream")

    def _on_request(self, block: HeaderBlock) -> None:
        if self._is_draining:
            return  # GOAWAY has announced that this call is not processed
        stream_id = block.stream_id
        self._skipped_ids += (stream_id - self._last_id - 1) >> 1
        self._last_id = stream_id
        if len(self._streams) >= self._max_open():
            if len(self._streams) < self._known_streams and self._now_s < self._known_until_s:
                # Without a charge: the client may not know of the smaller limit yet.
                self._reset_stream(stream_id, ErrorCode.REFUSED_STREAM)
                self._resets += 1
                return
            raise Http2StreamError(ErrorCode.REFUSED_STREAM)
        stream = self._new_stream(block)
        if isinstance(stream, RpcError):
            self._send_error(stream_id, stream)
            if not block.flags & END_STREAM:
                self._reset_stream(stream_id)
            self._count_reset(Reason.RESETS_PROVOKED)
            return
        self._streams[stream_id] = stream
        if isinstance(stream, CallHeaders):
            self._header_blocks.store(block, stream)
        if block.flags & END_STREAM:
            self._on_end_stream(stream_id)

    def _new_stream(self, block: HeaderBlock) -> Stream | RpcError:
        try:
            if block.fields is None:
                self.on_abuse(Reason.HEADERS_TOO_LARGE)
                raise NotGrpc(431, block.rejection)
            headers = self._config.header_parser.read(block.fields)
        except NotGrpc as rejection:
            return RejectedRequest(rejection)
        if isinstance(headers, RpcError):
            return headers
        if headers.queue is STREAMING:
            return self.open_stream(block.stream_id, headers)
        return headers if headers.content_length is None else UnaryRequest(headers)

    def _on_trailers(self, block: HeaderBlock) -> None:
        """Handle the trailers of a request. Their fields are ignored; they only end the request."""
        if self._is_half_closed(block.stream_id):
            raise Http2StreamError(ErrorCode.STREAM_CLOSED)
        if not block.flags & END_STREAM:
            raise Http2StreamError(ErrorCode.PROTOCOL_ERROR)
        validate_fields(block.fields or ())
        self._on_end_stream(block.stream_id)

    # Messages.

    def _on_data(self, flags: int, stream_id: int, payload: bytes) -> None:
        self._unacknowledged_bytes += len(payload)
        if self._unacknowledged_bytes >= WINDOW_UPDATE_BYTES:
            self._replenish_window()
        stream = self._streams.get(stream_id)
        if stream is None and stream_id > self._last_id:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "DATA on an idle stream")
        if stream is None and stream_id in self._reset_ids:
            if len(payload) < TINY_DATA_BYTES:
                self._flood_budget.spend(Reason.EMPTY_DATA_FLOOD, self._now_s, self._opened_streams)
            return
        if stream is None or self._is_half_closed(stream_id):
            raise Http2StreamError(ErrorCode.STREAM_CLOSED)
        data = frames.strip_padding(flags, payload)
        if len(data) < TINY_DATA_BYTES and not flags & END_STREAM:
            self._flood_budget.spend(Reason.EMPTY_DATA_FLOOD, self._now_s, self._opened_streams)
        if isinstance(stream, CallHeaders):
            stream = self._streams[stream_id] = UnaryRequest(stream)
        assert not isinstance(stream, str)
        before_bytes = stream.buffered_bytes
        error = stream.receive_data(data, self._config.max_message_bytes)
        self._unfinished_bytes += stream.buffered_bytes - before_bytes
        if error is None and self._unfinished_bytes > MAX_UNFINISHED_BYTES:
            error = RpcError(StatusCode.RESOURCE_EXHAUSTED, "this connection has too many bytes of unfinished messages")
        if error is not None:
            if isinstance(error, NotGrpc):
                self._reject(stream_id, error)
            else:
                self._send_error(stream_id, error, response_started=stream.response_started)
            self._close_stream(stream_id)
            self._reset_stream(stream_id)
            self._count_reset(Reason.RESETS_PROVOKED)
        elif flags & END_STREAM:
            self._on_end_stream(stream_id)
        elif len(data) < len(payload):
            self._outbound.write(frames.window_update(stream_id, len(payload) - len(data)))

    def _on_end_stream(self, stream_id: int) -> None:
        """Handle the end of a request."""
        stream = self._streams[stream_id]
        assert not isinstance(stream, str)
        if isinstance(stream, CallHeaders):
            stream = UnaryRequest(stream)
        if not stream.matches_content_length:
            raise Http2StreamError(ErrorCode.PROTOCOL_ERROR)
        if isinstance(stream, RejectedRequest):
            self._reject(stream_id, stream.rejection)
        elif isinstance(stream, UnaryRequest):
            self._on_message(stream_id, stream)
        elif (error := stream.on_end_stream()) is not None:
            self._send_error(stream_id, error, response_started=stream.response_started)
            self._close_stream(stream_id)

    def _on_message(self, stream_id: int, stream: UnaryRequest) -> None:
        self._unfinished_bytes -= stream.buffered_bytes
        message = stream.message(self._config.max_message_bytes)
        if isinstance(message, RpcError):
            del self._streams[stream_id]
            self._send_error(stream_id, message)
        else:
            self._streams[stream_id] = PENDING
            stream.headers.queue.append((self, stream_id, message, self._now_s, stream.headers))
            self.on_calls_queued()

    def _replenish_window(self) -> None:
        """Return flow-control window of the connection to the client.

        The received bytes are processed, or bounded elsewhere.
        """
        self._outbound.write(frames.window_update(0, self._unacknowledged_bytes))
        self._unacknowledged_bytes = 0

    # All other frames.

    def _on_priority(self, flags: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != frames.PRIORITY_BYTES:
            raise Http2StreamError(ErrorCode.FRAME_SIZE_ERROR)
        frames.check_priority(stream_id, payload)

    def _on_reset(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id > self._last_id:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "RST_STREAM on an idle stream")
        if stream_id not in self._streams:  # already answered
            self._flood_budget.spend(Reason.RAPID_RESET, self._now_s, self._answered_streams)
            return
        is_incomplete = not self._is_half_closed(stream_id)  # it waited for the client, not for us
        self._close_stream(stream_id)
        if is_incomplete or stream_id > self._old_id:
            self._count_reset(Reason.RAPID_RESET)
        else:
            self._resets += 1

    def _on_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if flags & frames.ACK:
            if payload:
                raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS acknowledgement must be empty")
            return
        settings = frames.parse_settings(payload)
        self._outbound.write(frame(frames.SETTINGS, frames.ACK, 0))
        self._on_sent(self._outbound.apply_settings(settings))

    def _on_push_promise(self, flags: int, stream_id: int, payload: bytes) -> None:
        raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "clients must not send PUSH_PROMISE")

    def _on_ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        if not flags & frames.ACK:
            self._outbound.write(frame(frames.PING, frames.ACK, 0, payload))
        elif payload == DRAIN_PING and self._has_sent_drain_ping and not self._is_draining:
            self._is_draining = True
            self._outbound.write(frames.goaway(self._last_id, ErrorCode.NO_ERROR))
            self.on_draining()

    def _on_go_away(self, flags: int, stream_id: int, payload: bytes) -> None:
        """Ignore a valid GOAWAY: the client makes no more calls, and closes the connection after the last response."""
        if len(payload) < 8:
            raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "GOAWAY must have at least 8 bytes")

    def _on_window_update(self, flags: int, stream_id: int, payload: bytes) -> None:
        more_bytes = frames.parse_window_update(payload)
        if stream_id > self._last_id:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE on an idle stream")
        if not stream_id:
            if not more_bytes:
                raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE increment must not be 0")
            self._on_sent(self._outbound.grow_window(more_bytes))
        elif stream_id in self._streams:
            if not more_bytes:
                raise Http2StreamError(ErrorCode.PROTOCOL_ERROR)
            self._on_sent(self._outbound.grow_stream_window(stream_id, more_bytes))


_HANDLERS: dict[int, Callable[[FrameHandlers, int, int, bytes], None]] = {
    DATA: FrameHandlers._on_data,
    HEADERS: FrameHandlers._on_headers,
    frames.PRIORITY: FrameHandlers._on_priority,
    frames.RST_STREAM: FrameHandlers._on_reset,
    frames.SETTINGS: FrameHandlers._on_settings,
    frames.PUSH_PROMISE: FrameHandlers._on_push_promise,
    frames.PING: FrameHandlers._on_ping,
    frames.GOAWAY: FrameHandlers._on_go_away,
    frames.WINDOW_UPDATE: FrameHandlers._on_window_update,
    CONTINUATION: FrameHandlers._on_continuation,
}

_FLOOD_BUDGETS = {
    frames.PING: Reason.PING_FLOOD,
    frames.SETTINGS: Reason.SETTINGS_FLOOD,
    frames.PRIORITY: Reason.PRIORITY_FLOOD,
    frames.WINDOW_UPDATE: Reason.WINDOW_UPDATE_FLOOD,
    frames.GOAWAY: Reason.UNKNOWN_FRAME_FLOOD,
}
"""Reason that a flood of each of these frame types is reported as. A single frame is harmless."""
