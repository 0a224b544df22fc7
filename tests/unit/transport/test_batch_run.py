"""Batches run without a task: what they await, their context and their errors."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import Context, ContextVar, copy_context
from math import inf
from types import SimpleNamespace
from typing import Any

from structlog.testing import capture_logs

from ratelimit_rls.common.timers import wait_for_event
from ratelimit_rls.transport.grpc.http2_server import _Batch


def begin(pipeline_run: Coroutine[Any, Any, None], context: Context | None = None) -> None:
    call: Any = (None, 1, b"", 0.0, SimpleNamespace(deadline_in_s=inf))
    server: Any = None
    _Batch(server, [call], has_request_ids=False, wants_metadata=False).begin(pipeline_run, context)


_current: ContextVar[str] = ContextVar("current", default="none")


async def test_first_part_runs_at_once_and_the_rest_when_the_store_has_answered() -> None:
    reply: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    done: list[str] = []

    async def decide() -> None:
        done.append("sent")
        done.append(await reply)
        await asyncio.sleep(0)
        done.append("decided")

    begin(decide())
    assert done == ["sent"]
    reply.set_result("reply")
    await asyncio.sleep(0)
    assert done == ["sent", "reply"]
    await asyncio.sleep(0)
    assert done == ["sent", "reply", "decided"]


async def test_error_of_what_is_awaited_is_raised_where_it_is_awaited() -> None:
    reply: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    caught: list[Exception] = []

    async def decide() -> None:
        try:
            await reply
        except OSError as error:
            caught.append(error)

    begin(decide())
    reply.set_exception(error := OSError("gone"))
    await asyncio.sleep(0)
    assert caught == [error]


async def test_error_of_a_batch_is_logged() -> None:
    reply: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def decide() -> None:
        await reply
        raise RuntimeError("no response could be sent")

    with capture_logs() as lines:
        begin(decide())
        reply.set_result("reply")
        await asyncio.sleep(0)
    assert [line["event"] for line in lines] == ["batch_failed"]


async def test_every_part_runs_in_the_context_of_its_batch() -> None:
    replies = [asyncio.get_running_loop().create_future() for _ in range(2)]
    seen: list[str] = []

    async def decide(name: str, reply: asyncio.Future[None]) -> None:
        _current.set(name)
        await reply
        seen.append(_current.get())
        await asyncio.sleep(0)
        seen.append(_current.get())

    for name, reply in zip(("first", "second"), replies, strict=True):
        begin(decide(name, reply), copy_context())
    assert _current.get() == "none"
    for reply in replies:
        reply.set_result(None)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert seen == ["first", "second", "first", "second"]


async def test_batch_may_wait_for_an_event_with_a_timeout() -> None:
    done = asyncio.Event()

    async def decide() -> None:
        await wait_for_event(asyncio.Event(), 0.001)
        done.set()

    begin(decide())
    await done.wait()
