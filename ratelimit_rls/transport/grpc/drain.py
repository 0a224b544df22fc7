"""Waiting for the last of something, when the process stops.

Looked at again and again: it happens once in a process's life, and an event would cost something with every call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_LOOK_AGAIN_S = 0.005


async def until_none(left: Callable[[], int], timeout_s: float) -> None:
    """Return when nothing is left, or when the time is up."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while left() and loop.time() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(_LOOK_AGAIN_S)
