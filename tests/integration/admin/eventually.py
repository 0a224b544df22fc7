"""Measures the longest time for which the event loop is blocked."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import thread_time


@dataclass
class Waited:
    longest_s: float = 0.0


@asynccontextmanager
async def longest_wait() -> AsyncIterator[Waited]:
    """Measure the longest event loop iteration, in CPU time of the thread.

    Excludes other processes, and the garbage collector, which has more to traverse here than in a service
    (server/lifecycle.py).
    """
    waited = Waited()

    async def watch() -> None:
        last_s = thread_time()
        while True:
            await asyncio.sleep(0)
            now_s = thread_time()
            waited.longest_s, last_s = max(waited.longest_s, now_s - last_s), now_s

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0)
    gc.disable()
    try:
        yield waited
    finally:
        await asyncio.sleep(0)  # so that the last iteration is measured, too
        gc.enable()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
