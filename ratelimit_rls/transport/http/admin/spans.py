"""For how long a key, a token, an override or a block is to last, as administrators write it: 90m, 12h, 30d."""

from __future__ import annotations

import re

PATTERN = "^[1-9][0-9]{0,4}[smhdw]$"

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_SPAN = re.compile(r"([1-9][0-9]{0,4})([smhdw])")


def span_s(text: str) -> int:
    """Seconds. Raises ValueError with the second half of a sentence."""
    found = _SPAN.fullmatch(text)
    if found is None:
        raise ValueError("is no span of time; use a whole number with s, m, h, d or w, e.g. 12h or 90d")
    return int(found[1]) * _SECONDS[found[2]]
