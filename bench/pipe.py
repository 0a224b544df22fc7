"""Copies bytes between decrypted connections and a server's Unix socket, for servers without the TLS of this project.

Each side is read only as fast as the other can be written.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast


class Pipe:
    """Connects any number of clients to the server on the Unix socket `behind`."""

    def __init__(self, behind: Path) -> None:
        self._behind = str(behind)
        self._connecting: set[asyncio.Task[None]] = set()

    def new_end(self) -> asyncio.Protocol:
        """Return the protocol of another client. It is not read before the server's connection is open."""
        return _End(self)

    def connect(self, near: _End, transport: asyncio.Transport) -> None:
        task = asyncio.get_running_loop().create_task(self._connect(near, transport))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, near: _End, transport: asyncio.Transport) -> None:
        loop = asyncio.get_running_loop()
        far, _ = await loop.create_unix_connection(lambda: _End(self, transport), self._behind)
        near.tie(far)


class _End(asyncio.Protocol):
    """One end of a pipe. The other end sends what this one receives."""

    def __init__(self, pipe: Pipe, other: asyncio.Transport | None = None) -> None:
        self._pipe = pipe
        self._transport: asyncio.Transport
        self._other = other

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are not instances of it
        if self._other is None:
            self._transport.pause_reading()
            self._pipe.connect(self, self._transport)

    def tie(self, other: asyncio.Transport) -> None:
        self._other = other
        if self._transport.is_closing():
            other.close()
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
        if self._other is not None:
            self._other.close()
