"""Work that runs to completion although its caller is cancelled; the cancellation is delivered afterwards."""

from __future__ import annotations

import asyncio

import pytest

from ratelimit_rls.database.uncancellable import run_to_completion


async def test_result_and_exception_are_passed_to_the_caller() -> None:
    async def answer() -> int:
        await asyncio.sleep(0)
        return 42

    async def fail() -> None:
        raise KeyError("mine")

    assert await run_to_completion(answer()) == 42
    with pytest.raises(KeyError, match="mine"):
        await run_to_completion(fail())


@pytest.mark.parametrize("times", [1, 2])
async def test_cancellation_is_delivered_at_the_next_await(times: int) -> None:
    go_on, seen = asyncio.Event(), []

    async def work() -> str:
        await go_on.wait()
        return "done"

    async def caller() -> None:
        seen.append(await run_to_completion(work()))
        seen.append("after it")
        await asyncio.sleep(0)
        seen.append("never")

    task = asyncio.create_task(caller())
    for _ in range(times):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.wait([task])
    assert (seen, task.cancelled(), task.cancelling()) == (["done", "after it"], True, times)


async def test_enclosing_timeout_raises_timeout_error() -> None:
    go_on = asyncio.Event()

    async def caller() -> str:
        try:
            async with asyncio.timeout(0):
                await run_to_completion(go_on.wait())
                await asyncio.sleep(0)
        except TimeoutError:
            await asyncio.sleep(0)  # the cancellation is used up
            return "too late"
        return "in time"

    task = asyncio.create_task(caller())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    go_on.set()
    assert await task == "too late"
