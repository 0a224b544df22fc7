"""TCP proxies in front of Redis: TLS termination, and a slow network."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from pathlib import Path
from typing import Self

from tests.support.servers import RedisServer


class TcpProxy:
    """Forwards bytes, in a thread; `delay_ms` delays responses of the server."""

    def __init__(self, server: RedisServer, tls: ssl.SSLContext | None = None) -> None:
        self.server = server
        self.delay_ms = 0.0
        self.port = 0
        self._tls = tls
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._connections: set[asyncio.Task[None]] = set()
        self._clients: list[asyncio.StreamWriter] = []

    @property
    def address(self) -> str:
        """Address for REDIS_URL, host:port."""
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> None:
        self._listener = await asyncio.start_server(self._accept, "127.0.0.1", 0, ssl=self._tls)
        self.port = self._listener.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        self._listener.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        for client in self._clients:  # TLS would wait for their close_notify
            client.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        self._clients.append(writer)
        try:
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await self._relay(reader, writer)
        finally:
            self._connections.discard(task)
            writer.close()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward in both directions until one side closes."""
        behind, ahead = await asyncio.open_connection("127.0.0.1", self.server.port)
        directions = [
            asyncio.create_task(self._forward(reader, ahead)),
            asyncio.create_task(self._return(behind, writer)),
        ]
        try:
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for direction in directions:
                direction.cancel()
            await asyncio.gather(*directions, return_exceptions=True)
            ahead.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()

    async def _return(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward responses, each after its own delay: the network has latency, not low bandwidth."""
        due: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        async with asyncio.TaskGroup() as both:
            both.create_task(self._send_when_due(due, writer))
            data = b"something"
            while data:
                data = await reader.read(65_536)
                due.put_nowait((self._loop.time() + self.delay_ms / 1000, data))

    async def _send_when_due(self, due: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        """Write each chunk when it is due, until an empty one, which ends the stream."""
        data = b"something"
        while data:
            at, data = await due.get()
            await asyncio.sleep(max(0.0, at - self._loop.time()))
            writer.write(data)
            await writer.drain()


class SlowProxy(TcpProxy):
    """Proxy without delay until `delay_ms` is set."""


class TlsProxy(TcpProxy):
    """Terminates TLS in front of a server; with `client_ca`, clients need a certificate of this CA."""

    def __init__(self, server: RedisServer, certificate: Path, key: Path, client_ca: Path | None = None) -> None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate, key)
        if client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(client_ca)
        super().__init__(server, context)
