"""Limits of an HTTP port against slow, numerous or malformed clients, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import replace

import pytest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from ratelimit_rls.telemetry.abuse import Abuse, AbuseLog
from ratelimit_rls.transport.http import connection as connection_module
from ratelimit_rls.transport.http.connection import Eviction
from ratelimit_rls.transport.http.limits import MAX_DRAINED_BYTES, BufferBudget, HttpLimits
from ratelimit_rls.transport.http.server import HttpServer

PATIENT_S = 20.0
"""Timeout for events that must happen, even on a busy machine."""

SLOW = HttpLimits(tick_s=0.02)
"""Production timeouts, which do not expire during a test."""

IMPATIENT = HttpLimits(
    head_s=0.3, body_idle_s=0.3, body_s=1.0, drain_s=0.5, write_stall_s=0.3, linger_s=0.2, tick_s=0.02
)

POST = b"POST / HTTP/1.1\r\nHost: localhost\r\n"
GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> str:
        """Return head and body of a response on a connection that stays open."""
        async with asyncio.timeout(PATIENT_S):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
            length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
            return head + (await self.reader.readexactly(length)).decode()

    async def rest(self) -> str:
        """Return everything until the server closes the connection."""
        async with asyncio.timeout(PATIENT_S):
            with suppress(ConnectionError):
                return (await self.reader.read(-1)).decode()
            return ""


class Port:
    """Server whose page returns the length of the body."""

    def __init__(self) -> None:
        self.abuse = AbuseLog()
        self.buffer_budget = BufferBudget()
        self.cut_short = 0
        self.answering = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.servers: list[HttpServer] = []
        self.clients: list[Client] = []
        self.app = Starlette(
            routes=[
                Route("/", self.page, methods=["GET", "POST"]),
                Route("/unread", self.unread, methods=["POST"]),
                Route("/long", self.long),
                Route("/large", self.large),
                Route("/waits", self.waits, methods=["POST"]),
            ]
        )

    async def start(self, limits: HttpLimits) -> Callable[..., Awaitable[Client]]:
        server = HttpServer(self.app, limits=limits, abuse=self.abuse, buffer_budget=self.buffer_budget)
        await server.start("127.0.0.1", 0)
        self.servers.append(server)

        async def connect(source: str = "127.0.0.1") -> Client:
            client = Client(
                *await asyncio.open_connection("127.0.0.1", server.port, local_addr=(source, 0), limit=2**26)
            )
            self.clients.append(client)
            return client

        return connect

    async def page(self, request: Request) -> Response:
        try:
            return PlainTextResponse(f"{len(await request.body())} bytes")
        except ClientDisconnect:
            self.cut_short += 1
            raise

    async def unread(self, _: Request) -> Response:
        return PlainTextResponse("no", 413)

    async def long(self, _: Request) -> Response:
        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(512):
                yield b"x" * 2**16

        return StreamingResponse(pieces())

    async def large(self, _: Request) -> Response:
        return PlainTextResponse("x" * 2**23)

    async def waits(self, request: Request) -> Response:
        body = await request.body()
        self.answering.set()
        await self.may_answer.wait()
        return PlainTextResponse(f"{len(body)} bytes")

    async def start_slow_call(self, client: Client) -> None:
        """Start a call, and return when the page is processing it."""
        self.answering.clear()
        client.send(b"POST /waits HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n")
        await asyncio.wait_for(self.answering.wait(), PATIENT_S)

    async def wait_for_evictions(self, *expected: Eviction) -> None:
        async with asyncio.timeout(PATIENT_S):
            while self.evictions() != sorted(expected):
                await asyncio.sleep(0.01)

    def evictions(self) -> list[Eviction]:
        server = self.servers[0]._server
        assert server is not None
        orders = [connection.eviction_order() for connection in server.server_state.connections]  # type: ignore[union-attr]
        return sorted(order[0] for order in orders if order is not None)

    async def until(self, reason: Abuse, times: int = 1) -> None:
        async with asyncio.timeout(PATIENT_S):
            while self.abuse.count(reason) < times:
                await asyncio.sleep(0.01)


@pytest.fixture
async def port() -> AsyncIterator[Port]:
    port = Port()
    yield port
    port.may_answer.set()  # otherwise stopping waits for the slow calls
    for client in port.clients:
        client.writer.close()
    for server in port.servers:
        await server.stop()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@pytest.mark.slow
async def test_unfinished_head_times_out(port: Port) -> None:
    connect = await port.start(IMPATIENT)
    client = await connect()
    client.send(b"GET / HTTP/1.1\r\nHost: local")
    answer = await client.rest()
    assert answer.startswith("HTTP/1.1 408 Request Timeout\r\n")
    assert "Connection: close" in answer
    assert answer.endswith("the request took too long to arrive\n")
    assert port.abuse.count(Abuse.HTTP_TIMEOUT) == 1


@pytest.mark.slow
async def test_dripping_head_times_out(port: Port) -> None:
    connect = await port.start(IMPATIENT)
    client = await connect()

    async def drip() -> None:
        client.send(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ")
        while True:
            client.send(b"x")
            await asyncio.sleep(0.02)

    dripping = asyncio.create_task(drip())
    assert (await client.rest()).startswith("HTTP/1.1 408 ")
    dripping.cancel()


@pytest.mark.slow
async def test_connection_without_a_request_is_closed_silently(port: Port) -> None:
    connect = await port.start(IMPATIENT)
    assert await (await connect()).rest() == ""
    assert port.abuse.count(Abuse.IDLE_TIMEOUT) == 1


@pytest.mark.slow
@pytest.mark.parametrize("drips", [False, True])
async def test_unfinished_body_times_out(port: Port, drips: bool) -> None:
    """The idle timeout applies without progress, the total timeout with slow progress."""
    connect = await port.start(IMPATIENT)
    client = await connect()
    client.send(POST + b"Content-Length: 1000\r\n\r\nx")

    async def drip() -> None:
        while drips:
            await asyncio.sleep(0.02)
            client.send(b"x")

    dripping = asyncio.create_task(drip())
    assert (await client.rest()).startswith("HTTP/1.1 408 ")
    dripping.cancel()
    assert port.abuse.count(Abuse.HTTP_TIMEOUT) == 1
    assert port.cut_short == 1


@pytest.mark.slow
async def test_unread_body_times_out_after_its_response(port: Port) -> None:
    connect = await port.start(IMPATIENT)
    client = await connect()
    client.send(b"POST /unread HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\nx")
    assert (await client.answer()).startswith("HTTP/1.1 413 ")

    async def drip() -> None:
        while True:
            await asyncio.sleep(0.02)
            client.send(b"x")

    dripping = asyncio.create_task(drip())
    assert await client.rest() == ""
    dripping.cancel()
    assert port.abuse.count(Abuse.HTTP_TIMEOUT) == 1


async def test_unread_body_may_finish(port: Port) -> None:
    connect = await port.start(SLOW)
    client = await connect()
    for _ in range(2):
        client.send(b"POST /unread HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\nx")
        assert (await client.answer()).startswith("HTTP/1.1 413 ")
        client.send(b"x" * 99_999)
    client.send(GET)
    assert (await client.answer()).endswith("0 bytes")
    assert port.buffer_budget.used_bytes == 0


async def test_unread_body_is_not_buffered(port: Port) -> None:
    connect = await port.start(replace(SLOW, drain_s=1000.0))
    client, other = await connect(), await connect()
    client.send(b"POST /unread HTTP/1.1\r\nHost: localhost\r\nContent-Length: 200000\r\n\r\nx")
    await client.answer()
    client.send(b"x" * 100_000)
    await client.writer.drain()
    for _ in range(10):  # enough for it to arrive
        other.send(GET)
        await other.answer()
    async with asyncio.timeout(PATIENT_S):
        while port.buffer_budget.used_bytes:
            await asyncio.sleep(0.01)


async def test_unread_body_is_limited(port: Port) -> None:
    connect = await port.start(replace(SLOW, drain_s=1000.0))
    client = await connect()
    client.send(b"POST /unread HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000000\r\n\r\nx")
    await client.answer()
    with suppress(ConnectionError):
        client.send(b"x" * (MAX_DRAINED_BYTES + 2**20))
        await client.writer.drain()
    assert await client.rest() == ""


@pytest.mark.slow
async def test_long_response_that_is_read_is_not_aborted(port: Port) -> None:
    connect = await port.start(replace(IMPATIENT, write_stall_s=5.0))
    client = await connect()
    client.send(b"GET /long HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    size = 0
    async with asyncio.timeout(PATIENT_S):
        while piece := await client.reader.read(2**20):
            size += len(piece)
            await asyncio.sleep(0.03)  # longer in total than every other timeout
    assert size > 512 * 2**16
    assert port.abuse.count(Abuse.HTTP_TIMEOUT) == 0


@pytest.mark.slow
async def test_unread_response_is_aborted(port: Port) -> None:
    connect = await port.start(IMPATIENT)
    client = await connect()
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    client.send(b"GET /long HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await port.until(Abuse.HTTP_TIMEOUT)


@pytest.mark.slow
async def test_unread_response_with_pipelined_requests_is_aborted(port: Port) -> None:
    connect = await port.start(IMPATIENT)
    client = await connect()
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    client.send(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3)
    await port.until(Abuse.HTTP_TIMEOUT)


@pytest.mark.slow
async def test_rejected_client_is_closed_even_if_it_keeps_sending(port: Port) -> None:
    connect = await port.start(IMPATIENT)
    client = await connect()
    client.send(b"nonsense\r\n\r\n")
    async with asyncio.timeout(PATIENT_S):
        assert (await client.reader.readline()).startswith(b"HTTP/1.1 400 ")
        with suppress(ConnectionError):
            while not client.writer.is_closing():
                client.send(b"x")
                await client.writer.drain()
                await asyncio.sleep(0.02)


@pytest.mark.slow
async def test_slow_response_does_not_time_out(port: Port) -> None:
    connect = await port.start(IMPATIENT)
    client = await connect()
    client.send(b"POST /waits HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\nab")
    await asyncio.wait_for(port.answering.wait(), PATIENT_S)
    await asyncio.sleep(1.2)  # longer than every timeout of IMPATIENT
    port.may_answer.set()
    assert (await client.answer()).endswith("2 bytes")


async def test_connections_of_one_peer_are_limited(port: Port) -> None:
    connect = await port.start(replace(SLOW, max_connections_per_peer=2))
    kept = [await connect() for _ in range(2)]
    for client in kept:
        await port.start_slow_call(client)
    rejected = await (await connect()).rest()
    assert rejected.startswith("HTTP/1.1 503 Service Unavailable\r\n")
    assert "Connection: close" in rejected
    assert rejected.endswith("this port has too many connections; try again later\n")
    assert port.abuse.count(Abuse.TOO_MANY_CONNECTIONS_OF_PEER) == 1
    other = await connect("127.0.0.2")
    other.send(GET)
    assert (await other.answer()).startswith("HTTP/1.1 200 ")
    kept[0].writer.close()
    async with asyncio.timeout(PATIENT_S):
        while not (await again(connect)).startswith("HTTP/1.1 200 "):
            await asyncio.sleep(0.01)


async def again(connect: Callable[..., Awaitable[Client]]) -> str:
    client = await connect()
    client.send(GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    return await client.rest()


async def test_connections_far_over_the_limit_are_closed_silently(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "MAX_REJECTED_CONNECTIONS", 1)
    connect = await port.start(replace(SLOW, max_connections=1, linger_s=PATIENT_S))
    busy = await connect()
    await port.start_slow_call(busy)
    rejected, closed = await connect("127.0.0.2"), await connect("127.0.0.3")
    assert (await rejected.rest()).startswith("HTTP/1.1 503 ")
    assert await closed.rest() == ""
    assert port.abuse.count(Abuse.TOO_MANY_CONNECTIONS) == 2
    port.may_answer.set()
    assert (await busy.answer()).startswith("HTTP/1.1 200 ")


UNFINISHED = {
    "silent": b"",
    "keep-alive": GET,
    "head": GET[:-2],
    "body": POST + b"Content-Length: 100\r\n\r\nx",
    "unread body": b"POST /unread HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nx",
    "malformed": b"nonsense\r\n\r\n",
}


@pytest.mark.parametrize("sent", UNFINISHED.values(), ids=UNFINISHED)
@pytest.mark.parametrize("tick_s", [SLOW.tick_s, PATIENT_S])
@pytest.mark.parametrize("bound", ["port", "peer"])
async def test_connection_that_waits_for_its_client_is_evicted(
    port: Port, bound: str, tick_s: float, sent: bytes
) -> None:
    """Health probes are answered while another client, or one with the same address, uses all connections."""
    limits = replace(SLOW, tick_s=tick_s, linger_s=PATIENT_S)
    connect = await port.start(
        replace(limits, max_connections=2) if bound == "port" else replace(limits, max_connections_per_peer=2)
    )
    waiting = [await connect("127.0.0.2" if bound == "port" else "127.0.0.1") for _ in range(2)]
    for client in waiting:
        client.send(sent)
        if sent == GET:
            await client.answer()
    assert (await again(connect)).startswith("HTTP/1.1 200 ")
    reason = Abuse.TOO_MANY_CONNECTIONS if bound == "port" else Abuse.TOO_MANY_CONNECTIONS_OF_PEER
    assert port.abuse.count(reason) == 1


async def test_eviction_order(port: Port) -> None:
    """Connections that are cheapest for the client are evicted first: idle, then heads, then bodies."""
    connect = await port.start(replace(SLOW, max_connections=4))
    sent = [UNFINISHED["body"], UNFINISHED["head"], UNFINISHED["keep-alive"]]
    clients = [await connect(f"127.0.0.{number}") for number in range(2, 5)]
    busy = await connect("127.0.0.5")
    for client, data in zip(clients, sent, strict=True):
        client.send(data)
    await port.start_slow_call(busy)
    await port.wait_for_evictions(Eviction.IDLE, Eviction.HEAD, Eviction.BODY)
    await clients[2].answer()
    for number, client in enumerate(reversed(clients), 1):
        await port.start_slow_call(await connect(f"127.0.1.{number}"))
        assert await client.rest() == ""
        assert port.abuse.count(Abuse.TOO_MANY_CONNECTIONS) == number
    assert (await (await connect()).rest()).startswith("HTTP/1.1 503 ")
    port.may_answer.set()
    assert (await busy.answer()).endswith("0 bytes")


async def test_peer_with_the_most_connections_is_evicted_first(port: Port) -> None:
    connect = await port.start(replace(SLOW, max_connections=4))
    sources = ["127.0.0.2", "127.0.0.3", "127.0.0.3", "127.0.0.3"]
    clients = [await connect(source) for source in sources]
    for client in clients:
        client.send(UNFINISHED["body"])
    await port.wait_for_evictions(*[Eviction.BODY] * 4)
    for _ in range(2):
        assert (await again(connect)).startswith("HTTP/1.1 200 ")
        await connect("127.0.0.3")
    clients[0].send(b"x" * 99)
    assert (await clients[0].answer()).endswith("100 bytes")


async def test_unfinished_bodies_share_a_budget(port: Port) -> None:
    port.buffer_budget = BufferBudget(200_000)
    connect = await port.start(SLOW)
    first, second = await connect(), await connect()
    for client in (first, second):
        client.send(POST + b"Content-Length: 150001\r\n\r\n" + b"x" * 150_000)
    done, _ = await asyncio.wait(
        [asyncio.ensure_future(client.reader.readline()) for client in (first, second)],
        timeout=PATIENT_S,
        return_when=asyncio.FIRST_COMPLETED,
    )
    assert [task.result() for task in done] == [b"HTTP/1.1 503 Service Unavailable\r\n"]
    assert port.abuse.count(Abuse.UNFINISHED_BYTES) == 1
    small = await connect()
    small.send(GET)
    assert (await small.answer()).startswith("HTTP/1.1 200 ")
    for client in (first, second):
        client.writer.close()
    async with asyncio.timeout(PATIENT_S):
        while port.buffer_budget.used_bytes:
            await asyncio.sleep(0.01)


async def test_pipelined_requests_are_answered_in_order(port: Port) -> None:
    connect = await port.start(SLOW)
    client = await connect()
    request = POST + b"Content-Length: 6000\r\n\r\n" + b"x" * 6000
    client.send(request * 20)
    for _ in range(20):
        assert (await client.answer()).endswith("6000 bytes")
    assert port.buffer_budget.used_bytes == 0


@pytest.mark.parametrize(
    ("request_", "status", "sentence"),
    [
        (POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + GET, 400, "must not have both"),
        (POST + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n" + GET, 400, "must not have both"),
        (GET[:-2] + b"X: y\r\n" * 120 + b"\r\n", 431, "at most 100 header fields"),
        (GET[:-2] + b"X: " + b"y" * 20_000 + b"\r\n\r\n", 431, ""),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n" + chunk(b"x") * 10_000, 400, "too many small chunks"),
        (b"nonsense\r\n\r\n", 400, "not a valid HTTP request"),
        (GET[:-2] + b"Host: other\r\n\r\n", 400, "Host"),
    ],
)
async def test_malformed_request_gets_one_response_and_is_closed(
    port: Port, request_: bytes, status: int, sentence: str
) -> None:
    connect = await port.start(SLOW)
    client = await connect()
    client.send(request_)
    answer = await client.rest()
    assert answer.startswith(f"HTTP/1.1 {status} ")
    assert sentence in answer
    assert answer.count("HTTP/1.1 ") == 1
    assert port.abuse.count(Abuse.MALFORMED_REQUEST) == 1
    assert port.buffer_budget.used_bytes == 0


async def test_many_large_chunks_are_accepted(port: Port) -> None:
    connect = await port.start(SLOW)
    client = await connect()
    client.send(POST + b"Transfer-Encoding: chunked\r\n\r\n" + chunk(b"x" * 600) * 3000 + b"0\r\n\r\n")
    assert (await client.answer()).endswith("1800000 bytes")


async def test_server_stops_while_a_rejected_client_lingers(port: Port) -> None:
    connect = await port.start(replace(SLOW, linger_s=PATIENT_S))
    client = await connect()
    client.send(b"nonsense\r\n\r\n")
    await client.rest()
    await asyncio.wait_for(port.servers.pop().stop(), PATIENT_S)
