"""Open-loop clients: calls at a constant rate, with all outcomes.

Unlike in tests/support/closed_loop_clients.py, the next call does not wait for a response: a hanging server keeps
receiving calls, as from Envoy. Every call has a deadline.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any, NamedTuple, Self

import grpc
from grpc import aio

from ratelimit_rls.core.model import Code
from ratelimit_rls.protos.messages import SHOULD_RATE_LIMIT, RateLimitResponse

_CONNECTIONS = 4


class CallRecord(NamedTuple):
    """One call: its start and end on the monotonic clock, and its outcome."""

    message: int  # index of the message
    begun_s: float
    ended_s: float
    outcome: int | grpc.StatusCode  # overall code of the response, or gRPC status without one
    left: tuple[int, ...]  # remaining hits of each descriptor
    details: str = ""


class OpenLoopClients:
    """Sends `messages` in turn, `per_second` of them, from a thread."""

    def __init__(self, address: str, messages: Sequence[bytes], *, per_second: float, timeout_s: float) -> None:
        self.calls: list[CallRecord] = []
        self._address = address
        self._messages = messages
        self._per_second = per_second
        self._timeout_s = timeout_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._methods: list[aio.UnaryUnaryMultiCallable[bytes, bytes]] = []
        self._pace: asyncio.Task[None] | None = None

    @property
    def outcomes(self) -> Counter[int | grpc.StatusCode]:
        return Counter(call.outcome for call in self.calls)

    @property
    def longest_s(self) -> float:
        return max(call.ended_s - call.begun_s for call in self.calls)

    def stop(self) -> None:
        """Stop sending, and wait for calls in flight."""

        async def stop() -> None:
            if self._pace is not None:
                self._pace.cancel()
                await asyncio.gather(self._pace, return_exceptions=True)

        self._run(stop())

    def use_up(self) -> None:
        """Stop the load, then send every message without pauses until it is denied."""
        self.stop()

        async def until_denied(message: int) -> None:
            method = self._methods[message % len(self._methods)]
            while (await self._call(method, message)).outcome == Code.OK:
                pass

        async def use_up() -> None:
            at_once = max(1, 32 // len(self._messages))
            await asyncio.gather(*map(until_denied, list(range(len(self._messages))) * at_once))

        self._run(use_up())

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _start(self) -> None:
        # Without a local subchannel pool, all channels of the process would share a connection.
        own_pool = (("grpc.use_local_subchannel_pool", 1),)
        self._channels = [aio.insecure_channel(self._address, options=own_pool) for _ in range(_CONNECTIONS)]
        self._methods = [channel.unary_unary(SHOULD_RATE_LIMIT) for channel in self._channels]
        await asyncio.gather(*(channel.channel_ready() for channel in self._channels))
        self._pace = asyncio.create_task(self._keep_pace())

    async def _keep_pace(self) -> None:
        """Send calls when they are due. Calls that the event loop delays are sent late, not skipped."""
        begun_s = time.monotonic()
        running: set[asyncio.Task[CallRecord]] = set()
        try:
            for number in itertools.count():
                ahead_s = begun_s + number / self._per_second - time.monotonic()
                if ahead_s > 0:
                    await asyncio.sleep(ahead_s)
                method = self._methods[number % len(self._methods)]
                task = asyncio.create_task(self._call(method, number % len(self._messages)))
                running.add(task)
                task.add_done_callback(running.discard)
        finally:
            await asyncio.gather(*running)

    async def _call(self, method: aio.UnaryUnaryMultiCallable[bytes, bytes], message: int) -> CallRecord:
        begun_s = time.monotonic()
        outcome: int | grpc.StatusCode
        left: tuple[int, ...] = ()
        details = ""
        try:
            answer = RateLimitResponse.FromString(await method(self._messages[message], timeout=self._timeout_s))
            outcome, left = answer.overall_code, tuple(status.limit_remaining for status in answer.statuses)
        except aio.AioRpcError as error:
            outcome, details = error.code(), error.details() or ""
        record = CallRecord(message, begun_s, time.monotonic(), outcome, left, details)
        self.calls.append(record)
        return record

    def __enter__(self) -> Self:
        self._thread.start()
        self._run(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

        async def close() -> None:
            await asyncio.gather(*(channel.close() for channel in self._channels))

        self._run(close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
