"""RateLimiter over a real connection, with our own client and with one that uses reflection only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from time import time
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from grpc import aio
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from structlog.testing import capture_logs

from ratelimit_rls.api.ext_authz.codec import ExtAuthzCodec
from ratelimit_rls.api.limiter.codec import CheckRateLimitCodec, RemainingQuotaCodec
from ratelimit_rls.api.limiter.decode import LimiterDecoder
from ratelimit_rls.client import AsyncRateLimiterClient, RateLimiterClient, RateLimiterError
from ratelimit_rls.core.model import Request
from ratelimit_rls.database.repository import Actor
from ratelimit_rls.errors import (
    DatabaseError,
    DatabaseUnavailable,
    PermissionDenied,
    TooManyRequests,
    Unauthenticated,
)
from ratelimit_rls.protos.messages import (
    CHECK,
    CHECK_RATE_LIMIT,
    GET_REMAINING_QUOTA,
    RESET_LIMIT,
    CheckRequest,
    CheckResponse,
    ResetRequest,
)
from ratelimit_rls.store.embedded import EmbeddedStore
from ratelimit_rls.transport.grpc.reset_limit import AdminCall, ResetLimit
from tests.integration.transport.conftest import Client, Service

RULES = b"""
domain: edge
ext_authz: {descriptors: [{entries: [{key: user, header: x-user}]}]}
descriptors:
  - key: user
    penalty: {within: 1h, after: 1, multipliers: [2]}
    rate_limit: {unit: year, requests_per_unit: 6}
  - {key: ip, rate_limit: {unit: year, requests_per_unit: 2, algorithm: sliding_log}}
  - {key: path, rate_limit: {unit: year, requests_per_unit: 100}}
