"""Running work that a cancellation must not interrupt: COMMIT, ROLLBACK, the return of a connection."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def run_to_completion(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, which runs to its end even if the calling task is cancelled meanwhile.

    The cancellation is not lost: the next await of the calling task raises it. The code up to there learns how the work
    ended. `work` must end in bounded time.
    """
    working = asyncio.ensure_future(work)
    cancellations = 0
    while not working.done():
        try:
            await asyncio.wait([working])
        except asyncio.CancelledError:
            cancellations += 1
    caller = asyncio.current_task()
    assert caller is not None
    for _ in range(cancellations):  # keep the counts as they were, for an enclosing asyncio.timeout()
        caller.uncancel()
    for _ in range(cancellations):
        caller.cancel()
    return working.result()
