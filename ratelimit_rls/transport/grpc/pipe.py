"""Bytes carried between a client's connection and a server's Unix socket.

    client ─► _End ─► _End ──Unix socket──► server

Each side is read only as fast as the other can be written.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import cast

from ratelimit_rls.transport.grpc.drain import until_none

_log = logging.getLogger(__name__)


class Pipe:
    """To the server on the socket `behind`, for any number of clients."""

    def __init__(self, behind: Path) -> None:
        self._behind = str(behind)
        self._connections: set[asyncio.Transport] = set()
        self._tying: set[asyncio.Task[None]] = set()

    def new_end(self) -> asyncio.Protocol:
        """The protocol of another client. Nothing is read from it before the server is there, too."""
        return _End(self)

    async def close(self, timeout_s: float) -> None:
        """To be called when the server behind is closed: what it wrote is still delivered, then everything is cut."""
        await until_none(lambda: len(self._connections), timeout_s)
        for connection in list(self._connections):
            connection.abort()

    def made(self, end: _End, transport: asyncio.Transport) -> None:
        self._connections.add(transport)
        if not end.is_tied:
            transport.pause_reading()
            task = asyncio.get_running_loop().create_task(self._tie(end, transport))
            self._tying.add(task)
            task.add_done_callback(self._tying.discard)

    def lost(self, transport: asyncio.Transport) -> None:
        self._connections.discard(transport)

    async def _tie(self, near: _End, transport: asyncio.Transport) -> None:
        loop = asyncio.get_running_loop()
        try:
            _, far = await loop.create_unix_connection(lambda: _End(self, transport), self._behind)
        except OSError as error:
            _log.error("the gRPC server behind TLS does not answer: %s", error)
            transport.abort()
            return
        near.tie(far)


class _End(asyncio.Protocol):
    """One end: what it receives, the other end sends."""

    def __init__(self, pipe: Pipe, other: asyncio.Transport | None = None) -> None:
        self._pipe = pipe
        self._transport: asyncio.Transport
        self._other = other

    @property
    def is_tied(self) -> bool:
        return self._other is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are not instances of it
        self._pipe.made(self, self._transport)

    def tie(self, other: _End) -> None:
        self._other = other._transport
        if self._transport.is_closing():
            self._other.close()
        else:
            self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        assert self._other is not None
        self._other.write(data)

    def pause_writing(self) -> None:
        if self._other is not None and not self._other.is_closing():
            self._other.pause_reading()

    def resume_writing(self) -> None:
        if self._other is not None and not self._other.is_closing():
            self._other.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._pipe.lost(self._transport)
        if self._other is not None:
            self._other.close()
