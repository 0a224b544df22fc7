"""RateLimiter over a real connection, by its own client and by one that knows nothing but reflection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from time import time
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from grpc import aio
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from ratelimit_rls.client import AsyncRateLimiterClient, RateLimiterClient, RateLimiterError
from ratelimit_rls.core.model import Request
from ratelimit_rls.errors import RecordsError, RecordsUnavailable
from ratelimit_rls.transport.grpc.ext_authz import ExtAuthzDoor
from ratelimit_rls.transport.grpc.limiter_api import CheckRateLimitDoor, RemainingQuotaDoor
from ratelimit_rls.transport.grpc.limiter_read import Reader
from ratelimit_rls.transport.grpc.limiter_reset import Administrator, Asking, Forget, NotAdmitted, ResetLimit, Why
from ratelimit_rls.transport.grpc.messages import (
    CHECK,
    CHECK_RATE_LIMIT,
    GET_REMAINING_QUOTA,
    RESET_LIMIT,
    CheckRequest,
    CheckResponse,
    ResetRequest,
)
from tests.integration.transport.conftest import Client, Service

RULES = b"""
domain: edge
ext_authz: {descriptors: [{entries: [{key: user, header: x-user}]}]}
descriptors:
  - key: user
    penalty: {within: 1h, after: 1, multipliers: [2]}
    rate_limit: {unit: hour, requests_per_unit: 6}
  - {key: ip, rate_limit: {unit: hour, requests_per_unit: 2, algorithm: sliding_log}}
  - {key: path, rate_limit: {unit: hour, requests_per_unit: 100}}
