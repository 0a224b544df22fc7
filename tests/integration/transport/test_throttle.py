"""`action: throttle` over the wire: delayed calls, immediate denials, and slots of cancelled calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import grpc
import pytest
from grpc import aio
from structlog.testing import capture_logs

from ratelimit_rls.pipeline.batch import Batch
from ratelimit_rls.pipeline.pipeline import Pipeline
from ratelimit_rls.protos.messages import RateLimitResponse
from ratelimit_rls.transport.http import server as http_server
from ratelimit_rls.transport.http.json_api import json_app
from ratelimit_rls.transport.http.server import HttpServer
from tests.integration.transport.conftest import MAX_DELAYED, Client, Service, eventually, message

OK, OVER_LIMIT = 1, 2

RULES = b"""
domain: edge
descriptors:
  - key: brisk
    rate_limit: {unit: second, requests_per_unit: 100, algorithm: leaky_bucket, burst: 1}
    action: throttle
    max_delay: 30s
  - key: slow
    rate_limit: {unit: minute, requests_per_unit: 6, algorithm: token_bucket, burst: 1}
    action: throttle
    max_delay: 15s
  - key: long
    rate_limit: {unit: minute, requests_per_unit: 24, algorithm: gcra, burst: 1}
    action: throttle
    max_delay: 1m
  - key: staff
    rate_limit: {unlimited: true}
