"""Cancellation of a coroutine at a chosen await: at its n-th suspension, in one of several ways."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from enum import Enum
from typing import Any


class Moment(Enum):
    WAITING = "while it waits"
    ANSWERED = "when what it waits for is there, and it has not seen it yet"
    TWICE = "while it waits, and again at its next await"


class CancelledAt:
    """Runs the work in a task; `suspensions` is the total number of its suspensions."""

    def __init__(self, work: Coroutine[Any, Any, Any], number: int, moment: Moment = Moment.WAITING) -> None:
        """`number` counts from 1; 0 cancels nothing."""
        self._work = work
        self._number = number
        self._moment = moment
        self.suspensions = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._work.__await__()
        thrown: BaseException | None = None
        while True:
            try:
                future = next(steps) if thrown is None else steps.throw(thrown)
            except StopIteration as stop:
                return stop.value
            thrown = None
            self.suspensions += 1
            self._cancel(future)
            try:
                yield future
            except BaseException as error:
                thrown = error

    def _cancel(self, future: asyncio.Future[Any] | None) -> None:
        task = asyncio.current_task()
        assert task is not None
        is_again = self._moment is Moment.TWICE and self.suspensions == self._number + 1
        if self.suspensions != self._number and not is_again:
            return
        if self._moment is Moment.ANSWERED and future is not None:
            # Runs before the task is woken, whose callback is added later.
            future.add_done_callback(lambda _: task.cancel())
        else:
            asyncio.get_running_loop().call_soon(task.cancel)


async def run_cancelled(work: Coroutine[Any, Any, Any], number: int, moment: Moment = Moment.WAITING) -> int:
    """Return how often the work was suspended. Its exceptions are raised, except the cancellation."""
    cancelled = CancelledAt(work, number, moment)

    async def run() -> None:
        await cancelled

    task = asyncio.create_task(run())
    await asyncio.wait([task])
    if not task.cancelled():
        task.result()
    return cancelled.suspensions