"""

WRITE, READ = "rla_writer", "rla_reader"


class Administrators:
    def __init__(self) -> None:
        self.resets: list[tuple[str, Request, int]] = []
        self.asked: list[Asking] = []
        self.fault: RecordsError | None = None
        self.fails_late = False
        self.is_too_much = False

    async def admit(self, asking: Asking) -> Administrator:
        self.asked.append(asking)
        if self.is_too_much:
            raise NotAdmitted(Why.TOO_MANY, "too many changes; come back in 7 s")
        if asking.token == READ:
            raise NotAdmitted(Why.FORBIDDEN, "this needs a token with the role write")
        if asking.token != WRITE:
            raise NotAdmitted(Why.NOBODY, "the token is not one of ours")
        return Administrator("ann", "id")

    async def reset(self, who: Administrator, asking: Asking, request: Request, forget: Forget) -> int:
        if self.fault is not None and not self.fails_late:
            raise self.fault
        counters = await forget()
        if self.fault is not None:
            raise self.fault
        self.resets.append((who.name, request, counters))
        return counters


@pytest.fixture
def administrators() -> Administrators:
    return Administrators()


@pytest.fixture
async def address(service: Service, administrators: Administrators) -> str:
    service.load(RULES)
    limiter, metrics, room = service.door.limiter, service.metrics, service.room
    service.doors = {
        **service.doors,
        CHECK: ExtAuthzDoor(limiter, metrics, room=room),
        CHECK_RATE_LIMIT: CheckRateLimitDoor(limiter, metrics, room=room, default_domain="edge"),
        GET_REMAINING_QUOTA: RemainingQuotaDoor(limiter, metrics, room=room, default_domain="edge"),
    }
    service.others = [ResetLimit(limiter, service.store, Reader("edge"), administrators)]
    return await service.listen(request_id_metadata="x-idempotency-key")


@pytest.fixture
async def limiter(address: str) -> AsyncIterator[AsyncRateLimiterClient]:
    async with AsyncRateLimiterClient(address, timeout_s=10, token=WRITE) as client:
        yield client


async def test_three_doors_share_one_count(limiter: AsyncRateLimiterClient, address: str) -> None:
    check = CheckRequest()
    check.attributes.request.http.headers["x-user"] = "ann"
    async with aio.insecure_channel(address) as channel:
        rls, authz = Client(channel), channel.unary_unary(CHECK)
        for left in (5, 2):
            answer = await limiter.check("ann", endpoint="/search")
            assert (answer.allowed, answer.remaining, answer.rule) == (True, left, "edge.user")
            assert (await rls.ask({"user": "ann"})).statuses[0].limit_remaining == left - 1
            assert CheckResponse.FromString(await authz(check.SerializeToString(), timeout=10)).status.code == 0
        assert (await rls.ask({"user": "ann"})).overall_code == 2
        refused = await limiter.check("ann")
    assert (refused.allowed, refused.reason, refused.http_status) == (False, "over_limit", 429)
    assert refused.reset_at - time() == pytest.approx(refused.retry_after, abs=2)


async def test_the_client_that_waits_and_the_one_that_does_not_are_told_the_same(
    limiter: AsyncRateLimiterClient, address: str
) -> None:
    def ask() -> tuple[Any, ...]:
        with RateLimiterClient(address, timeout_s=10, token=WRITE) as client:
            return (
                client.check("ann", cost=2, endpoint="/a"),
                client.remaining("ann", endpoint="/a"),
                client.reset("ann", endpoint="/a"),
            )

    waited = await asyncio.to_thread(ask)
    theirs = (
        await limiter.check("ann", cost=2),
        await limiter.remaining("ann", endpoint="/a"),
        await limiter.reset("ann", endpoint="/a"),
    )
    assert waited == theirs
    assert waited[0].remaining == 4
    assert [(quota.rule, quota.remaining, quota.window) for quota in waited[1].limits] == [
        ("edge.user", 4, "hour"),
        ("edge.path", 98, "hour"),
    ]


async def test_a_retry_under_its_key_is_counted_once(limiter: AsyncRateLimiterClient) -> None:
    answers = [await limiter.check("ann", idempotency_key="a-uuid") for _ in range(3)]
    assert [answer.remaining for answer in answers] == [5, 5, 5]
    assert (await limiter.check("ann")).remaining == 4
    with pytest.raises(RateLimiterError) as refusal:
        await limiter.check("ann", idempotency_key="x" * 257)
    assert refusal.value.code is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_reset_is_a_new_beginning_for_one_caller(
    limiter: AsyncRateLimiterClient, administrators: Administrators
) -> None:
    for who in ("ann", "bob"):
        await limiter.check(who, cost=6, endpoint="/a")
        assert not (await limiter.check(who)).allowed
    assert await limiter.reset("ann", endpoint="/a") == 2  # the limit and the penalty; the path is everybody's
    assert (await limiter.check("ann")).remaining == 5
    assert not (await limiter.check("bob")).allowed
    assert (await limiter.remaining("bob", endpoint="/a")).limits[1].remaining == 88
    assert await limiter.reset("ghost") == 0
    assert [(name, counters) for name, _, counters in administrators.resets] == [("ann", 2), ("ann", 0)]

    await limiter.check("192.0.2.1", "ip")
    assert await limiter.reset("::ffff:192.0.2.1", "ip") == 1
    assert (await limiter.check("192.0.2.1", "ip")).remaining == 1


async def test_only_administrators_who_may_write_reset(address: str, administrators: Administrators) -> None:
    refusals = {
        "": grpc.StatusCode.UNAUTHENTICATED,
        "rla_nobody": grpc.StatusCode.UNAUTHENTICATED,
        WRITE + "x" * 512: grpc.StatusCode.UNAUTHENTICATED,
        READ: grpc.StatusCode.PERMISSION_DENIED,
    }
    for token, code in refusals.items():
        async with AsyncRateLimiterClient(address, timeout_s=10, token=token) as client:
            await client.check("ann", cost=6)
            with pytest.raises(RateLimiterError) as refusal:
                await client.reset("ann")
            assert refusal.value.code is code
            assert not token or token not in refusal.value.details
            assert not (await client.check("ann", cost=0)).allowed
    assert administrators.resets == []


async def test_what_cannot_be_reset_is_a_sentence(
    limiter: AsyncRateLimiterClient, administrators: Administrators, service: Service
) -> None:
    for identifier, dimension in (("", "user"), ("here", "ip"), ("rlk_x", "user"), ("rlk_x", "api_key")):
        with pytest.raises(RateLimiterError) as refusal:
            await limiter.reset(identifier, dimension)  # type: ignore[arg-type]
        assert refusal.value.code is grpc.StatusCode.INVALID_ARGUMENT
    administrators.is_too_much = True
    with pytest.raises(RateLimiterError) as refusal:
        await limiter.reset("ann")
    assert refusal.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert refusal.value.details == "too many changes; come back in 7 s"

    service.others = [ResetLimit(service.door.limiter, service.store, Reader(), None)]
    async with AsyncRateLimiterClient(await service.listen(), timeout_s=10, token=WRITE) as client:
        with pytest.raises(RateLimiterError) as refusal:
            await client.reset("ann")
    assert refusal.value.code is grpc.StatusCode.UNIMPLEMENTED
    assert "RLS_DATABASE_URL" in refusal.value.details


async def test_where_the_database_is_goes_into_the_log_alone(
    limiter: AsyncRateLimiterClient, administrators: Administrators, caplog: pytest.LogCaptureFixture
) -> None:
    await limiter.check("ann", cost=6)
    told: dict[tuple[type[RecordsError], bool], str] = {}
    for fault in (RecordsUnavailable, RecordsError):
        for administrators.fails_late in (False, True):
            administrators.fault = fault("/var/lib/records.db is locked")
            with pytest.raises(RateLimiterError) as refusal:
                await limiter.reset("ann")
            assert refusal.value.code is grpc.StatusCode.UNAVAILABLE
            told[fault, administrators.fails_late] = refusal.value.details
            assert (await limiter.check("ann", cost=0)).allowed == administrators.fails_late
            await limiter.check("ann", cost=6)
    assert {told[fault, False] for fault in (RecordsUnavailable, RecordsError)} == {
        "the database is away; nothing was reset"
    }
    assert {told[fault, True] for fault in (RecordsUnavailable, RecordsError)} == {
        "the counters were reset, but the database is away and has no record of it"
    }
    assert [record.levelname for record in caplog.records if "records.db" in record.getMessage()] == ["ERROR"] * 3


async def test_an_administrator_is_told_by_token_address_and_request(
    address: str, administrators: Administrators, transport: str
) -> None:
    asked = ResetRequest(identifier="ann", dimension="USER").SerializeToString()
    async with aio.insecure_channel(address) as channel:
        reset = channel.unary_unary(RESET_LIMIT)
        await reset(asked, metadata=(("authorization", f"Bearer {WRITE}"), ("x-request-id", "call-7")), timeout=10)
        await reset(asked, metadata=(("authorization", f"Bearer {WRITE}"),), timeout=10)
    here = "127.0.0.1" if transport == "grpcio" else ""  # the native one hands such calls on over a Unix socket
    assert administrators.asked == [Asking(WRITE, here, "call-7"), Asking(WRITE, here)]


HOSTILE = ("a" * 100_000, "a\r\nx-evil: 1", "\x00", "}{rl:", "%2e%2e/", "\ud800", "😀" * 1000, "edge/user=bob")


async def test_hostile_identifiers_are_callers_like_any_other(limiter: AsyncRateLimiterClient) -> None:
    for identifier in HOSTILE:
        answers = [await limiter.check(identifier, endpoint=identifier) for _ in range(2)]
        assert [answer.remaining for answer in answers] == [5, 4]
        assert identifier not in repr(answers)
    assert (await limiter.check("bob")).remaining == 5


async def test_whoever_knows_nothing_but_reflection_can_ask(address: str) -> None:
    async with aio.insecure_channel(address) as channel:
        reflect = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
        question = reflection_pb2.ServerReflectionRequest(file_containing_symbol="ratelimit_rls.v1.RateLimiter")
        (answer,) = [answer async for answer in reflect(iter([question]))]
        pool = descriptor_pool.DescriptorPool()
        for file in answer.file_descriptor_response.file_descriptor_proto:
            pool.Add(descriptor_pb2.FileDescriptorProto.FromString(file))
        methods = pool.FindServiceByName("ratelimit_rls.v1.RateLimiter").methods
        assert [f"/ratelimit_rls.v1.RateLimiter/{method.name}" for method in methods] == [
            CHECK_RATE_LIMIT,
            GET_REMAINING_QUOTA,
            RESET_LIMIT,
        ]
        request = message_factory.GetMessageClass(methods[0].input_type)()
        json_format.ParseDict({"identifier": "ann", "dimension": "USER"}, request)
        response = await channel.unary_unary(CHECK_RATE_LIMIT)(request.SerializeToString(), timeout=10)
        told = message_factory.GetMessageClass(methods[0].output_type).FromString(response)
        assert json_format.MessageToDict(told)["remaining"] == "5"
