"""A store that does not respond in time, on both transports: calls get their fallback before the deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc import aio

from ratelimit_rls.api.rls.codec import RlsCodec
from ratelimit_rls.core.plan import Policy
from ratelimit_rls.errors import StoreUnavailable
from ratelimit_rls.pipeline.fallback import Fallback
from ratelimit_rls.pipeline.limiter import RateLimiter
from ratelimit_rls.protos.messages import SHOULD_RATE_LIMIT, RateLimitResponse
from tests.integration.transport.conftest import Client, Service, eventually, message

OK, OVER_LIMIT = 1, 2
MARGIN_S = 0.65  # keeps most deadlines under a second, which clients send exactly
UNAVAILABLE, EXHAUSTED = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED

RULES = b"""
domain: edge
descriptors:
  - key: user
    rate_limit: {unit: year, requests_per_unit: 2}
  - key: lax
    on_store_failure: allow
    rate_limit: {unit: year, requests_per_unit: 2}
  - key: strict
    on_store_failure: deny
    deny: {format: problem+json}
    rate_limit: {unit: year, requests_per_unit: 2}
  - key: local
    on_store_failure: local
    rate_limit: {unit: year, requests_per_unit: 2}
"""

USER, LAX, STRICT, LOCAL = (message({key: "v"}) for key in ("user", "lax", "strict", "local"))


async def outcome(call: aio.UnaryUnaryCall[bytes, bytes]) -> Any:
    try:
        return int(RateLimitResponse.FromString(await call).overall_code)
    except aio.AioRpcError as error:
        return error.code()


@pytest.fixture
def paused(service: Service) -> Service:
    """Client of a service whose store does not respond."""
    service.throttle_queue.margin_s = MARGIN_S  # client and server share an event loop, and the machine may be busy
    service.load(RULES)
    service.store.gate.clear()
    return service


def stat(service: Service, name: str) -> int:
    return service.metrics.names()[f"ratelimit.{name}"]


async def test_calls_get_their_fallback_before_their_deadline(client: Client, paused: Service) -> None:
    patient = client.raw(LAX, timeout=20)
    late = [client.raw(request, timeout=MARGIN_S + 0.1) for request in (USER, LAX, STRICT, LOCAL, LOCAL, LOCAL)]
    user, lax, strict, *local = await asyncio.gather(*map(outcome, late))
    assert (user, lax, strict, sorted(local)) == (UNAVAILABLE, OK, OVER_LIMIT, [OK, OK, OVER_LIMIT])
    assert paused.servers[0].in_flight == 1
    assert stat(paused, "store.failures.deadline_exceeded") == 6
    paused.store.gate.set()
    assert await outcome(patient) == OK
    await eventually(lambda: paused.servers[0].in_flight == 0)


@pytest.mark.slow
async def test_calls_of_one_batch_have_separate_deadlines(client: Client, paused: Service) -> None:
    loop = asyncio.get_running_loop()
    begun_s = loop.time()

    async def after_s(wait_s: float) -> float:
        assert await outcome(client.raw(LAX, timeout=MARGIN_S + wait_s)) == OK
        return loop.time() - begun_s

    waits_s = [0.2, 0.1, MARGIN_S + 0.25, 0.1]  # the last one is due after the other deadlines
    ended_s = await asyncio.gather(*map(after_s, waits_s))
    assert all(end_s > wait_s - 0.05 for wait_s, end_s in zip(waits_s, ended_s, strict=True))


async def test_fallback_denial_has_body_and_retry_after(client: Client, paused: Service) -> None:
    response = RateLimitResponse.FromString(await client.raw(STRICT, timeout=MARGIN_S + 0.1))
    assert response.statuses[0].duration_until_reset.seconds == 1
    assert b"quota-exceeded" in response.raw_body


async def test_store_error_applies_the_policy_of_the_rules(client: Client, paused: Service) -> None:
    calls = [client.raw(request, timeout=20) for request in (USER, LAX, STRICT, LOCAL)]
    await eventually(lambda: paused.servers[0].in_flight == 4)
    paused.store.fault = StoreUnavailable("gone")
    paused.store.gate.set()
    assert await asyncio.gather(*map(outcome, calls)) == [UNAVAILABLE, OK, OVER_LIMIT, OK]


@pytest.fixture
async def crowded(paused: Service) -> AsyncIterator[Client]:
    """Client of a service that lets two calls wait for the store."""
    limiter = RateLimiter(
        paused.rules, paused.store, paused.metrics, Policy(), Fallback(paused.metrics), max_in_flight=2
    )
    paused.metrics.export_values(limiter.gauges)
    paused.codecs = {SHOULD_RATE_LIMIT: RlsCodec(limiter)}
    async with aio.insecure_channel(await paused.listen()) as channel:
        yield Client(channel)


async def test_calls_over_max_in_flight_are_answered_at_once(crowded: Client, paused: Service) -> None:
    waiting = [crowded.raw(USER), crowded.raw(USER)]
    await eventually(lambda: stat(paused, "store.calls_in_flight") == 2)
    others = [crowded.raw(request) for request in (USER, LAX, STRICT, LOCAL)]
    assert await asyncio.gather(*map(outcome, others)) == [EXHAUSTED, OK, OVER_LIMIT, OK]
    assert await crowded.failure(USER) == (EXHAUSTED, "too many calls wait for the store; try again later")
    assert sum(paused.store.batches) == 2
    paused.store.gate.set()
    assert await asyncio.gather(*map(outcome, waiting)) == [OK, OK]
    assert await outcome(crowded.raw(LAX)) == OK
    assert stat(paused, "store.failures.overloaded") == 5
    assert stat(paused, "store.calls_in_flight") == 0


@pytest.fixture
async def identified(service: Service) -> AsyncIterator[Client]:
    """Client of a service with request ids in the metadata."""
    service.options = replace(service.options, request_id_metadata="X-Call")
    async with aio.insecure_channel(await service.listen()) as channel:
        yield Client(channel)


async def test_retry_with_a_metadata_id_is_counted_once(identified: Client) -> None:
    async def left(user: str, *request_id: str) -> int:
        metadata = [("x-other", "y"), *(("x-call", one) for one in request_id)]
        answer = await identified.raw(message({"user": user}), metadata=metadata)
        return int(RateLimitResponse.FromString(answer).statuses[0].limit_remaining)

    together = await asyncio.gather(*(left("a", "1") for _ in range(10)))
    assert together == [1] * 10
    assert [await left("a", "1"), await left("a", "2"), await left("a", "1")] == [1, 0, 1]
    assert [await left("b"), await left("b", "")] == [1, 0]
    with pytest.raises(aio.AioRpcError) as raised:
        await left("c", "x" * 257)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
