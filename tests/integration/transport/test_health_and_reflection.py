"""grpc.health.v1 and reflection."""

from __future__ import annotations

import logging

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from ratelimit_rls.telemetry.line_limits import MAX_LINES_PER_MINUTE
from ratelimit_rls.transport.grpc.standard_services import GRPC_LOGGER
from tests.integration.transport.conftest import Client, Service, eventually

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def status(client: Client, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(client.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


async def test_ratelimit_health_follows_components_and_process_health_does_not(
    client: Client, service: Service
) -> None:
    assert (await status(client, ""), await status(client, "ratelimit")) == (SERVING, SERVING)
    service.health.set("redis", False, "connection refused")
    assert (await status(client, ""), await status(client, "ratelimit")) == (SERVING, NOT_SERVING)
    service.health.set("redis", True)
    assert (await status(client, ""), await status(client, "ratelimit")) == (SERVING, SERVING)
    service.health.stopping()
    assert (await status(client, ""), await status(client, "ratelimit")) == (NOT_SERVING, NOT_SERVING)


async def test_not_serving_before_everything_is_up(service: Service) -> None:
    address = await service.listen(announce=False)
    async with aio.insecure_channel(address) as channel:
        client = Client(channel)
        assert (await status(client, ""), await status(client, "ratelimit")) == (NOT_SERVING, NOT_SERVING)
        service.health.listening()
        assert (await status(client, ""), await status(client, "ratelimit")) == (SERVING, SERVING)


async def test_an_unknown_service_is_not_found(client: Client) -> None:
    with pytest.raises(aio.AioRpcError) as raised:
        await status(client, "envoy")
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND


async def test_watch_reports_every_change(client: Client, service: Service) -> None:
    watch = health_pb2_grpc.HealthStub(client.channel).Watch(health_pb2.HealthCheckRequest(service="ratelimit"))
    seen = aiter(watch)
    assert (await anext(seen)).status == SERVING
    service.health.set("config", False)
    assert (await anext(seen)).status == NOT_SERVING
    service.health.set("config", True)
    assert (await anext(seen)).status == SERVING
    watch.cancel()


async def test_reflection_lists_and_describes_the_services(client: Client) -> None:
    reflect = reflection_pb2_grpc.ServerReflectionStub(client.channel).ServerReflectionInfo
    symbols = {
        "envoy.service.auth.v3.Authorization": b"CheckRequest",
        "envoy.service.ratelimit.v3.RateLimitService": b"is_negative_hits",
        "kuadrant.service.ratelimit.v1.RateLimitService": b"CheckRateLimit",
        "ratelimit_rls.v1.RateLimiter": b"GetRemainingQuota",
    }
    questions = [reflection_pb2.ServerReflectionRequest(list_services="")]
    questions += [reflection_pb2.ServerReflectionRequest(file_containing_symbol=name) for name in symbols]
    services, *files = [answer async for answer in reflect(iter(questions))]
    assert {service.name for service in services.list_services_response.service} == {
        *symbols,
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    for answer, mentioned in zip(files, symbols.values(), strict=True):
        assert mentioned in b"".join(answer.file_descriptor_response.file_descriptor_proto)


@pytest.mark.parametrize(
    "path", ["/grpc.health.v1.Health/Watch", "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"]
)
async def test_invalid_protobuf_does_not_fill_the_log(
    service: Service, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger(GRPC_LOGGER).filters.clear()  # of other tests, which may have used up their minute
    async with aio.insecure_channel(await service.listen()) as channel:
        for _ in range(3 * MAX_LINES_PER_MINUTE):
            with pytest.raises(aio.AioRpcError):
                await channel.unary_stream(path)(b"\xff\xff", timeout=10).read()  # type: ignore[arg-type]
    assert 0 < len([one for one in caplog.records if "DecodeError" in one.getMessage()]) <= MAX_LINES_PER_MINUTE


async def test_an_unknown_method_is_unimplemented(client: Client) -> None:
    with pytest.raises(aio.AioRpcError) as raised:
        await client.channel.unary_unary("/envoy.service.ratelimit.v2.RateLimitService/ShouldRateLimit")(b"")  # type: ignore[arg-type]
    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_watch_does_not_delay_shutdown(client: Client, service: Service) -> None:
    watch = health_pb2_grpc.HealthStub(client.channel).Watch(health_pb2.HealthCheckRequest(service=""))
    await watch.read()
    server = service.servers.pop()
    await server.drain(10)
    await server.close()
    await eventually(watch.done)
