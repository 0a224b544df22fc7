"""Work that may go on once at a time in a process, and that few may wait for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ratelimit_rls.transport.http.admin.access import too_many
from ratelimit_rls.transport.http.admin.problems import COME_BACK_S

MOST_WAITING = 4
"""Each holds what it was sent, which is much more in memory than it was as bytes."""


class Turns:
    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._here = 0

    @asynccontextmanager
    async def take(self, what: str) -> AsyncIterator[None]:
        """Raises a Fault (429) if too many wait already."""
        if self._here > MOST_WAITING:
            raise too_many(COME_BACK_S, f"too many {what} at once")
        self._here += 1
        try:
            async with self._turn:
                yield
        finally:
            self._here -= 1
