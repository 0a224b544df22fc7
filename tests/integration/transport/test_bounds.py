"""Limits of the gRPC port as a whole, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from struct import pack

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2

from ratelimit_rls.h2 import frames
from ratelimit_rls.h2.config import Timeouts
from ratelimit_rls.h2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PREFACE,
    RST_STREAM,
    ErrorCode,
    frame,
)
from ratelimit_rls.h2.hpack import literal
from ratelimit_rls.protos.messages import RESET_LIMIT, SHOULD_RATE_LIMIT
from ratelimit_rls.telemetry.abuse import Abuse
from ratelimit_rls.transport.call_budget import CallBudget
from ratelimit_rls.transport.grpc import backlog, call_proxy, http2_server, open_connections, standard_services
from ratelimit_rls.transport.grpc.health_check import HEALTH_CHECK
from ratelimit_rls.transport.grpc.options import ServerLimits
from tests.integration.transport.conftest import Client, Service, eventually, message

EXHAUSTED, UNIMPLEMENTED = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNIMPLEMENTED
ANOTHER = "127.0.0.2"
"""Another local address, for a client that counts as another peer."""

USER = message({"user": "a"})
SERVING = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING).SerializeToString()
WATCH = "/grpc.health.v1.Health/Watch"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


def block(path: str) -> bytes:
    fields = [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path.encode()),
        (b":authority", b"here"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
    ]
    return b"".join(literal(name, value) for name, value in fields)


BLOCK = block(SHOULD_RATE_LIMIT)


class Raw:
    """Client that writes raw frames."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self._pings = 0
        self.write(PREFACE + frames.settings({}))

    def write(self, data: bytes) -> None:
        self.writer.write(data)

    async def received(self) -> bytes:
        """Wait until the server closes the connection, and return all unread bytes."""
        async with asyncio.timeout(20):
            return await self.reader.read()

    async def until_closed(self) -> bytes:
        """Return the payload of the last GOAWAY."""
        received = await self.received()
        payload, at = b"", 0
        while at < len(received):
            word, _, _ = frames.HEADER.unpack_from(received, at)
            at += frames.FRAME_HEADER_BYTES + (word >> 8)
            if word & 0xFF == GOAWAY:
                payload = received[at - (word >> 8) : at]
        return payload

    async def settled(self) -> bytes:
        """Wait until the server has read everything: it acknowledges a PING. Return what arrived before."""
        self._pings += 1
        payload = b"%08d" % self._pings
        self.write(frame(frames.PING, 0, 0, payload))
        return await self.until(payload)

    async def until(self, awaited: bytes) -> bytes:
        async with asyncio.timeout(20):
            return await self.reader.readuntil(awaited)

    @property
    def is_closed(self) -> bool:
        return self.reader.at_eof()


def is_enhance_your_calm(go_away: bytes) -> bool:
    return go_away[4:8] == pack(">I", ErrorCode.ENHANCE_YOUR_CALM)


@asynccontextmanager
async def raw(address: str, source: str = "127.0.0.1") -> AsyncIterator[Raw]:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), local_addr=(source, 0))
    try:
        yield Raw(reader, writer)
    finally:
        writer.close()


async def test_calls_over_the_call_budget_are_rejected_unread(service: Service) -> None:
    address = await service.listen(call_budget=CallBudget(0, 3, clock=lambda: 0.0))
    async with aio.insecure_channel(address) as channel:
        client = Client(channel)
        for _ in range(3):
            await client.ask({"staff": "x"})
        code, words = await client.failure(b"\xff not even a message")
        assert (code, "over its own limit" in words) == (EXHAUSTED, True)
    assert service.abuse.count(Abuse.CALL_BUDGET_OF_PEER) == 1
    assert sum(service.store.batches) <= 3


UNFINISHED = frame(HEADERS, END_HEADERS, 1, BLOCK)


