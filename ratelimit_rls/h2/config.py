"""Configuration of connections: timeouts and limits, shared by all connections of a server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ratelimit_rls.h2 import frames
from ratelimit_rls.h2.call_headers import DEFAULT_MAX_MESSAGE_BYTES, CallHeadersParser
from ratelimit_rls.h2.frames import Setting
from ratelimit_rls.h2.header_blocks import MAX_LIST_BYTES

CONNECTION_WINDOW_BYTES = 16 * 2**20
WINDOW_UPDATE_BYTES = 2**20
STREAM_WINDOW_BYTES = 5 * 2**20
"""Large enough for the largest accepted message with its prefix and padding."""


class Timeouts(NamedTuple):
    """Timeouts of a connection, in seconds. The owner of the socket enforces the first two."""

    preface_s: float = 10.0  # until the connection preface and SETTINGS have arrived
    write_s: float = 30.0  # how long the socket may accept nothing while there is something to write
    frame_s: float = 10.0  # until a frame or a header block is complete
    message_s: float = 15.0  # until a call's message is complete, or its response is read; up to twice that
    keepalive_s: float = 300.0  # without input before a PING is sent; 0: no PINGs
    keepalive_timeout_s: float = 20.0  # until the PING is acknowledged


DEFAULT_TIMEOUTS = Timeouts()


@dataclass(slots=True)
class Config:
    """Configuration of connections. A change of `max_streams` must be announced (`Connection.announce_streams`)."""

    header_parser: CallHeadersParser
    max_streams: int = 1024
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    timeouts: Timeouts = DEFAULT_TIMEOUTS


def server_preface(max_streams: int) -> bytes:
    """Return the server connection preface: SETTINGS, and WINDOW_UPDATE for the connection's window."""
    return frames.settings(
        {
            Setting.MAX_CONCURRENT_STREAMS: max_streams,
            Setting.INITIAL_WINDOW_SIZE: STREAM_WINDOW_BYTES,
            Setting.MAX_HEADER_LIST_SIZE: MAX_LIST_BYTES,
        }
    ) + frames.window_update(0, CONNECTION_WINDOW_BYTES - frames.DEFAULT_WINDOW_BYTES)
