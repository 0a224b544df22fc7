"""Many clients at once: calls in flight on real channels to one or more servers, and what came of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import grpc
from grpc import aio

from ratelimit_rls.transport.grpc.messages import SHOULD_RATE_LIMIT, RateLimitResponse

Outcome = int | grpc.StatusCode
"""The overall code of an answer, or the status of a call that had none."""


async def hammer(
    addresses: Sequence[str], message: bytes, *, clients: int, calls: int, timeout_s: float = 20
) -> Counter[Outcome]:
    """`calls` calls by `clients` clients that each wait for their answer, spread evenly over the servers."""
    async with _Channels(addresses) as methods:
        outcomes: Counter[Outcome] = Counter()
        left = iter(range(calls))

        async def client(number: int) -> None:
            method = methods[number % len(methods)]
            for _ in left:
                try:
                    answer = RateLimitResponse.FromString(await method(message, timeout=timeout_s))
                    outcomes[answer.overall_code] += 1
                except aio.AioRpcError as error:
                    outcomes[error.code()] += 1

        await asyncio.gather(*(client(number) for number in range(clients)))
        return outcomes


class _Channels:
    def __init__(self, addresses: Sequence[str]) -> None:
        # Without a pool of its own, each channel of one process would share a connection.
        own_pool = (("grpc.use_local_subchannel_pool", 1),)
        self._channels = [aio.insecure_channel(address, options=own_pool) for address in addresses]

    async def __aenter__(self) -> list[aio.UnaryUnaryMultiCallable[bytes, bytes]]:
        return [channel.unary_unary(SHOULD_RATE_LIMIT) for channel in self._channels]

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels))
