"""Wait for a count to reach zero when the process stops.

It polls: this happens once in a process's life, and an event would add a cost to every call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_POLL_S = 0.005


async def wait_until_zero(left: Callable[[], int], timeout_s: float) -> None:
    """Return when nothing is left, or when the time is up."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while left() and loop.time() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(_POLL_S)
