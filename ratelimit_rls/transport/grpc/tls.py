"""TLS before the gRPC port: decrypted here, carried as bytes to a Unix socket and back.

    client ══TLS══► _End ─► _End ──Unix socket──► transport

Each side is read only as fast as the other can be written. A connection keeps the certificates it began with; the next
one gets the newest. Nothing of a client reaches the socket before its certificate was accepted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Coroutine
from pathlib import Path
from typing import cast

from ratelimit_rls.errors import SettingsError
from ratelimit_rls.transport.grpc.certificates import TlsFiles
from ratelimit_rls.transport.grpc.drain import until_none
from ratelimit_rls.transport.listen import listening_socket

HANDSHAKE_TIMEOUT_S = 10.0
SHUTDOWN_TIMEOUT_S = 1.0
ACCEPT_PAUSE_S = 0.1
LOOK_EVERY_S = 1.0
"""At the files. A look is three stat calls, and sees links swapped on a mounted volume, which notifications may not."""

_log = logging.getLogger(__name__)


class TlsListener:
    def __init__(self, files: TlsFiles) -> None:
        """Raises SettingsError if the files cannot be used."""
        self._files = files
        self._state = files.state()
        self._context = files.context()
        self._listening: socket.socket | None = None
        self._unix_path = ""
        self._behind = ""
        self._tasks: set[asyncio.Task[None]] = set()
        self._connections: set[asyncio.Transport] = set()

    async def start(self, target: str, behind: Path, *, reuse_port: bool = False) -> int:
        """Listen on host:port or unix:path for the server on the socket `behind`; returns the port."""
        self._listening = listening_socket(target, reuse_port=reuse_port)
        self._behind = str(behind)
        self._run(self._accept(self._listening))
        self._run(self._watch())
        if target.startswith("unix:"):
            self._unix_path = target.removeprefix("unix:")
            return 0
        return int(self._listening.getsockname()[1])

    async def close(self) -> None:
        """To be called when the server behind is closed: what it wrote is still delivered, then everything is cut."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listening is not None:
            self._listening.close()
        if self._unix_path:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._unix_path)
        await until_none(lambda: len(self._connections), SHUTDOWN_TIMEOUT_S)
        for connection in list(self._connections):
            connection.abort()

    def _run(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(listening)
            except OSError as error:  # no more file descriptors, or a client that left at once
                _log.warning("a TLS connection could not be accepted: %s", error)
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            self._run(self._serve(client))

    async def _serve(self, client: socket.socket) -> None:
        """Shake hands, look at the client's names, and tie its connection to one of its own to the server."""
        loop = asyncio.get_running_loop()
        if client.family != socket.AF_UNIX:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        near = _End(self._connections)
        try:
            transport, _ = await loop.connect_accepted_socket(
                lambda: near,
                client,
                ssl=self._context,
                ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S,
                ssl_shutdown_timeout=SHUTDOWN_TIMEOUT_S,
            )
        except (OSError, TimeoutError) as error:
            _log.info("a TLS connection was refused: %s", str(error) or type(error).__name__)
            client.close()
            return
        certificate = transport.get_extra_info("peercert")
        if not self._files.admits(certificate):
            _log.info("a TLS client was refused: its certificate is made out to %s", certificate.get("subjectAltName"))
            transport.abort()
            return
        try:
            _, far = await loop.create_unix_connection(lambda: _End(self._connections, near), self._behind)
        except OSError as error:
            _log.error("the gRPC server behind TLS does not answer: %s", error)
            transport.abort()
            return
        near.tie(far)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            state = self._files.state()
            if state == self._state:
                continue
            self._state = state
            try:
                self._context = self._files.context()
            except SettingsError as error:
                _log.error("changed TLS files are not used, the ones before stay: %s", error)
            else:
                _log.info("TLS files reloaded; new connections use them")


class _End(asyncio.Protocol):
    """One end of a pipe: what it receives, the other end sends. An end made without another is read once it is tied."""

    def __init__(self, connections: set[asyncio.Transport], other: _End | None = None) -> None:
        self._connections = connections
        self._transport: asyncio.Transport
        self._other = other._transport if other else None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are not instances of it
        self._connections.add(self._transport)
        if self._other is None:
            self._transport.pause_reading()

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
        self._connections.discard(self._transport)
        if self._other is not None:
            self._other.close()
