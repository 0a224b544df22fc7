"""A store that does not answer in time, on both transports: callers are told before their deadlines, as rules say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc import aio

from ratelimit_rls.core.plan import Policy
from ratelimit_rls.errors import StoreUnavailable
from ratelimit_rls.failure import Fallback
from ratelimit_rls.service import RateLimiter
from ratelimit_rls.transport.grpc.messages import SHOULD_RATE_LIMIT, RateLimitResponse
from ratelimit_rls.transport.grpc.rls import RlsDoor
from tests.integration.transport.conftest import Client, Service, eventually, message

OK, OVER_LIMIT = 1, 2
MARGIN_S = 0.65  # with what most callers wait under a second, which clients tell exactly
UNAVAILABLE, EXHAUSTED = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED

RULES = b"""
domain: edge
descriptors:
  - key: user
    rate_limit: {unit: hour, requests_per_unit: 2}
  - key: lax
    on_store_failure: allow
    rate_limit: {unit: hour, requests_per_unit: 2}
  - key: strict
    on_store_failure: deny
    deny: {format: problem+json}
    rate_limit: {unit: hour, requests_per_unit: 2}
  - key: local
    on_store_failure: local
    rate_limit: {unit: hour, requests_per_unit: 2}
"""

USER, LAX, STRICT, LOCAL = (message({key: "v"}) for key in ("user", "lax", "strict", "local"))


async def told(call: aio.UnaryUnaryCall[bytes, bytes]) -> Any:
    try:
        return int(RateLimitResponse.FromString(await call).overall_code)
    except aio.AioRpcError as error:
        return error.code()


@pytest.fixture
def paused(service: Service) -> Service:
    """Whose store does not answer."""
    service.room.margin_s = MARGIN_S  # client and server share a loop here, and the machine may be busy
    service.load(RULES)
    service.store.gate.clear()
    return service


def stat(service: Service, name: str) -> int:
    return service.metrics.names()[f"ratelimit.{name}"]


async def test_each_is_told_what_its_rules_say_before_its_deadline_and_the_patient_wait_on(
    client: Client, paused: Service
) -> None:
    patient = client.raw(LAX, timeout=20)
    late = [client.raw(asked, timeout=MARGIN_S + 0.1) for asked in (USER, LAX, STRICT, LOCAL, LOCAL, LOCAL)]
    user, lax, strict, *local = await asyncio.gather(*map(told, late))
    assert (user, lax, strict, sorted(local)) == (UNAVAILABLE, OK, OVER_LIMIT, [OK, OK, OVER_LIMIT])
    assert paused.servers[0].in_flight == 1
    assert stat(paused, "service.call.should_rate_limit.late") == 6
    paused.store.gate.set()
    assert await told(patient) == OK
    await eventually(lambda: paused.servers[0].in_flight == 0)


@pytest.mark.slow
async def test_calls_of_one_batch_are_answered_each_at_its_own_deadline(client: Client, paused: Service) -> None:
    loop = asyncio.get_running_loop()
    begun_s = loop.time()

    async def after_s(wait_s: float) -> float:
        assert await told(client.raw(LAX, timeout=MARGIN_S + wait_s)) == OK
        return loop.time() - begun_s

    waits_s = [0.2, 0.1, MARGIN_S + 0.25, 0.1]  # the last is due when other deadlines have passed: no answer then
    ended_s = await asyncio.gather(*map(after_s, waits_s))
    assert all(end_s > wait_s - 0.05 for wait_s, end_s in zip(waits_s, ended_s, strict=True))


async def test_a_denial_without_the_store_has_its_body_and_a_time_to_come_back(client: Client, paused: Service) -> None:
    response = RateLimitResponse.FromString(await client.raw(STRICT, timeout=MARGIN_S + 0.1))
    assert response.statuses[0].duration_until_reset.seconds == 1
    assert b"quota-exceeded" in response.raw_body


async def test_a_store_that_fails_under_way_is_the_rules_affair(client: Client, paused: Service) -> None:
    calls = [client.raw(asked, timeout=20) for asked in (USER, LAX, STRICT, LOCAL)]
    await eventually(lambda: paused.servers[0].in_flight == 4)
    paused.store.fault = StoreUnavailable("gone")
    paused.store.gate.set()
    assert await asyncio.gather(*map(told, calls)) == [UNAVAILABLE, OK, OVER_LIMIT, OK]


@pytest.fixture
async def crowded(paused: Service) -> AsyncIterator[Client]:
    """A client of a service in which two calls may wait for the store."""
    limiter = RateLimiter(
        paused.rules, paused.store, paused.metrics, Policy(), Fallback(paused.metrics), most_in_flight=2
    )
    paused.metrics.watch(limiter.gauges)
    paused.doors = {SHOULD_RATE_LIMIT: RlsDoor(limiter, paused.metrics, room=paused.room)}
    async with aio.insecure_channel(await paused.listen()) as channel:
        yield Client(channel)


async def test_above_the_most_in_flight_calls_are_answered_at_once(crowded: Client, paused: Service) -> None:
    waiting = [crowded.raw(USER), crowded.raw(USER)]
    await eventually(lambda: stat(paused, "store.calls_in_flight") == 2)
    others = [crowded.raw(asked) for asked in (USER, LAX, STRICT, LOCAL)]
    assert await asyncio.gather(*map(told, others)) == [EXHAUSTED, OK, OVER_LIMIT, OK]
    assert await crowded.failure(USER) == (EXHAUSTED, "too many calls wait for the store; try again later")
    assert sum(paused.store.batches) == 2
    paused.store.gate.set()
    assert await asyncio.gather(*map(told, waiting)) == [OK, OK]
    assert await told(crowded.raw(LAX)) == OK
    assert stat(paused, "service.call.should_rate_limit.overloaded") == 5
    assert stat(paused, "store.calls_in_flight") == 0


@pytest.fixture
async def identified(service: Service) -> AsyncIterator[Client]:
    """A client of a service that counts a call once by its metadata."""
    service.options = replace(service.options, request_id_metadata="X-Call")
    async with aio.insecure_channel(await service.listen()) as channel:
        yield Client(channel)


async def test_a_retry_with_the_id_of_its_metadata_counts_once(identified: Client) -> None:
    async def left(user: str, *request_id: str) -> int:
        metadata = [("x-other", "y"), *(("x-call", one) for one in request_id)]
        answer = await identified.raw(message({"user": user}), metadata=metadata)
        return int(RateLimitResponse.FromString(answer).statuses[0].limit_remaining)

    together = await asyncio.gather(*(left("a", "1") for _ in range(10)))
    assert together == [1] * 10
    assert [await left("a", "1"), await left("a", "2"), await left("a", "1")] == [1, 0, 1]
    assert [await left("b"), await left("b", "")] == [1, 0]
    with pytest.raises(aio.AioRpcError) as refused:
        await left("c", "x" * 257)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