async def test_connections_of_one_peer_are_limited_with_goaway(service: Service) -> None:
    address = await service.listen(limits=ServerLimits(max_connections_per_peer=2))
    service.store.gate.clear()
    async with raw(address) as first, raw(address) as second:
        for busy in (first, second):
            busy.write(UNFINISHED + frame(DATA, END_STREAM, 1, pack(">BI", 0, len(USER)) + USER))
            await busy.settled()
        async with raw(address) as third:
            assert is_enhance_your_calm(await third.until_closed())
        assert not first.is_closed
    assert service.abuse.count(Abuse.TOO_MANY_CONNECTIONS_OF_PEER) == 1


@pytest.mark.parametrize("limits", [ServerLimits(max_connections_per_peer=3), ServerLimits(max_connections=3)], ids=str)
async def test_idle_connections_are_evicted(service: Service, limits: ServerLimits) -> None:
    address = await service.listen(limits=limits)
    async with raw(address) as busy, raw(address) as idle, raw(address) as later:
        busy.write(UNFINISHED)
        for one in (busy, idle, later):
            await one.settled()
        async with aio.insecure_channel(address) as channel:
            await Client(channel).ask({"staff": "x"})
            assert not is_enhance_your_calm(await idle.until_closed())
        assert not busy.is_closed
        assert not later.is_closed


@pytest.mark.parametrize("limits", [ServerLimits(max_connections_per_peer=3), ServerLimits(max_connections=4)], ids=str)
async def test_connections_with_unfinished_calls_are_evicted(service: Service, limits: ServerLimits) -> None:
    """The peer with the most connections loses the one that is silent for longest, but none with a pending decision."""
    address = await service.listen(limits=limits)
    service.store.gate.clear()
    async with raw(address, ANOTHER) as busy, raw(address, ANOTHER) as first, raw(address, ANOTHER) as second:
        busy.write(UNFINISHED + frame(DATA, END_STREAM, 1, pack(">BI", 0, len(USER)) + USER))
        for one in (busy, first, second):
            if one is not busy:
                one.write(UNFINISHED)
            await one.settled()
        async with raw(address) as other:
            other.write(UNFINISHED)
            await other.settled()
            async with raw(address, ANOTHER if limits.max_connections_per_peer == 3 else "127.0.0.1") as new:
                await new.settled()
            received = await first.received()
            assert frames.rst_stream(1, ErrorCode.REFUSED_STREAM) in received
            assert frames.goaway(1, ErrorCode.NO_ERROR) in received
            for one in (busy, second, other):
                await one.settled()


async def test_caches_are_cleared_before_a_connection_is_closed(service: Service) -> None:
    address = await service.listen(limits=ServerLimits(max_unfinished_bytes=100_000))
    async with raw(address) as client:
        for number in range(1, 1001, 2):
            head = BLOCK + literal(b"x-id", b"%d" % number)
            client.write(frame(HEADERS, END_HEADERS, number, head))
            client.write(frame(DATA, END_STREAM, number, pack(">BI", 0, len(USER)) + USER))
            await client.settled()
        assert not client.is_closed
    assert service.abuse.count(Abuse.UNFINISHED_BYTES) == 0


async def test_closed_connection_releases_its_place(service: Service) -> None:
    address = await service.listen(limits=ServerLimits(max_connections=1))
    http2 = service.servers[0]._http2
    assert http2 is not None
    for _ in range(5):
        async with aio.insecure_channel(address) as channel:
            await Client(channel).ask({"staff": "x"})
        await eventually(lambda: not http2._connections)  # the server learns of it a moment later


