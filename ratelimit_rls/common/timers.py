"""Timers of the event loop, in the forms that more than one module needs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import ceil
from typing import Protocol


class Timer(Protocol):
    def cancel(self) -> None: ...


CallLater = Callable[[float, Callable[[], None]], Timer]
"""Calls a function after a number of seconds, unless the timer is cancelled before."""


def call_not_before(delay_s: float, callback: Callable[[], None]) -> Timer:
    """Call after at least `delay_s`. uvloop counts in whole milliseconds; rounding down would fire too early."""
    return asyncio.get_running_loop().call_later(ceil(delay_s * 1000) / 1000, callback)


def call_not_after(delay_s: float, callback: Callable[[], None]) -> Timer:
    """Call after `delay_s` or up to a millisecond earlier, for a response that must not be late."""
    return asyncio.get_running_loop().call_later(int(delay_s * 1000) / 1000, callback)


async def wait_for_event(event: asyncio.Event, timeout_s: float | None) -> None:
    """Wait until the event is set or the timeout is over.

    Not `asyncio.wait_for`: in Python 3.11 it loses a cancellation if it is woken in the same iteration. Not
    `asyncio.timeout`: it needs a task, and a batch has none.
    """
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((waiting,), timeout=timeout_s)
    finally:
        waiting.cancel()
