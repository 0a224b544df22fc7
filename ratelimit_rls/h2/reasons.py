"""Reasons for which a connection rejects a call or closes, because the client exceeds a bound or a budget."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """A bound or budget that the client exceeded. Ordinary protocol errors have no reason, only an error code."""

    # Timeouts
    IDLE_TIMEOUT = "idle_timeout"
    KEEPALIVE_TIMEOUT = "keepalive_timeout"

    # Budgets of frames (flood_budgets.py)
    RAPID_RESET = "rapid_reset"
    RESETS_PROVOKED = "resets_provoked"
    PING_FLOOD = "ping_flood"
    SETTINGS_FLOOD = "settings_flood"
    PRIORITY_FLOOD = "priority_flood"
    WINDOW_UPDATE_FLOOD = "window_update_flood"
    EMPTY_DATA_FLOOD = "empty_data_flood"
    UNKNOWN_FRAME_FLOOD = "unknown_frame_flood"
    HPACK_FLOOD = "hpack_flood"

    # Header blocks and messages
    CONTINUATION_FLOOD = "continuation_flood"
    HEADERS_TOO_LARGE = "headers_too_large"
    MESSAGE_TOO_LARGE = "message_too_large"
    DECOMPRESSION_BOMB = "decompression_bomb"
