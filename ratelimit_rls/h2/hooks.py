"""Hooks through which a connection reports to the application and asks it. A subclass of Connection overrides them.

Hooks are called synchronously, possibly in the middle of `receive_data`. They may call methods that send, but not
`receive_data`.
"""

from __future__ import annotations

from enum import StrEnum

from ratelimit_rls.h2.call_headers import CallHeaders
from ratelimit_rls.h2.frames import Http2ConnectionError
from ratelimit_rls.h2.request_stream import StreamingCall
from ratelimit_rls.h2.status import RpcError, StatusCode

_UNIMPLEMENTED = RpcError(StatusCode.UNIMPLEMENTED, "Method not found!")  # the text of gRPC's own servers


class Hooks:
    """Default hooks: nothing is reported, every streaming call is rejected, and no input is deferred."""

    def on_output(self) -> None:
        """Handle that there is something to send. Called at most once between two calls of `data_to_send`."""

    def on_calls_queued(self) -> None:
        """Handle that calls were appended to the queues of their methods. Called at least once after they were."""

    def on_cancelled(self, stream_id: int) -> bool:
        """Handle the cancellation of a queued call.

        Return True if `respond`, `fail` or `discard` will be called for it. Until then it counts as open.
        """
        return False

    def on_abuse(self, reason: StrEnum, times: int = 1) -> None:
        """Record that the client exceeded a bound or budget: a Reason, or the reason of an RpcError."""

    def on_buffered(self, more_bytes: int) -> None:
        """Handle that `buffered_bytes` has changed by this number, which may be negative."""

    def on_ready(self) -> None:
        """Handle that the client's connection preface and SETTINGS have arrived."""

    def on_draining(self) -> None:
        """Handle that no more calls will be accepted. The connection should be closed when it `is_idle`."""

    def on_close(self, error: Http2ConnectionError | None) -> None:
        """Send what there is to send, and close the socket. `error` is the reason; None: `close` was called."""

    def open_stream(self, stream_id: int, headers: CallHeaders) -> StreamingCall | RpcError:
        """Begin a call of a method that has no queue, or return why it is rejected."""
        return _UNIMPLEMENTED

    def begin_slow_input(self) -> bool:
        """Return False to keep the input from here on for later. Called before the first slow frame of a read.

        Slow frames are all that are not an ordinary call with a cached header block. `receive_data(b"")` continues.
        """
        return True

    def defer_slow_input(self) -> bool:
        """Return True to keep the rest of the input for later. Called after each slow frame."""
        return False