async def test_connection_that_buffers_most_is_closed(service: Service) -> None:
    address = await service.listen(limits=ServerLimits(max_unfinished_bytes=100_000))
    unfinished = frame(HEADERS, END_HEADERS, 1, BLOCK) + frame(DATA, 0, 1, pack(">BI", 0, 500_000) + bytes(10_000))
    more = frame(DATA, 0, 1, bytes(10_000))
    async with raw(address) as modest, raw(address) as greedy:
        modest.write(unfinished)
        greedy.write(unfinished + more * 5)
        async with aio.insecure_channel(address) as channel:
            client = Client(channel)
            await client.ask({"staff": "x"})
            greedy.write(more * 8)
            assert is_enhance_your_calm(await greedy.until_closed())
            await client.ask({"staff": "x"})
        assert not modest.is_closed
    assert service.abuse.count(Abuse.UNFINISHED_BYTES) == 1


async def test_a_tenth_of_the_limit_is_freed_at_once(service: Service) -> None:
    address = await service.listen(limits=ServerLimits(max_unfinished_bytes=100_000))
    unfinished = frame(HEADERS, END_HEADERS, 1, BLOCK) + frame(DATA, 0, 1, pack(">BI", 0, 500_000) + bytes(3000))
    async with AsyncExitStack() as stack:
        hoarders = [await stack.enter_async_context(raw(address)) for _ in range(30)]
        for hoarder in hoarders:
            hoarder.write(unfinished)
            await hoarder.settled()
        hoarders[0].write(frame(DATA, 0, 1, bytes(15_000)))
        hoarders[1].write(frame(DATA, 0, 1, bytes(4000)))
        assert is_enhance_your_calm(await hoarders[0].until_closed())
        await eventually(lambda: service.abuse.count(Abuse.UNFINISHED_BYTES) > 0)
        for hoarder in hoarders[1:]:
            await hoarder.settled()
    assert service.abuse.count(Abuse.UNFINISHED_BYTES) == 1


async def test_many_small_hoards_do_not_close_the_largest_connection_of_another_peer(service: Service) -> None:
    address = await service.listen(limits=ServerLimits(max_unfinished_bytes=100_000))
    head, data = frame(HEADERS, END_HEADERS, 1, BLOCK), pack(">BI", 0, 20_000 + len(USER)) + bytes(10_000)
    async with AsyncExitStack() as stack:
        modest = await stack.enter_async_context(raw(address))
        modest.write(head + frame(DATA, 0, 1, data + bytes(5000)))
        await modest.settled()
        hoarders = [await stack.enter_async_context(raw(address, ANOTHER)) for _ in range(10)]
        for hoarder in hoarders:
            hoarder.write(head + frame(DATA, 0, 1, data))
        await eventually(lambda: service.abuse.count(Abuse.UNFINISHED_BYTES) > 0)
        await modest.settled()
        assert not modest.is_closed
        modest.write(frame(DATA, END_STREAM, 1, bytes(5000) + USER))
        await modest.settled()


def calls(count: int, *, whole: bool) -> bytes:
    """Return the frames of `count` calls, with or without their messages."""
    data = pack(">BI", 0, len(USER)) + USER
    ids = range(1, 2 * count, 2)
    heads = [frame(HEADERS, END_HEADERS, one, BLOCK) for one in ids]
    return b"".join(heads + [frame(DATA, END_STREAM, one, data) for one in ids if whole])


def stream_limit(max_streams: int) -> bytes:
    return frames.settings({frames.Setting.MAX_CONCURRENT_STREAMS: max_streams})