"""

WRITE, READ = "rla_writer", "rla_reader"


class Administrators:
    def __init__(self, store: EmbeddedStore) -> None:
        self._store = store
        self.resets: list[tuple[str, Request, int]] = []
        self.request: list[AdminCall] = []
        self.fault: DatabaseError | None = None
        self.is_too_much = False

    async def admit(self, asking: AdminCall) -> Actor:
        self.request.append(asking)
        if self.is_too_much:
            raise TooManyRequests("too many changes; come back in 7 s", 7)
        if asking.token == READ:
            raise PermissionDenied("this needs a token with the role write")
        if asking.token != WRITE:
            raise Unauthenticated("the token is not one of ours")
        return Actor("ann", "id")

    async def reset(self, actor: Actor, request: Request, keys: Sequence[bytes]) -> int:
        if self.fault is not None:
            raise self.fault
        counters = len(await self._store.forget(keys))
        self.resets.append((actor.name, request, counters))
        return counters


@pytest.fixture
def administrators(service: Service) -> Administrators:
    return Administrators(service.store)


@pytest.fixture
async def address(service: Service, administrators: Administrators) -> str:
    service.load(RULES)
    limiter = service.limiter
    service.codecs = {
        **service.codecs,
        CHECK: ExtAuthzCodec(limiter),
        CHECK_RATE_LIMIT: CheckRateLimitCodec(limiter, default_domain="edge"),
        GET_REMAINING_QUOTA: RemainingQuotaCodec(limiter, default_domain="edge"),
    }
    service.services = [ResetLimit(limiter, LimiterDecoder("edge"), administrators)]
    return await service.listen(request_id_metadata="x-idempotency-key")


@pytest.fixture
async def limiter(address: str) -> AsyncIterator[AsyncRateLimiterClient]:
    async with AsyncRateLimiterClient(address, timeout_s=10, token=WRITE) as client:
        yield client


async def test_three_apis_share_one_counter(limiter: AsyncRateLimiterClient, address: str) -> None:
    check = CheckRequest()
    check.attributes.request.http.headers["x-user"] = "ann"
    async with aio.insecure_channel(address) as channel:
        rls, authz = Client(channel), channel.unary_unary(CHECK)  # type: ignore[var-annotated]
        for left in (5, 2):
            answer = await limiter.check("ann", endpoint="/search")
            assert (answer.allowed, answer.remaining, answer.rule) == (True, left, "edge.user")
            assert (await rls.ask({"user": "ann"})).statuses[0].limit_remaining == left - 1
            assert CheckResponse.FromString(await authz(check.SerializeToString(), timeout=10)).status.code == 0
        assert (await rls.ask({"user": "ann"})).overall_code == 2
        denied = await limiter.check("ann")
    assert (denied.allowed, denied.reason, denied.http_status) == (False, "over_limit", 429)
    assert denied.reset_at - time() == pytest.approx(denied.retry_after, abs=2)


async def test_sync_and_async_clients_get_the_same_result(limiter: AsyncRateLimiterClient, address: str) -> None:
    def ask() -> tuple[Any, ...]:
        with RateLimiterClient(address, timeout_s=10, token=WRITE) as client:
            return (
                client.check("ann", cost=2, endpoint="/a"),
                client.remaining("ann", endpoint="/a"),
                client.reset("ann", endpoint="/a"),
            )

    waited = await asyncio.to_thread(ask)
    expected = (
        await limiter.check("ann", cost=2),
        await limiter.remaining("ann", endpoint="/a"),
        await limiter.reset("ann", endpoint="/a"),
    )
    assert waited == expected
    assert waited[0].remaining == 4
    assert [(quota.rule, quota.remaining, quota.window) for quota in waited[1].limits] == [
        ("edge.user", 4, "year"),
        ("edge.path", 98, "year"),
    ]


async def test_retry_with_an_idempotency_key_is_counted_once(limiter: AsyncRateLimiterClient) -> None:
    answers = [await limiter.check("ann", idempotency_key="a-uuid") for _ in range(3)]
    assert [answer.remaining for answer in answers] == [5, 5, 5]
    assert (await limiter.check("ann")).remaining == 4
    with pytest.raises(RateLimiterError) as raised:
        await limiter.check("ann", idempotency_key="x" * 257)
    assert raised.value.code is grpc.StatusCode.INVALID_ARGUMENT


async def test_reset_affects_one_caller_only(limiter: AsyncRateLimiterClient, administrators: Administrators) -> None:
    for who in ("ann", "bob"):
        await limiter.check(who, cost=6, endpoint="/a")
        assert not (await limiter.check(who)).allowed
    assert (
        await limiter.reset("ann", endpoint="/a") == 2
    )  # the limit and the penalty; the counter of the path is shared
    assert (await limiter.check("ann")).remaining == 5
    assert not (await limiter.check("bob")).allowed
    assert (await limiter.remaining("bob", endpoint="/a")).limits[1].remaining == 88
    assert await limiter.reset("ghost") == 0
    assert [(name, counters) for name, _, counters in administrators.resets] == [("ann", 2), ("ann", 0)]

    await limiter.check("192.0.2.1", "ip")
    assert await limiter.reset("::ffff:192.0.2.1", "ip") == 1
    assert (await limiter.check("192.0.2.1", "ip")).remaining == 1


async def test_reset_needs_the_write_role(address: str, administrators: Administrators) -> None:
    denials = {
        "": grpc.StatusCode.UNAUTHENTICATED,
        "rla_nobody": grpc.StatusCode.UNAUTHENTICATED,
        WRITE + "x" * 512: grpc.StatusCode.UNAUTHENTICATED,
        READ: grpc.StatusCode.PERMISSION_DENIED,
    }
    for token, code in denials.items():
        async with AsyncRateLimiterClient(address, timeout_s=10, token=token) as client:
            await client.check("ann", cost=6)
            with pytest.raises(RateLimiterError) as raised:
                await client.reset("ann")
            assert raised.value.code is code
            assert not token or token not in raised.value.details
            assert not (await client.check("ann", cost=0)).allowed
    assert administrators.resets == []


async def test_invalid_reset_is_rejected_with_a_message(
    limiter: AsyncRateLimiterClient, administrators: Administrators, service: Service
) -> None:
    for identifier, dimension in (("", "user"), ("here", "ip"), ("rlk_x", "user"), ("rlk_x", "api_key")):
        with pytest.raises(RateLimiterError) as raised:
            await limiter.reset(identifier, dimension)  # type: ignore[arg-type]
        assert raised.value.code is grpc.StatusCode.INVALID_ARGUMENT
    administrators.is_too_much = True
    with pytest.raises(RateLimiterError) as raised:
        await limiter.reset("ann")
    assert raised.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert raised.value.details == "too many changes; come back in 7 s"

    service.services = [ResetLimit(service.limiter, LimiterDecoder(), None)]
    async with AsyncRateLimiterClient(await service.listen(), timeout_s=10, token=WRITE) as client:
        with pytest.raises(RateLimiterError) as raised:
            await client.reset("ann")
    assert raised.value.code is grpc.StatusCode.UNIMPLEMENTED
    assert "RLS_DATABASE_URL" in raised.value.details


async def test_database_address_is_only_in_the_log(
    limiter: AsyncRateLimiterClient, administrators: Administrators
) -> None:
    await limiter.check("ann", cost=6)
    logged: list[Any] = []
    for fault in (DatabaseUnavailable, DatabaseError):
        administrators.fault = fault("/var/lib/records.db is locked")
        with pytest.raises(RateLimiterError) as raised, capture_logs() as lines:
            await limiter.reset("ann")
        logged += lines
        assert raised.value.code is grpc.StatusCode.UNAVAILABLE
        assert raised.value.details == "the database is unavailable; nothing was reset"
        assert not (await limiter.check("ann", cost=0)).allowed
    assert [line["log_level"] for line in logged if "records.db" in line.get("error", "")] == ["error"]


async def test_admin_call_has_token_address_and_request_id(address: str, administrators: Administrators) -> None:
    request = ResetRequest(identifier="ann", dimension="USER").SerializeToString()
    async with aio.insecure_channel(address) as channel:
        reset: aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(RESET_LIMIT)
        await reset(request, metadata=(("authorization", f"Bearer {WRITE}"), ("x-request-id", "call-7")), timeout=10)
        forged = (("x-rls-peer", "192.0.2.1"), ("x-forwarded-for", "192.0.2.1"))
        await reset(request, metadata=(("authorization", f"Bearer {WRITE}"), *forged), timeout=10)
    assert administrators.request == [AdminCall(WRITE, "127.0.0.1", "call-7"), AdminCall(WRITE, "127.0.0.1")]


HOSTILE = ("a" * 100_000, "a\r\nx-evil: 1", "\x00", "}{rl:", "%2e%2e/", "\ud800", "😀" * 1000, "edge/user=bob")


async def test_unusual_identifiers_are_ordinary_callers(limiter: AsyncRateLimiterClient) -> None:
    for identifier in HOSTILE:
        answers = [await limiter.check(identifier, endpoint=identifier) for _ in range(2)]
        assert [answer.remaining for answer in answers] == [5, 4]
        assert identifier not in repr(answers)
    assert (await limiter.check("bob")).remaining == 5


async def test_client_that_uses_reflection_only(address: str) -> None:
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
        response = await channel.unary_unary(CHECK_RATE_LIMIT)(request.SerializeToString(), timeout=10)  # type: ignore[arg-type, var-annotated]
        received = message_factory.GetMessageClass(methods[0].output_type).FromString(response)
        assert json_format.MessageToDict(received)["remaining"] == "5"
