"""grpc.health.v1 and reflection, served by grpc.aio behind either transport."""

from __future__ import annotations

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.integration.transport.conftest import Client, Service, eventually

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def status(client: Client, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(client.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


async def test_ratelimit_follows_the_components_and_the_process_does_not(client: Client, service: Service) -> None:
    assert (await status(client, ""), await status(client, "ratelimit")) == (SERVING, SERVING)
    service.health.set("redis", False, "connection refused")
    assert (await status(client, ""), await status(client, "ratelimit")) == (SERVING, NOT_SERVING)
    service.health.set("redis", True)
    assert (await status(client, ""), await status(client, "ratelimit")) == (SERVING, SERVING)
    service.health.stopping()
    assert (await status(client, ""), await status(client, "ratelimit")) == (NOT_SERVING, NOT_SERVING)


async def test_nobody_is_told_to_come_before_everything_is_up(service: Service) -> None:
    address = await service.listen(announce=False)
    async with aio.insecure_channel(address) as channel:
        client = Client(channel)
        assert (await status(client, ""), await status(client, "ratelimit")) == (NOT_SERVING, NOT_SERVING)
        service.health.listening()
        assert (await status(client, ""), await status(client, "ratelimit")) == (SERVING, SERVING)


async def test_an_unknown_service_is_not_found(client: Client) -> None:
    with pytest.raises(aio.AioRpcError) as refusal:
        await status(client, "envoy")
    assert refusal.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_watcher_sees_every_change(client: Client, service: Service) -> None:
    watch = health_pb2_grpc.HealthStub(client.channel).Watch(health_pb2.HealthCheckRequest(service="ratelimit"))
    seen = aiter(watch)
    assert (await anext(seen)).status == SERVING
    service.health.set("config", False)
    assert (await anext(seen)).status == NOT_SERVING
    service.health.set("config", True)
    assert (await anext(seen)).status == SERVING
    watch.cancel()


async def test_reflection_names_the_services_and_describes_them(client: Client) -> None:
    reflect = reflection_pb2_grpc.ServerReflectionStub(client.channel).ServerReflectionInfo
    ours = {
        "envoy.service.auth.v3.Authorization": b"CheckRequest",
        "envoy.service.ratelimit.v3.RateLimitService": b"is_negative_hits",
        "kuadrant.service.ratelimit.v1.RateLimitService": b"CheckRateLimit",
        "ratelimit_rls.v1.RateLimiter": b"GetRemainingQuota",
    }
    questions = [reflection_pb2.ServerReflectionRequest(list_services="")]
    questions += [reflection_pb2.ServerReflectionRequest(file_containing_symbol=name) for name in ours]
    services, *files = [answer async for answer in reflect(iter(questions))]
    assert {service.name for service in services.list_services_response.service} == {
        *ours,
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    for answer, mentioned in zip(files, ours.values(), strict=True):
        assert mentioned in b"".join(answer.file_descriptor_response.file_descriptor_proto)


async def test_an_unknown_method_is_unimplemented(client: Client) -> None:
    with pytest.raises(aio.AioRpcError) as refusal:
        await client.channel.unary_unary("/envoy.service.ratelimit.v2.RateLimitService/ShouldRateLimit")(b"")
    assert refusal.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_watcher_does_not_hold_up_the_end(client: Client, service: Service) -> None:
    watch = health_pb2_grpc.HealthStub(client.channel).Watch(health_pb2.HealthCheckRequest(service=""))
    await watch.read()
    server = service.servers.pop()
    await server.drain(10)
    await server.close()
    await eventually(watch.done)
