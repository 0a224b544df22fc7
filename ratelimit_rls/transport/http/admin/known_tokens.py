"""Tokens that were good a moment ago: whoever has one is looked at even where others at the same address have failed.

Digests only, and a bounded number of them: nothing here opens anything, it only decides who waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

KNOWN_S: Final = 15 * 60
MOST_KNOWN: Final = 1000


class KnownTokens:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._good_s: dict[bytes, float] = {}  # when each was last found good, the oldest first

    def __contains__(self, digest: bytes) -> bool:
        good_s = self._good_s.get(digest)
        return good_s is not None and self._clock() < good_s + KNOWN_S

    def add(self, digest: bytes) -> None:
        self._good_s.pop(digest, None)
        self._good_s[digest] = self._clock()
        if len(self._good_s) > MOST_KNOWN:
            del self._good_s[next(iter(self._good_s))]

    def discard(self, digest: bytes) -> None:
        self._good_s.pop(digest, None)
