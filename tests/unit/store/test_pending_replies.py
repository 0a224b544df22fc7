"""Replies of several servers: each takes as long as it takes, whichever is awaited first."""

from __future__ import annotations

import asyncio

import pytest

from ratelimit_rls.store.redis import reconnecting
from ratelimit_rls.store.redis.connection import PipelinedConnection
from ratelimit_rls.store.redis.reconnecting import PendingReplies, ReconnectingConnection


async def _unused(*_: object) -> PipelinedConnection:
    raise AssertionError("nothing connects")


async def _unchecked(*_: object) -> None:
    raise AssertionError("nothing connects")


async def test_the_duration_of_replies_ends_when_they_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(reconnecting, "monotonic", lambda: now_s)
    owner = ReconnectingConnection("server", _unused, _unchecked)
    future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    connection: PipelinedConnection = None  # type: ignore[assignment]  # used only after errors
    sent = PendingReplies(owner, connection, [future], 0.0, 1.0)

    now_s = 0.25
    future.set_result(1)
    await asyncio.sleep(0)
    now_s = 5.0  # another server was awaited until now

    assert await sent.replies() == [1]
    assert owner.durations.value.sum_s == 0.25
