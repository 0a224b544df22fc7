"""Clients that call at a steady rate, whatever comes of it, and keep what each was told.

Unlike tests/steady.py nobody waits for an answer before the next call is sent: a server that hangs is not spared, as
Envoy does not spare it. Every call has a deadline.
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
from ratelimit_rls.transport.grpc.messages import SHOULD_RATE_LIMIT, RateLimitResponse

_CONNECTIONS = 4


class Told(NamedTuple):
    """One call: its span on the monotonic clock, and how it ended."""

    message: int  # its number
    begun_s: float
    ended_s: float
    outcome: int | grpc.StatusCode  # the overall code of an answer, or the status of a call that had none
    left: tuple[int, ...]  # what each descriptor was told to have left
    details: str = ""


class Paced:
    """`messages` in turn, `per_second` of them, from a thread of its own."""

    def __init__(self, address: str, messages: Sequence[bytes], *, per_second: float, timeout_s: float) -> None:
        self.calls: list[Told] = []
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
        """Send nothing more, and wait for what is under way."""

        async def stop() -> None:
            if self._pace is not None:
                self._pace.cancel()
                await asyncio.gather(self._pace, return_exceptions=True)

        self._run(stop())

    def use_up(self) -> None:
        """Stop, and send every message as fast as it is answered until it is refused."""
        self.stop()

        async def until_refused(message: int) -> None:
            method = self._methods[message % len(self._methods)]
            while (await self._call(method, message)).outcome == Code.OK:
                pass

        async def use_up() -> None:
            at_once = max(1, 32 // len(self._messages))
            await asyncio.gather(*map(until_refused, list(range(len(self._messages))) * at_once))

        self._run(use_up())

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _start(self) -> None:
        # Without a pool of its own, each channel of one process would share a connection.
        own_pool = (("grpc.use_local_subchannel_pool", 1),)
        self._channels = [aio.insecure_channel(self._address, options=own_pool) for _ in range(_CONNECTIONS)]
        self._methods = [channel.unary_unary(SHOULD_RATE_LIMIT) for channel in self._channels]
        await asyncio.gather(*(channel.channel_ready() for channel in self._channels))
        self._pace = asyncio.create_task(self._keep_pace())

    async def _keep_pace(self) -> None:
        """What could not be sent in time for want of a turn is sent late, not left out."""
        begun_s = time.monotonic()
        under_way: set[asyncio.Task[Told]] = set()
        try:
            for number in itertools.count():
                ahead_s = begun_s + number / self._per_second - time.monotonic()
                if ahead_s > 0:
                    await asyncio.sleep(ahead_s)
                method = self._methods[number % len(self._methods)]
                task = asyncio.create_task(self._call(method, number % len(self._messages)))
                under_way.add(task)
                task.add_done_callback(under_way.discard)
        finally:
            await asyncio.gather(*under_way)

    async def _call(self, method: aio.UnaryUnaryMultiCallable[bytes, bytes], message: int) -> Told:
        begun_s = time.monotonic()
        outcome: int | grpc.StatusCode
        left: tuple[int, ...] = ()
        details = ""
        try:
            answer = RateLimitResponse.FromString(await method(self._messages[message], timeout=self._timeout_s))
            outcome, left = answer.overall_code, tuple(status.limit_remaining for status in answer.statuses)
        except aio.AioRpcError as error:
            outcome, details = error.code(), error.details() or ""
        told = Told(message, begun_s, time.monotonic(), outcome, left, details)
        self.calls.append(told)
        return told

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
