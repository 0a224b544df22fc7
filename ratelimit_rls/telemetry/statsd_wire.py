"""How lines get to a statsd server: over a connection, or in datagrams."""

from __future__ import annotations

import asyncio
import socket
from typing import Protocol

DATAGRAM_BYTES = 1432
"""What fits an Ethernet frame whatever it travels in."""

CHUNK_BYTES = 64 * 1024
CONNECT_S = 1.5
WRITE_S = 1.0


class Wire(Protocol):
    """To the server. Each method may raise OSError or TimeoutError."""

    async def connect(self) -> None: ...

    async def send(self, chunk: bytes) -> None: ...

    def close(self) -> None: ...

    @property
    def chunk_bytes(self) -> int: ...


class TcpWire:
    chunk_bytes = CHUNK_BYTES

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def connect(self) -> None:
        """If there is no connection, or the server ended it."""
        if self._streams is not None and not (self._streams[0].at_eof() or self._streams[1].is_closing()):
            return
        self.close()
        async with asyncio.timeout(CONNECT_S):
            self._streams = await asyncio.open_connection(*self._address)
        self._streams[1].transport.set_write_buffer_limits(0)  # to drain is to have handed over everything

    async def send(self, chunk: bytes) -> None:
        assert self._streams is not None
        writer = self._streams[1]
        try:
            writer.write(chunk)
            async with asyncio.timeout(WRITE_S):
                await writer.drain()
        except BaseException:
            writer.transport.abort()  # half a line may be out
            self._streams = None
            raise

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


class UdpWire(asyncio.DatagramProtocol):
    """A socket for each time something is sent, so that a server that moved is found again."""

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
            # Nobody answers a datagram, so the address cannot be tried: IPv4 first, as Go does.
            found.sort(key=lambda address: address[0] != socket.AF_INET)
            host, port = found[0][4][:2]
            self._transport, _ = await loop.create_datagram_endpoint(lambda: self, remote_addr=(str(host), int(port)))

    async def send(self, chunk: bytes) -> None:
        assert self._transport is not None
        self._transport.sendto(chunk)
        await asyncio.sleep(0)  # so that many datagrams are no burst, and an error shows
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
