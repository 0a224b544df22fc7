"""An asyncio lock that background work acquires only while no foreground work waits for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque


class PriorityLock:
    """First in, first out within each of the two priorities. `release` hands the lock to the next waiter directly,
    so no other task can acquire it in between."""

    def __init__(self) -> None:
        self._is_locked = False
        self._foreground: deque[asyncio.Future[None]] = deque()
        self._background: deque[asyncio.Future[None]] = deque()

    @property
    def is_locked(self) -> bool:
        return self._is_locked

    async def acquire(self, *, background: bool = False) -> None:
        if not self._is_locked:
            self._is_locked = True
            return
        waiting = self._background if background else self._foreground
        granted = asyncio.get_running_loop().create_future()
        waiting.append(granted)
        try:
            await granted
        except asyncio.CancelledError:
            if granted.cancelled():
                with contextlib.suppress(ValueError):  # release() has skipped it
                    waiting.remove(granted)
            else:  # it was granted in the same iteration of the loop
                self.release()
            raise

    def release(self) -> None:
        for waiting in (self._foreground, self._background):
            while waiting:
                granted = waiting.popleft()
                if not granted.cancelled():
                    granted.set_result(None)
                    return
        self._is_locked = False
