"""Requests that are received in parts: unary calls, streaming calls, and requests that are not gRPC."""

from __future__ import annotations

from typing import Protocol

from ratelimit_rls.h2 import response_frames
from ratelimit_rls.h2.call_headers import CallHeaders, NotGrpc, decompress
from ratelimit_rls.h2.status import RpcError, StatusCode, message_too_large

_NOT_ONE_MESSAGE = RpcError(StatusCode.INTERNAL, "the call must have exactly one message")


MAX_REJECTED_BODY_BYTES = 65_536
"""Body bytes that are read from a request that is not gRPC before it is rejected."""


class StreamingCall(Protocol):
    """A call that the application serves message by message."""

    response_started: bool  # set by the connection when it sends the response headers

    @property
    def has_ended(self) -> bool:
        """True if the client has sent END_STREAM."""
        ...

    @property
    def buffered_bytes(self) -> int:
        """Bytes that are buffered for the call. The connection reports them until the call ends."""
        ...

    @property
    def matches_content_length(self) -> bool:
        """False if the client has sent another number of bytes than it announced."""
        ...

    def receive_data(self, data: bytes, max_bytes: int) -> RpcError | None:
        """Process the data of a DATA frame. Return the error that ends the call, if there is one."""
        ...

    def on_end_stream(self) -> RpcError | None:
        """Handle END_STREAM from the client. Return the error that ends the call, if there is one."""
        ...

    def on_writable(self) -> None:
        """Handle that everything sent on the stream was written."""
        ...

    def cancel(self) -> None:
        """Stop: the client cancelled the call, or the connection is gone."""
        ...


class UnaryRequest:
    """A call with one request message, which arrives in parts."""

    __slots__ = ("_data", "headers")
    response_started = False

    def __init__(self, headers: CallHeaders) -> None:
        self.headers = headers
        self._data = bytearray()

    @property
    def buffered_bytes(self) -> int:
        return len(self._data)

    @property
    def matches_content_length(self) -> bool:
        return self.headers.content_length in (None, len(self._data))

    def receive_data(self, data: bytes, max_bytes: int) -> RpcError | None:
        """Append data. Return an error as soon as the message is known to be invalid or too large."""
        self._data += data
        if len(self._data) >= response_frames.PREFIX_BYTES:
            _, length = response_frames.PREFIX.unpack_from(self._data)
            if length > (max_bytes := min(max_bytes, self.headers.max_message_bytes)):
                return message_too_large(max_bytes)
            if length < len(self._data) - response_frames.PREFIX_BYTES:
                return _NOT_ONE_MESSAGE
        return None

    def cancel(self) -> None:
        """Do nothing: no work has started yet."""

    def message(self, max_bytes: int) -> bytes | RpcError:
        """Return the complete message, decompressed."""
        if len(self._data) < response_frames.PREFIX_BYTES:
            return _NOT_ONE_MESSAGE
        is_compressed, length = response_frames.PREFIX.unpack_from(self._data)
        message = bytes(self._data[response_frames.PREFIX_BYTES :])
        if len(message) != length:
            return _NOT_ONE_MESSAGE
        if not is_compressed:
            return message
        return decompress(message, self.headers.encoding, min(max_bytes, self.headers.max_message_bytes))


class RejectedRequest:
    """A request that is not gRPC. It gets an HTTP error when it ends, as from any other HTTP server."""

    __slots__ = ("_taken_bytes", "rejection")
    buffered_bytes = 0
    response_started = False

    def __init__(self, rejection: NotGrpc) -> None:
        self.rejection = rejection
        self._taken_bytes = 0

    @property
    def matches_content_length(self) -> bool:
        return self.rejection.content_length in (None, self._taken_bytes)

    def receive_data(self, data: bytes, max_bytes: int) -> NotGrpc | None:
        """Count data. Return the rejection early if the body is too long."""
        self._taken_bytes += len(data)
        return self.rejection if self._taken_bytes > MAX_REJECTED_BODY_BYTES else None

    def cancel(self) -> None:
        """Do nothing: a rejected request is not processed."""
