"""PriorityLock: order of waiters, and cancellation."""

from __future__ import annotations

import asyncio

import pytest

from ratelimit_rls.database.priority_lock import PriorityLock


class Queue:
    def __init__(self) -> None:
        self.lock = PriorityLock()
        self.got: list[str] = []

    def add(self, name: str, *, background: bool = False) -> asyncio.Task[None]:
        async def wait() -> None:
            await self.lock.acquire(background=background)
            self.got.append(name)

        return asyncio.create_task(wait())


@pytest.fixture
async def queue() -> Queue:
    """Waiters of a lock that is already acquired."""
    queue = Queue()
    await queue.lock.acquire()
    return queue


async def steps(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_foreground_goes_first_and_each_queue_is_fifo(queue: Queue) -> None:
    queue.add("records", background=True)
    queue.add("more records", background=True)
    queue.add("a change")
    queue.add("another change")
    await steps()
    for _ in range(4):
        queue.lock.release()
        await steps()
    assert queue.got == ["a change", "another change", "records", "more records"]
    queue.lock.release()
    assert not queue.lock.is_locked


async def test_cancelled_waiter_is_skipped(queue: Queue) -> None:
    cancelled = queue.add("cancelled")
    queue.add("next")
    await steps()
    cancelled.cancel()
    queue.lock.release()  # before the task has processed its cancellation
    await steps()
    assert queue.got == ["next"]
    cancelled = queue.add("cancelled")
    await steps()
    cancelled.cancel()
    await steps()
    queue.lock.release()
    assert not queue.lock.is_locked


async def test_waiter_cancelled_when_granted_passes_the_lock_on(queue: Queue) -> None:
    cancelled = queue.add("cancelled")
    queue.add("next", background=True)
    await steps()
    queue.lock.release()
    cancelled.cancel()
    await steps()
    assert queue.got == ["next"]
    assert cancelled.cancelled()
    queue.lock.release()
    assert not queue.lock.is_locked


async def test_release_hands_the_lock_to_the_next_waiter_directly(queue: Queue) -> None:
    queue.add("next")
    await steps()
    queue.lock.release()
    queue.add("quick")
    await steps()
    assert queue.got == ["next"]
