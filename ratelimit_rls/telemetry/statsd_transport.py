"""Transports to a statsd server: TCP or UDP."""

from __future__ import annotations

import asyncio
import socket
from typing import Protocol

DATAGRAM_BYTES = 1432
"""Fits into an Ethernet frame with any encapsulation."""

CHUNK_BYTES = 64 * 1024
CONNECT_S = 1.5
WRITE_S = 1.0


class StatsdTransport(Protocol):
    """A transport to the server. Each method may raise OSError or TimeoutError."""

    async def connect(self) -> None: ...

    async def send(self, chunk: bytes) -> None: ...

    def close(self) -> None: ...

    @property
    def chunk_bytes(self) -> int: ...


class TcpTransport:
    chunk_bytes = CHUNK_BYTES

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def connect(self) -> None:
        """Connect if there is no connection, or the server has closed it."""
        if self._streams is not None and not (self._streams[0].at_eof() or self._streams[1].is_closing()):
            return
        self.close()
        async with asyncio.timeout(CONNECT_S):
            self._streams = await asyncio.open_connection(*self._address)
        self._streams[1].transport.set_write_buffer_limits(0)  # so that drain waits until everything is written

    async def send(self, chunk: bytes) -> None:
        assert self._streams is not None
        writer = self._streams[1]
        try:
            writer.write(chunk)
            async with asyncio.timeout(WRITE_S):
                await writer.drain()
        except BaseException:
            writer.transport.abort()  # part of a line may have been sent
            self._streams = None
            raise

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


class UdpTransport(asyncio.DatagramProtocol):
    """A transport that opens a new socket for each flush, so that a server with a new address is found."""

    chunk_bytes = DATAGRAM_BYTES

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        self._transport: asyncio.DatagramTransport | None = None
        self._error: OSError | None = None

    async def connect(self) -> None:
        self.close()
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_S):
            found = await loop.getaddrinfo(*self._address, type=socket.SOCK_DGRAM)
            # Datagrams are not acknowledged, so the address cannot be tested: IPv4 first, as in Go.
            found.sort(key=lambda address: address[0] != socket.AF_INET)
            host, port = found[0][4][:2]
            self._transport, _ = await loop.create_datagram_endpoint(lambda: self, remote_addr=(str(host), int(port)))

    async def send(self, chunk: bytes) -> None:
        assert self._transport is not None
        self._transport.sendto(chunk)
        await asyncio.sleep(0)  # so that datagrams are not sent in one burst, and errors are noticed
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def pause_writing(self) -> None:
        self._error = OSError("datagrams are not taken as fast as they come")

    def error_received(self, error: Exception) -> None:
        self._error = error if isinstance(error, OSError) else OSError(str(error))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
            self._transport = None
        self._error = None
