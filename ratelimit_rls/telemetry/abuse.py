"""Client abuse that a defence rejected or ended: counted by reason, and logged a few times a second with the peer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import StrEnum
from time import monotonic

import structlog

from ratelimit_rls.telemetry.instruments import ABUSE
from ratelimit_rls.telemetry.series import Series

LOG_LINES_PER_SECOND = 5
"""The counter is exact; the log is a sample, so that an attack cannot fill a disk."""

_log = structlog.get_logger()


class Abuse(StrEnum):
    """The reason why a client's input was rejected or its connection ended. The value is the metric's attribute."""

    # Connections
    TOO_MANY_CONNECTIONS = "too_many_connections"
    TOO_MANY_CONNECTIONS_OF_PEER = "too_many_connections_of_peer"
    IDLE_TIMEOUT = "idle_timeout"
    WRITE_TIMEOUT = "write_timeout"
    SLOW_INPUT_TIMEOUT = "slow_input_timeout"
    KEEPALIVE_TIMEOUT = "keepalive_timeout"
    UNFINISHED_BYTES = "unfinished_bytes"
    TLS_KEY_UPDATE_FLOOD = "tls_key_update_flood"
    TOO_MANY_STREAMS = "too_many_streams"
    BACKLOG_FULL = "backlog_full"

    # HTTP/2 floods
    RAPID_RESET = "rapid_reset"
    RESETS_PROVOKED = "resets_provoked"
    PING_FLOOD = "ping_flood"
    SETTINGS_FLOOD = "settings_flood"
    PRIORITY_FLOOD = "priority_flood"
    WINDOW_UPDATE_FLOOD = "window_update_flood"
    EMPTY_DATA_FLOOD = "empty_data_flood"
    UNKNOWN_FRAME_FLOOD = "unknown_frame_flood"
    CONTINUATION_FLOOD = "continuation_flood"
    HPACK_FLOOD = "hpack_flood"
    HEADERS_TOO_LARGE = "headers_too_large"

    # Messages
    MESSAGE_TOO_LARGE = "message_too_large"
    MESSAGE_TOO_COMPLEX = "message_too_complex"
    DECOMPRESSION_BOMB = "decompression_bomb"
    COMPRESSED_MESSAGE = "compressed_message"

    # HTTP/1
    HTTP_TIMEOUT = "http_timeout"
    MALFORMED_REQUEST = "malformed_request"
    CROSS_ORIGIN = "cross_origin"
    UNKNOWN_HOST = "unknown_host"
    UNAUTHENTICATED = "unauthenticated"

    # The service's limit on itself
    CALL_BUDGET = "call_budget"
    CALL_BUDGET_OF_PEER = "call_budget_of_peer"
    PROXIED_CALL_BUDGET = "proxied_call_budget"


class AbuseLog:
    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._counts = dict.fromkeys(Abuse, 0)
        self._second = -1
        self._lines_left = 0
        self._unlogged = 0

    def record(self, reason: Abuse, peer: str, times: int = 1) -> None:
        """Count and log abuse. `peer` is an address or "unix", never a value that the client chose freely."""
        self._counts[reason] += times
        second = int(self._clock())
        if second != self._second:
            self._second, self._lines_left = second, LOG_LINES_PER_SECOND
        if not self._lines_left:
            self._unlogged += times
            return
        self._lines_left -= 1
        unlogged, self._unlogged = self._unlogged, 0
        _log.warning("client_abuse", reason=reason.value, peer=peer, **({"unlogged": unlogged} if unlogged else {}))

    def count(self, reason: Abuse) -> int:
        return self._counts[reason]

    def measured(self) -> Iterator[tuple[Series, int]]:
        """Yield the counts of reasons that occurred."""
        for reason, count in self._counts.items():
            if count:
                yield Series(ABUSE.name, (reason.value,)), count
