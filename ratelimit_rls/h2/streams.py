"""Open streams of a connection, the responses on them, and the bytes that are buffered for them."""

from __future__ import annotations

from enum import StrEnum
from itertools import islice
from typing import cast

from ratelimit_rls.h2 import frames, response_frames
from ratelimit_rls.h2.call_headers import CallHeaders, NotGrpc
from ratelimit_rls.h2.config import Config
from ratelimit_rls.h2.frames import END_STREAM, ErrorCode
from ratelimit_rls.h2.header_blocks import HeaderBlocks
from ratelimit_rls.h2.hooks import Hooks
from ratelimit_rls.h2.outbound_flow import OutboundFlow
from ratelimit_rls.h2.reasons import Reason
from ratelimit_rls.h2.request_stream import RejectedRequest, StreamingCall, UnaryRequest
from ratelimit_rls.h2.status import RpcError

MAX_RESET_IDS = 1024

PENDING = "message received, response pending"
RESPONDING = "response waits for the client's flow control window"

Stream = CallHeaders | UnaryRequest | RejectedRequest | StreamingCall | str
"""State of an open stream: headers without data, a request in parts, or one of the constants above."""


MAX_DECIDED_SHARE = 4
"""Calls of a connection that are being decided, cancelled ones included, as a multiple of the streams it may open. A
client that opens and cancels calls must not make the application decide without limit."""


