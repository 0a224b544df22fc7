"""Cache with a maximum number of entries, for results that are replaced or cleared; else use `functools.lru_cache`."""

from __future__ import annotations

from collections.abc import Hashable
from random import random
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class BoundedCache(Generic[K, V]):
    """Cache with random eviction: no access pattern can keep all other entries out, and a lookup changes nothing."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._entries: dict[K, V] = {}
        self._keys: list[K] = []  # for random choice
        self.get = self._entries.get

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, key: K, value: V) -> None:
        """Add or replace an entry. If the cache is full, a random entry is evicted for a new one."""
        if key not in self._entries:
            if len(self._keys) < self._max_entries:
                self._keys.append(key)
            else:
                evicted = int(random() * self._max_entries)
                del self._entries[self._keys[evicted]]
                self._keys[evicted] = key
        self._entries[key] = value

    def clear(self) -> None:
        self._entries.clear()
        self._keys.clear()
