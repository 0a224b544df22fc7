"""What was found out about tokens, for a while and within a bound, by a digest: the tokens themselves are not kept."""

from __future__ import annotations

from random import randrange
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class _Entry(NamedTuple, Generic[T]):
    until_s: float
    value: T


class Remembered(Generic[T]):
    """At most `most` of them. A new one takes the place of any other: no order of asking keeps all the others out."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._entries: dict[bytes, _Entry[T]] = {}
        self._digests: list[bytes] = []  # in places that stay, so that one can be drawn

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, digest: bytes, now_s: float) -> T | None:
        entry = self._entries.get(digest)
        return entry.value if entry is not None and now_s < entry.until_s else None

    def put(self, digest: bytes, value: T, until_s: float) -> None:
        if digest not in self._entries:
            if len(self._digests) < self._most:
                self._digests.append(digest)
            else:
                place = randrange(self._most)
                del self._entries[self._digests[place]]
                self._digests[place] = digest
        self._entries[digest] = _Entry(until_s, value)

    def clear(self) -> None:
        self._entries.clear()
        self._digests.clear()