class TestTooManyStreams:
    """The process has a limit of 100 streams."""

    @pytest.fixture
    async def address(self, service: Service, monkeypatch: pytest.MonkeyPatch) -> str:
        monkeypatch.setattr(http2_server, "CHECK_INTERVAL_S", 0.05)
        return await service.listen(limits=ServerLimits(max_streams=100))

    async def test_calls_that_wait_for_their_clients_are_reset_first(self, service: Service, address: str) -> None:
        async with raw(address) as modest, raw(address, ANOTHER) as first, raw(address, ANOTHER) as second:
            modest.write(calls(5, whole=False))
            await modest.settled()
            for hoarder in (first, second):
                hoarder.write(calls(60, whole=False))
                await hoarder.settled()
            await eventually(lambda: service.abuse.count(Abuse.TOO_MANY_STREAMS) > 0)
            assert service.abuse.count(Abuse.TOO_MANY_STREAMS) in range(25, 30)
            await first.until(frames.rst_stream(1, ErrorCode.CANCEL))
            modest.write(frame(DATA, END_STREAM, 9, pack(">BI", 0, len(USER)) + USER))
            received = await modest.settled()
            assert stream_limit(open_connections.MIN_STREAMS)[:9] not in received, "its share is not reduced"
            assert frames.rst_stream(1, ErrorCode.CANCEL) not in received

    async def test_smaller_share_is_announced_while_calls_wait(self, service: Service, address: str) -> None:
        service.store.gate.clear()
        async with raw(address) as modest, raw(address, ANOTHER) as first, raw(address, ANOTHER) as second:
            for busy in (first, second):
                busy.write(calls(60, whole=True))
            for one in (modest, first, second):
                await one.until(stream_limit(33))
            async with raw(address) as new:
                await new.until(pack(">HI", frames.Setting.MAX_CONCURRENT_STREAMS, 33))
            service.store.gate.set()
            await modest.until(stream_limit(service.options.max_concurrent_streams))
        assert service.abuse.count(Abuse.TOO_MANY_STREAMS) == 1


async def test_unknown_services_are_rejected_and_proxied_calls_budgeted(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_proxy, "MAX_PROXIED_CALLS_PER_SECOND_OF_PEER", 5)
    async with aio.insecure_channel(await service.listen()) as channel:
        with pytest.raises(aio.AioRpcError) as raised:
            await channel.unary_unary("/another.Service/Method")(b"", timeout=10)  # type: ignore[arg-type]
        assert raised.value.code() is UNIMPLEMENTED
        with pytest.raises(aio.AioRpcError) as raised:
            await channel.unary_unary("/grpc.health.v1.Health/Method")(b"", timeout=10)  # type: ignore[arg-type]
        assert raised.value.code() is UNIMPLEMENTED
        watch: aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(WATCH)
        answers = [await asyncio.gather(first_status(watch), return_exceptions=True) for _ in range(20)]
        rejected = [one for (one,) in answers if isinstance(one, aio.AioRpcError)]
        assert answers[0] == [SERVING]
        assert {one.code() for one in rejected} == {EXHAUSTED}
    assert service.abuse.count(Abuse.PROXIED_CALL_BUDGET) == len(rejected) >= 5


async def first_status(watch: aio.UnaryStreamMultiCallable[bytes, bytes]) -> bytes:
    """Return the first response."""
    call = watch(b"", timeout=10)
    try:
        return bytes(await call.read())  # type: ignore[call-overload]
    finally:
        call.cancel()


async def check_health(address: str) -> bytes:
    """Check the health over a new connection."""
    async with aio.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        return bytes(await channel.unary_unary(HEALTH_CHECK)(b"", timeout=10))  # type: ignore[arg-type]


def watches(count: int, first: int = 1) -> bytes:
    ids = range(first, first + 2 * count, 2)
    empty_message = pack(">BI", 0, 0)
    return b"".join(
        frame(HEADERS, END_HEADERS, one, block(WATCH)) + frame(DATA, END_STREAM, one, empty_message) for one in ids
    )


@pytest.mark.parametrize("size", [7_000, 15_000, 30_000])
async def test_internal_server_accepts_all_metadata_that_we_accept(service: Service, size: int) -> None:
    """When gRPC rejects metadata, its error names all keys, including our key of the peer address."""
    async with raw(await service.listen()) as client:
        head = block(WATCH) + literal(b"x-large", b"v" * size)
        parts = [head[at : at + 16_000] for at in range(0, len(head), 16_000)]
        client.write(frame(HEADERS, END_HEADERS if len(parts) == 1 else 0, 1, parts[0]))
        for part in parts[1:]:
            client.write(frame(frames.CONTINUATION, END_HEADERS if part is parts[-1] else 0, 1, part))
        client.write(frame(DATA, END_STREAM, 1, pack(">BI", 0, 0)))
        async with asyncio.timeout(10):
            await client.reader.readuntil(pack(">BI", 0, len(SERVING)) + SERVING)


