"""Budget of recorded denials during a flood: all at first, then as many as time allows, evenly spread.

A token bucket: a minute's worth at once, and as much each minute. Omitted denials are counted here, and every call is
counted in usage regardless. A row with much text costs several tokens, so that space is bounded, and not only rows.
"""

from __future__ import annotations

import math

MINUTE_S = 60.0

ROW_TEXT_BYTES = 160
"""A row with less text costs one token. Measured with 20,000 rows and their indexes, in SQLite and PostgreSQL: typical
rows take 460 and 450 bytes, one with just less text than this at most 660 and 700, the longest in ASCII 2,600 in both
(it costs 12), and one with texts of maximum length in four-byte characters 9,000 and 1,900 (21)."""


class RowBudget:
    """A token bucket of rows per minute."""

    def __init__(self, per_minute: int) -> None:
        """0 means unlimited."""
        self._per_minute = per_minute
        self._left = float(per_minute)
        self._at_s = -math.inf  # time of the last update of `_left`
        self.left_out = 0

    def admits(self, now_s: float) -> bool:
        """Return True if the next row may be recorded; then call `spend`. Otherwise it is counted as omitted."""
        if not self._per_minute:
            return True
        if now_s > self._at_s:
            self._left = min(self._left + (now_s - self._at_s) * self._per_minute / MINUTE_S, self._per_minute)
        self._at_s = now_s  # setting the clock back adds nothing
        if self._left >= 1.0:
            return True
        self.left_out += 1
        return False

    def spend(self, text_bytes: int) -> None:
        self._left -= 1 + text_bytes // ROW_TEXT_BYTES