"""

SLOW = message({"slow": "x"})
"""One call passes at once, one may wait ten seconds, and one that would wait twenty is denied."""


LONG = message({"long": "x"})
"""A slot every two and a half seconds: as many as the queue can hold fit into a minute."""


@pytest.fixture
def service(service: Service) -> Service:
    service.load(RULES)
    return service


async def code(call: Awaitable[bytes]) -> int:
    return int(RateLimitResponse.FromString(await call).overall_code)


async def delay_one(
    client: Client, service: Service, request: bytes = SLOW, timeout_s: float | None = None
) -> aio.UnaryUnaryCall[bytes, bytes]:
    """Start a call that the server delays."""
    before = service.throttle_queue.delayed
    call = client.raw(request, timeout=timeout_s)
    await eventually(lambda: service.throttle_queue.delayed == before + 1 or call.done())
    assert not call.done()
    return call


def stat(service: Service, name: str) -> int:
    return service.metrics.names()[f"ratelimit.throttle.{name}"]


async def test_burst_is_answered_in_order_at_consecutive_slots(
    client: Client, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    came: list[bytes] = []  # in the order of arrival: calls may overtake each other in transit
    answered_s: dict[bytes, float] = {}
    original = Pipeline.run

    async def noted(pipeline: Pipeline[Any], batch: Batch) -> None:
        came.extend(batch.messages)
        await original(pipeline, batch)

    async def ask(number: int) -> None:
        request = message({"brisk": "x"}, {"staff": str(number)})
        assert await code(client.raw(request, timeout=10)) == OK
        answered_s[request] = loop.time()

    monkeypatch.setattr(Pipeline, "run", noted)
    begun_s = loop.time()
    await asyncio.gather(*(ask(number) for number in range(16)))
    assert len(came) == 16
    for number, request in enumerate(came):
        assert answered_s[request] - begun_s >= number * 0.010


async def test_short_deadline_is_denied_at_once_and_not_charged(client: Client, service: Service) -> None:
    assert await code(client.raw(SLOW)) == OK
    denied = [await code(client.raw(SLOW, timeout=5)) for _ in range(20)]
    assert denied == [OVER_LIMIT] * 20
    (await delay_one(client, service)).cancel()


async def test_slot_of_a_cancelled_call_goes_to_the_next(client: Client, service: Service) -> None:
    assert await code(client.raw(SLOW)) == OK
    for _ in range(3):
        delayed = await delay_one(client, service)
        assert service.servers[0].in_flight == 1
        assert await code(client.raw(SLOW)) == OVER_LIMIT
        delayed.cancel()
        await eventually(lambda: service.servers[0].in_flight == 0)
        assert service.throttle_queue.delayed == 0
    assert stat(service, "cancelled") == 3


async def test_expired_call_releases_its_slot(client: Client, service: Service) -> None:
    """The queue would have responded earlier, but a client may measure its deadline differently."""
    service.throttle_queue.margin_s = -60
    assert await code(client.raw(SLOW)) == OK
    with pytest.raises(aio.AioRpcError) as missed:
        await client.raw(SLOW, timeout=0.1)
    assert missed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await eventually(lambda: stat(service, "cancelled") == 1)
    (await delay_one(client, service)).cancel()


async def test_call_cancelled_while_decided_releases_its_slot(client: Client, service: Service) -> None:
    assert await code(client.raw(SLOW)) == OK
    service.store.gate.clear()
    request = len(service.store.batches)
    early = client.raw(SLOW)
    await eventually(lambda: len(service.store.batches) == request + 1)
    early.cancel()
    connections = getattr(service.servers[0]._http2, "_connections", ())
    await eventually(
        lambda: not any(c._streams for c in connections) if connections else not service.servers[0].in_flight
    )
    service.store.gate.set()
    await eventually(lambda: stat(service, "cancelled") == 1)
    assert stat(service, "delayed") == 0
    await eventually(lambda: service.servers[0].in_flight == 0)
    (await delay_one(client, service)).cancel()


async def test_lost_connection_releases_all_slots(client: Client, service: Service) -> None:
    async with aio.insecure_channel(f"127.0.0.1:{service.servers[0].port}") as channel:
        other = Client(channel)
        assert await code(other.raw(LONG)) == OK
        for _ in range(5):
            await delay_one(other, service, LONG)
    await eventually(lambda: service.servers[0].in_flight == 0)
    assert stat(service, "cancelled") == 5
    await eventually(
        lambda: service.throttle_queue._refund_task is not None and service.throttle_queue._refund_task.done()
    )
    # At most two and a half seconds, because all five slots are free again; with one taken it would be five.
    (await delay_one(client, service, LONG, timeout_s=4)).cancel()


async def test_full_queue_denies_only_calls_that_would_wait(client: Client, service: Service) -> None:
    assert await code(client.raw(LONG)) == OK
    delayed = [await delay_one(client, service, LONG) for _ in range(MAX_DELAYED)]
    assert await code(client.raw(LONG)) == OVER_LIMIT
    assert await code(client.raw(message({"long": "y"}))) == OK
    assert await code(client.raw(message({"user": "y"}))) == OK
    assert (stat(service, "queue_length"), stat(service, "queue_full")) == (MAX_DELAYED, 2)
    delayed.pop().cancel()
    await eventually(lambda: service.throttle_queue.delayed == MAX_DELAYED - 1)
    delayed.append(await delay_one(client, service, LONG))
    for call in delayed:
        call.cancel()


async def test_stop_waits_for_delayed_calls(client: Client, service: Service) -> None:
    calls = [asyncio.create_task(code(client.raw(message({"brisk": "x"}), timeout=10))) for _ in range(15)]
    await eventually(lambda: service.servers[0].in_flight > 5 and service.throttle_queue.delayed > 5)
    await service.servers[0].drain(10)
    assert service.servers[0].in_flight == service.throttle_queue.delayed == 0
    assert await asyncio.gather(*calls) == [OK] * 15


async def test_delayed_call_at_stop_releases_its_slot(client: Client, service: Service) -> None:
    assert await code(client.raw(SLOW)) == OK
    delayed = await delay_one(client, service)
    await service.servers[0].drain(0.01)
    assert service.servers[0].in_flight == 1
    await service.servers.pop().close()
    await service.throttle_queue.close()
    with pytest.raises((aio.AioRpcError, asyncio.CancelledError)):
        await delayed
    async with aio.insecure_channel(await service.listen()) as channel:
        (await delay_one(Client(channel), service)).cancel()


async def test_failed_refund_affects_no_call(client: Client, service: Service) -> None:
    assert await code(client.raw(SLOW)) == OK
    delayed = await delay_one(client, service)
    service.store.fault = ConnectionError("away")
    with capture_logs() as logs:
        delayed.cancel()
        await eventually(lambda: logs != [])
    assert logs == [{"event": "throttle_refund_failed", "slots": 1, "error": "away", "log_level": "warning"}]
    service.store.fault = None
    assert await code(client.raw(SLOW)) == OVER_LIMIT  # the slot is lost until it expires
    assert await code(client.raw(message({"user": "a"}))) == OK


async def test_json_calls_are_delayed_and_cancelled(service: Service) -> None:
    server = HttpServer(json_app(service.json_pipeline(), service.throttle_queue, service.health))
    await server.start("127.0.0.1", 0)
    body = b'{"domain": "edge", "descriptors": [{"entries": [{"key": "slow", "value": "x"}]}]}'
    request = b"POST /json HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)

    async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(request)
        return reader, writer

    async def status() -> bytes:
        reader, writer = await connect()
        line = await reader.readline()
        writer.close()
        return line.split()[1]

    try:
        assert await status() == b"200"
        _, writer = await connect()
        await eventually(lambda: service.throttle_queue.delayed == 1)
        assert await status() == b"429"
        writer.close()
        await eventually(lambda: service.throttle_queue.delayed == 0 and stat(service, "cancelled") == 1)
        _, writer = await connect()
        await eventually(lambda: service.throttle_queue.delayed == 1)
        writer.close()
    finally:
        await server.stop()


async def test_json_call_is_answered_at_its_slot(service: Service) -> None:
    server = HttpServer(json_app(service.json_pipeline(), service.throttle_queue, service.health))
    await server.start("127.0.0.1", 0)
    body = b'{"domain": "edge", "descriptors": [{"entries": [{"key": "brisk", "value": "x"}]}]}'
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for _ in range(5):
            writer.write(b"POST /json HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        for _ in range(5):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            assert b'"overallCode": "OK"' in await reader.readexactly(length)
        writer.close()
    finally:
        await server.stop()
    assert stat(service, "delayed") >= 1


async def test_delayed_json_call_at_stop_gets_503_and_releases_its_slot(
    client: Client, service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http_server, "GRACE_S", 0)
    server = HttpServer(json_app(service.json_pipeline(), service.throttle_queue, service.health))
    await server.start("127.0.0.1", 0)
    body = b'{"domain": "edge", "descriptors": [{"entries": [{"key": "slow", "value": "x"}]}]}'
    assert await code(client.raw(SLOW)) == OK
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"POST /json HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    await eventually(lambda: service.throttle_queue.delayed == 1)
    await server.stop()
    answered = await reader.read()
    writer.close()
    assert answered.startswith(b"HTTP/1.1 503 ")
    assert answered.endswith(b"\r\n\r\nthe server is stopping and cannot answer this call; try again\n")
    assert not any(record.exc_info for record in caplog.records)
    await eventually(lambda: stat(service, "cancelled") == 1 and service.throttle_queue.delayed == 0)
    (await delay_one(client, service)).cancel()