class Streams(Hooks):
    """Streams of one connection. FrameHandlers opens them."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._outbound = OutboundFlow(self.on_output)
        self._header_blocks: HeaderBlocks[CallHeaders] = HeaderBlocks()
        self._streams: dict[int, Stream] = {}
        self._reset_ids: dict[int, None] = {}  # streams that we reset while the client may still be sending
        self._resets = 0  # streams that were reset by either side
        self._cancelled_calls = 0  # cancelled calls that are still being decided
        self._buffer = b""  # start of an incomplete frame
        self._unfinished_bytes = 0  # of messages that are incomplete or were forwarded
        self.buffered_bytes = 0  # all bytes buffered for the client, as reported
        self._is_closed = False

    @property
    def open_streams(self) -> int:
        return len(self._streams) + self._cancelled_calls

    def _max_open(self) -> int:
        """Return how many streams may be open now.

        Cancelled calls that are still being decided reduce it only if there are several times as many as streams.
        """
        max_streams = self._config.max_streams
        return min(max_streams, MAX_DECIDED_SHARE * max_streams - self._cancelled_calls)

    @property
    def unfinished_streams(self) -> int:
        """Streams that wait for the client."""
        return sum(map(_waits_for_client, self._streams.values()))

    @property
    def is_idle(self) -> bool:
        """True if no call is open."""
        return not self._streams and not self._cancelled_calls

    @property
    def waits_for_client(self) -> bool:
        """True if no call can go on before the client sends more of it, or reads its response."""
        return not self._cancelled_calls and all(map(_waits_for_client, self._streams.values()))

    def is_waiting(self, stream_id: int) -> bool:
        """Return True unless the stream was cancelled or answered."""
        return stream_id in self._streams

    # Responses to queued calls.

    def respond(self, stream_id: int, message: bytes) -> None:
        """Send the response of a queued call, unless the call was cancelled."""
        if self._streams.pop(stream_id, None) is None:
            self._cancelled_calls -= 1
            return
        outbound = self._outbound
        size = len(message)
        data_bytes = size + response_frames.PREFIX_BYTES
        if data_bytes > outbound.max_inline_bytes or data_bytes > outbound.window:
            self._respond_in_parts(stream_id, message)
            return
        outbound.window -= data_bytes
        if outbound.stream_credit:
            outbound.stream_credit.pop(stream_id, None)
        outbound.ready.append(response_frames.response_writer(size)(stream_id, message))
        if not outbound.is_announced:
            outbound.is_announced = True
            self.on_output()

    def fail(self, stream_id: int, error: RpcError) -> None:
        """Send an error as the response of a queued call, unless the call was cancelled."""
        if self._streams.pop(stream_id, None) is None:
            self._cancelled_calls -= 1
        else:
            self._send_error(stream_id, error)

    def discard(self) -> None:
        """Account for a cancelled call that was decided and needs no response."""
        self._cancelled_calls -= 1

    # Responses to streaming calls.

    def start_response(self, stream_id: int) -> None:
        """Send the response headers of a streaming call."""
        cast("StreamingCall", self._streams[stream_id]).response_started = True
        self._outbound.headers(stream_id, response_frames.RESPONSE_HEADERS)

    def send_message(self, stream_id: int, message: bytes) -> bool:
        """Send a message of a streaming call.

        Return False if part of it waits for the client's windows. `StreamingCall.on_writable` follows when it is sent.
        """
        return self._outbound.send(stream_id, response_frames.add_prefix(message))

    def end_response(self, stream_id: int, code: int, message: str, metadata: response_frames.Metadata) -> None:
        """Send the trailers of a streaming call, with its headers if those were not sent yet."""
        stream = cast("StreamingCall", self._streams.pop(stream_id))
        self._unfinished_bytes -= stream.buffered_bytes
        block = response_frames.trailers(code, message, metadata)
        self._outbound.headers(
            stream_id, block if stream.response_started else response_frames.RESPONSE_HEADERS + block, END_STREAM
        )
        self._outbound.forget(stream_id)
        if not stream.has_ended:
            self._reset_stream(stream_id)
        self._report_buffered()

    # Used by the layers above.

    def _respond_in_parts(self, stream_id: int, message: bytes) -> None:
        """Send a response that does not fit into one frame or into the client's windows."""
        self._outbound.headers(stream_id, response_frames.RESPONSE_HEADERS)
        if not self._outbound.send(stream_id, response_frames.add_prefix(message), response_frames.OK_TRAILERS):
            self._streams[stream_id] = RESPONDING
        self._report_buffered()

    def _reject(self, stream_id: int, rejection: NotGrpc) -> None:
        """Send a plain HTTP error in response to a request that is not gRPC."""
        del self._streams[stream_id]
        self._outbound.headers(stream_id, response_frames.http_headers(rejection.status))
        if not self._outbound.send(stream_id, f"{rejection}\n".encode(), b""):
            self._streams[stream_id] = RESPONDING

    def _send_error(self, stream_id: int, error: RpcError, *, response_started: bool = False) -> None:
        if error.reason is not None:
            self.on_abuse(error.reason)
        block = response_frames.trailers(error.code, error.message, error.metadata)
        self._outbound.headers(
            stream_id, block if response_started else response_frames.RESPONSE_HEADERS + block, END_STREAM
        )
        self._outbound.forget(stream_id)

    def _on_sent(self, stream_ids: list[int]) -> None:
        """Handle streams whose pending data was written completely."""
        for stream_id in stream_ids:
            if self._streams[stream_id] is RESPONDING:
                del self._streams[stream_id]
            else:
                cast("StreamingCall", self._streams[stream_id]).on_writable()

    def _reset_stream(self, stream_id: int, code: ErrorCode = ErrorCode.NO_ERROR) -> None:
        """Send RST_STREAM on a stream that the client may still be sending on."""
        self._outbound.write(frames.rst_stream(stream_id, code))
        self._reset_ids[stream_id] = None
        if len(self._reset_ids) > MAX_RESET_IDS:
            del self._reset_ids[next(iter(self._reset_ids))]

    def _close_stream(self, stream_id: int) -> None:
        """Remove a stream, and cancel the work on its response."""
        stream = self._streams.pop(stream_id, None)
        self._outbound.forget(stream_id)
        if stream is PENDING:
            self._cancelled_calls += self.on_cancelled(stream_id)
        elif stream is not None and not isinstance(stream, (CallHeaders, str)):
            self._unfinished_bytes -= stream.buffered_bytes
            stream.cancel()

    def _close_streams(self) -> None:
        for stream_id in list(self._streams):
            self._close_stream(stream_id)

    def _is_half_closed(self, stream_id: int) -> bool:
        """Return True if the client has sent END_STREAM."""
        stream = self._streams[stream_id]
        return isinstance(stream, str) or (
            not isinstance(stream, (CallHeaders, UnaryRequest, RejectedRequest)) and stream.has_ended
        )

    # Bounds.

    def expire(self, count: int, reason: StrEnum) -> None:
        """Reset up to `count` of the oldest streams that wait for the client."""
        if not self._is_closed:
            unfinished = (stream_id for stream_id, stream in self._streams.items() if _waits_for_client(stream))
            self._expire(list(islice(unfinished, count)), reason)

    def _expire_until(self, last_id: int) -> None:
        """Reset all streams up to this id that wait for the client."""
        unfinished = [stream_id for stream_id, stream in self._streams.items() if _waits_for_client(stream)]
        self._expire([stream_id for stream_id in unfinished if stream_id <= last_id], Reason.IDLE_TIMEOUT)

    def _expire(self, stream_ids: list[int], reason: StrEnum) -> None:
        """Reset streams that wait for their client, and report why."""
        for stream_id in stream_ids:
            self._close_stream(stream_id)
            self._reset_stream(stream_id, ErrorCode.CANCEL)
            self._resets += 1
        if stream_ids:
            self.on_abuse(reason, len(stream_ids))
            self._report_buffered()

    def clear_header_cache(self) -> None:
        """Free the memory of cached header blocks."""
        self._header_blocks.clear_cache()
        self._report_buffered()

    def _report_buffered(self) -> None:
        """Report the number of buffered bytes, if it changed."""
        blocks = self._header_blocks
        total_bytes = self._unfinished_bytes + len(self._buffer) + self._outbound.buffered_bytes
        total_bytes += blocks.cache_bytes + blocks.unfinished_bytes
        if total_bytes != self.buffered_bytes and not self._is_closed:
            more_bytes, self.buffered_bytes = total_bytes - self.buffered_bytes, total_bytes
            self.on_buffered(more_bytes)


def _waits_for_client(stream: Stream) -> bool:
    """Return True if the client has to send the rest of its message, or to read its response."""
    if isinstance(stream, str):
        return stream is RESPONDING
    return isinstance(stream, (CallHeaders, UnaryRequest, RejectedRequest)) or not stream.has_ended
