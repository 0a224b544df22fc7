"""Concurrent clients: calls on real channels to one or more servers, with their outcomes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import grpc
from grpc import aio

from ratelimit_rls.protos.messages import SHOULD_RATE_LIMIT, RateLimitResponse

Outcome = int | grpc.StatusCode
"""Overall code of the response, or gRPC status without one."""


async def run_load(
    addresses: Sequence[str], message: bytes, *, clients: int, calls: int, timeout_s: float = 20
) -> Counter[Outcome]:
    """Make `calls` calls with `clients` clients, distributed evenly over the servers; each waits for its response."""
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
        # Without a local subchannel pool, all channels of the process would share a connection.
        own_pool = (("grpc.use_local_subchannel_pool", 1),)
        self._channels = [aio.insecure_channel(address, options=own_pool) for address in addresses]

    async def __aenter__(self) -> list[aio.UnaryUnaryMultiCallable[bytes, bytes]]:
        return [channel.unary_unary(SHOULD_RATE_LIMIT) for channel in self._channels]

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels))