async def test_health_watches_are_limited_per_connection_and_peer_but_not_checks(service: Service) -> None:
    address = await service.listen()
    of_connection, of_peer = call_proxy.MAX_PROXIED_CALLS_OF_CONNECTION, call_proxy.MAX_PROXIED_CALLS_OF_PEER
    rejected = 0
    async with AsyncExitStack() as stack:
        for _ in range(of_peer // of_connection):
            client = await stack.enter_async_context(raw(address))
            client.write(watches(of_connection + 3))
            await client.settled()
            rejected += 3
            assert service.abuse.count(Abuse.PROXIED_CALL_BUDGET) == rejected
        last = await stack.enter_async_context(raw(address))
        last.write(watches(of_connection))
        await last.settled()
        rejected += of_connection - of_peer % of_connection
        assert service.abuse.count(Abuse.PROXIED_CALL_BUDGET) == rejected
        assert await check_health(address) == SERVING
        last.write(frame(HEADERS, END_HEADERS, 1001, block(HEALTH_CHECK)))
        last.write(frame(DATA, END_STREAM, 1001, pack(">BI", 0, 0)))
        async with asyncio.timeout(10):
            await last.reader.readuntil(pack(">BI", 0, len(SERVING)) + SERVING)
    async with aio.insecure_channel(address) as channel:
        await eventually(lambda: not service.servers[0]._http2._proxy._by_peer)  # type: ignore[union-attr]
        assert await first_status(channel.unary_stream(WATCH)) == SERVING


async def test_health_checks_of_a_busy_service_are_answered(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither an exhausted budget nor a full backlog rejects a check."""
    address = await service.listen(call_budget=CallBudget(1, 1, clock=lambda: 0.0))
    monkeypatch.setattr(backlog, "MAX_BACKLOG_BYTES", 0)
    for _ in range(5):
        assert await check_health(address) == SERVING


async def test_unfinished_proxied_calls_are_reset(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2_server, "CHECK_INTERVAL_S", 0.05)
    address = await service.listen(limits=ServerLimits(timeouts=Timeouts(message_s=0.2)))
    heads = [frame(HEADERS, END_HEADERS, one, block(path)) for one, path in ((1, WATCH), (3, REFLECTION))]
    async with raw(address) as client:
        client.write(b"".join(heads) + watches(1, 5))
        received = b""
        cancelled = [frames.rst_stream(one, ErrorCode.CANCEL) for one in (1, 3)]
        async with asyncio.timeout(20):
            while not all(one in received for one in cancelled):
                received += await client.reader.read(65536)
        await client.settled()
        assert service.abuse.count(Abuse.IDLE_TIMEOUT) == 2


@pytest.mark.parametrize("path", [WATCH, REFLECTION, RESET_LIMIT])
async def test_compressed_messages_of_proxied_calls_are_rejected(service: Service, path: str) -> None:
    """Otherwise 4 KB of gzip would become 4 MiB that gRPC keeps and nothing counts."""
    address = await service.listen()
    async with aio.insecure_channel(address, compression=grpc.Compression.Gzip) as channel:
        call = channel.unary_stream(path)(bytes(60_000), timeout=10)  # type: ignore[arg-type, var-annotated]
        with pytest.raises(aio.AioRpcError) as raised:
            await call.read()
        assert (raised.value.code(), "identity" in (raised.value.details() or "")) == (UNIMPLEMENTED, True)
        assert service.abuse.count(Abuse.COMPRESSED_MESSAGE) == 1


@pytest.mark.parametrize(
    ("path", "messages", "reason"),
    [
        (WATCH, [bytes(70_000)], Abuse.MESSAGE_TOO_LARGE),
        (WATCH, [b"", b""], Abuse.PROXIED_CALL_BUDGET),
        (RESET_LIMIT, [b"", b""], Abuse.PROXIED_CALL_BUDGET),
        (REFLECTION, [b""] * (standard_services.MAX_REFLECTION_MESSAGES + 1), Abuse.PROXIED_CALL_BUDGET),
        (REFLECTION, [bytes(30_000)] * 3, Abuse.MESSAGE_TOO_LARGE),
    ],
)
async def test_messages_of_proxied_calls_are_limited(
    service: Service, path: str, messages: list[bytes], reason: Abuse
) -> None:
    sent = b"".join(pack(">BI", 0, len(one)) + one for one in messages)
    frames_of_data = [frame(DATA, 0, 1, sent[at : at + 16_000]) for at in range(0, len(sent), 16_000)]
    async with raw(await service.listen()) as client:
        client.write(frame(HEADERS, END_HEADERS, 1, block(path)) + b"".join(frames_of_data))
        await client.settled()
        assert service.abuse.count(reason) == 1


async def test_calls_cancelled_during_a_store_outage_keep_the_connection(service: Service) -> None:
    """The client sends no deadlines, and cancels each call after Envoy's default timeout."""
    address = await service.listen()
    service.store.gate.clear()
    calls = 500
    async with raw(address) as client:
        next_id = 1
        for _ in range(8):
            ids = range(next_id, next_id + 2 * calls, 2)
            next_id += 2 * calls
            requests = [
                frame(HEADERS, END_HEADERS, one, BLOCK) + frame(DATA, END_STREAM, one, pack(">BI", 0, len(USER)) + USER)
                for one in ids
            ]
            client.write(b"".join(requests))
            await asyncio.sleep(0.02)
            client.write(b"".join(frame(RST_STREAM, 0, one, pack(">I", ErrorCode.CANCEL)) for one in ids))
            service.store.gate.set()
            await asyncio.sleep(0.02)
            service.store.gate.clear()
        assert not client.is_closed
    service.store.gate.set()
    await service.servers[0].drain(10)
    assert service.abuse.count(Abuse.RAPID_RESET) == 0


async def test_busy_connection_does_not_delay_others(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """With more calls than one iteration decides, a call of another connection is decided in the next one."""
    monkeypatch.setattr(http2_server, "MAX_ITERATION_WEIGHT", 40)
    monkeypatch.setattr(http2_server, "BACKLOG_ITERATION_WEIGHT", 20)
    address = await service.listen()
    async with raw(address) as crowd, raw(address) as other:
        call = frame(DATA, END_STREAM, 1, pack(">BI", 0, len(USER)) + USER)
        first = frame(HEADERS, END_HEADERS, 1, BLOCK) + call
        for client in (crowd, other):
            client.write(first)
            async with asyncio.timeout(10):
                while b"grpc-status" not in await client.reader.read(2**16):
                    pass
        service.store.batches.clear()
        many = [
            frame(HEADERS, END_HEADERS, one, BLOCK) + frame(DATA, END_STREAM, one, pack(">BI", 0, len(USER)) + USER)
            for one in range(3, 2003, 2)
        ]
        crowd.write(b"".join(many))
        async with asyncio.timeout(10):
            while not service.store.batches:
                await asyncio.sleep(0)
            other.write(frame(HEADERS, END_HEADERS, 3, BLOCK) + frame(DATA, END_STREAM, 3, call[9:]))
            while b"grpc-status" not in await other.reader.read(2**16):
                pass
        assert sum(service.store.batches) < 900
        assert max(service.store.batches) <= 20
    await service.servers[0].drain(10)
