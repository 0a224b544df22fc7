"""`action: throttle` over the wire: who waits, who is refused at once, and who gets the slot of a caller that left."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any

import grpc
import pytest
from grpc import aio

from ratelimit_rls.transport.grpc.door import Asked
from ratelimit_rls.transport.grpc.messages import RateLimitResponse
from ratelimit_rls.transport.http import server as http_server
from ratelimit_rls.transport.http.json import json_app
from ratelimit_rls.transport.http.server import HttpServer
from tests.integration.transport.conftest import MOST_HELD, Client, Service, eventually, message

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
"""One passes at once, one may wait ten seconds, and whoever would wait twenty is refused."""


LONG = message({"long": "x"})
"""A slot every two and a half seconds: as many as the room holds fit into the minute."""


@pytest.fixture
def service(service: Service) -> Service:
    service.load(RULES)
    return service


async def code(call: Awaitable[bytes]) -> int:
    return int(RateLimitResponse.FromString(await call).overall_code)


async def hold_one(
    client: Client, service: Service, asked: bytes = SLOW, timeout_s: float | None = None
) -> aio.UnaryUnaryCall[bytes, bytes]:
    """A call that the server holds."""
    before = service.room.held
    call = client.raw(asked, timeout=timeout_s)
    await eventually(lambda: service.room.held == before + 1 or call.done())
    assert not call.done()
    return call


def stat(service: Service, name: str) -> int:
    return service.metrics.names()[f"ratelimit.throttle.{name}"]


async def test_a_burst_leaves_in_order_and_one_slot_after_another(
    client: Client, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    came: list[bytes] = []  # in the order that the transport saw them: on their way calls may overtake each other
    answered_s: dict[bytes, float] = {}
    to_door = service.door.ask

    def noted(messages: Sequence[bytes], *about: Any) -> Asked:
        came.extend(messages)
        return to_door(messages, *about)

    async def ask(number: int) -> None:
        asked = message({"brisk": "x"}, {"staff": str(number)})
        assert await code(client.raw(asked, timeout=10)) == OK
        answered_s[asked] = loop.time()

    monkeypatch.setattr(service.door, "ask", noted)
    begun_s = loop.time()
    await asyncio.gather(*(ask(number) for number in range(16)))
    assert len(came) == 16
    for number, asked in enumerate(came):
        assert answered_s[asked] - begun_s >= number * 0.010


async def test_a_caller_with_a_short_deadline_is_refused_at_once_and_charged_nothing(
    client: Client, service: Service
) -> None:
    assert await code(client.raw(SLOW)) == OK
    refused = [await code(client.raw(SLOW, timeout=5)) for _ in range(20)]
    assert refused == [OVER_LIMIT] * 20
    (await hold_one(client, service)).cancel()


async def test_the_slot_of_a_caller_that_leaves_is_the_next_one_s(client: Client, service: Service) -> None:
    assert await code(client.raw(SLOW)) == OK
    for _ in range(3):
        held = await hold_one(client, service)
        assert service.servers[0].in_flight == 1
        assert await code(client.raw(SLOW)) == OVER_LIMIT
        held.cancel()
        await eventually(lambda: service.servers[0].in_flight == 0)
        assert service.room.held == 0
    assert stat(service, "left_total") == 3


async def test_a_caller_that_leaves_by_its_deadline_leaves_its_slot(client: Client, service: Service) -> None:
    """The room would have answered before; a caller may still count its time in another way."""
    service.room.margin_s = -60
    assert await code(client.raw(SLOW)) == OK
    with pytest.raises(aio.AioRpcError) as missed:
        await client.raw(SLOW, timeout=0.1)
    assert missed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await eventually(lambda: stat(service, "left_total") == 1)
    (await hold_one(client, service)).cancel()


async def test_a_caller_that_left_while_it_was_decided_leaves_its_slot(client: Client, service: Service) -> None:
    assert await code(client.raw(SLOW)) == OK
    service.store.gate.clear()
    asked = len(service.store.batches)
    early = client.raw(SLOW)
    await eventually(lambda: len(service.store.batches) == asked + 1)
    early.cancel()
    connections = getattr(service.servers[0]._transport, "_connections", ())
    await eventually(
        lambda: not any(c._streams for c in connections) if connections else not service.servers[0].in_flight
    )
    service.store.gate.set()
    await eventually(lambda: stat(service, "left_total") == 1)
    assert stat(service, "held_total") == 0
    await eventually(lambda: service.servers[0].in_flight == 0)
    (await hold_one(client, service)).cancel()


async def test_a_connection_that_breaks_leaves_every_slot(client: Client, service: Service) -> None:
    async with aio.insecure_channel(f"127.0.0.1:{service.servers[0].port}") as channel:
        other = Client(channel)
        assert await code(other.raw(LONG)) == OK
        for _ in range(5):
            await hold_one(other, service, LONG)
    await eventually(lambda: service.servers[0].in_flight == 0)
    assert stat(service, "left_total") == 5
    await eventually(lambda: service.room._returning is not None and service.room._returning.done())
    # Two and a half seconds at most, since all five slots are free again; with one of them taken it would be five.
    (await hold_one(client, service, LONG, timeout_s=4)).cancel()


async def test_a_full_room_refuses_who_would_wait_and_nobody_else(client: Client, service: Service) -> None:
    assert await code(client.raw(LONG)) == OK
    held = [await hold_one(client, service, LONG) for _ in range(MOST_HELD)]
    assert await code(client.raw(LONG)) == OVER_LIMIT
    assert await code(client.raw(message({"long": "y"}))) == OK
    assert await code(client.raw(message({"user": "y"}))) == OK
    assert (stat(service, "held"), stat(service, "room_full_total")) == (MOST_HELD, 2)
    held.pop().cancel()
    await eventually(lambda: service.room.held == MOST_HELD - 1)
    held.append(await hold_one(client, service, LONG))
    for call in held:
        call.cancel()


async def test_stopping_waits_for_who_is_held(client: Client, service: Service) -> None:
    calls = [asyncio.create_task(code(client.raw(message({"brisk": "x"}), timeout=10))) for _ in range(15)]
    await eventually(lambda: service.servers[0].in_flight > 5 and service.room.held > 5)
    await service.servers[0].drain(10)
    assert service.servers[0].in_flight == service.room.held == 0
    assert await asyncio.gather(*calls) == [OK] * 15


async def test_who_is_still_held_when_it_stops_leaves_its_slot(client: Client, service: Service) -> None:
    assert await code(client.raw(SLOW)) == OK
    held = await hold_one(client, service)
    await service.servers[0].drain(0.01)
    assert service.servers[0].in_flight == 1
    await service.servers.pop().close()
    await service.room.close()
    with pytest.raises((aio.AioRpcError, asyncio.CancelledError)):
        await held
    async with aio.insecure_channel(await service.listen()) as channel:
        (await hold_one(Client(channel), service)).cancel()


async def test_a_slot_that_cannot_be_given_back_harms_nobody(
    client: Client, service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    assert await code(client.raw(SLOW)) == OK
    held = await hold_one(client, service)
    service.store.fault = ConnectionError("away")
    held.cancel()
    await eventually(lambda: "were not given back: away" in caplog.text)
    service.store.fault = None
    assert await code(client.raw(SLOW)) == OVER_LIMIT  # it is lost until it wears off
    assert await code(client.raw(message({"user": "a"}))) == OK


@pytest.mark.parametrize("transport", ["native"])
async def test_json_callers_wait_and_leave_alike(service: Service) -> None:
    server = HttpServer(json_app(service.door, service.room, service.health))
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
        await eventually(lambda: service.room.held == 1)
        assert await status() == b"429"
        writer.close()
        await eventually(lambda: service.room.held == 0 and stat(service, "left_total") == 1)
        _, writer = await connect()
        await eventually(lambda: service.room.held == 1)
        writer.close()
    finally:
        await server.stop()


@pytest.mark.parametrize("transport", ["native"])
async def test_a_json_caller_is_answered_when_its_slot_comes(service: Service) -> None:
    server = HttpServer(json_app(service.door, service.room, service.health))
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
    assert stat(service, "held_total") >= 1


@pytest.mark.parametrize("transport", ["native"])
async def test_a_json_caller_that_is_still_held_when_it_stops_is_told_so_and_leaves_its_slot(
    client: Client, service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http_server, "GRACE_S", 0)
    server = HttpServer(json_app(service.door, service.room, service.health))
    await server.start("127.0.0.1", 0)
    body = b'{"domain": "edge", "descriptors": [{"entries": [{"key": "slow", "value": "x"}]}]}'
    assert await code(client.raw(SLOW)) == OK
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"POST /json HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    await eventually(lambda: service.room.held == 1)
    await server.stop()
    answered = await reader.read()
    writer.close()
    assert answered.startswith(b"HTTP/1.1 503 ")
    assert answered.endswith(b"\r\n\r\nthe server is stopping and cannot answer this call; ask again\n")
    assert not any(record.exc_info for record in caplog.records)
    await eventually(lambda: stat(service, "left_total") == 1 and service.room.held == 0)
    (await hold_one(client, service)).cancel()
