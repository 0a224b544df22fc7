"""TLS before the gRPC port: connections are decrypted here, and handed on once their clients are let in.

A connection keeps the certificates it began with; the next one gets the newest. Nothing of a client reaches the
protocol behind before its certificate was accepted.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine
from typing import cast

from ratelimit_rls.errors import SettingsError
from ratelimit_rls.transport.grpc.certificates import TlsFiles

HANDSHAKE_TIMEOUT_S = 10.0
SHUTDOWN_TIMEOUT_S = 1.0
ACCEPT_PAUSE_S = 0.1
LOOK_EVERY_S = 1.0
"""At the files. A look is three stat calls, and sees links swapped on a mounted volume, which notifications may not."""

_log = logging.getLogger(__name__)

NewProtocol = Callable[[], asyncio.Protocol]


class TlsListener:
    def __init__(self, files: TlsFiles) -> None:
        """Raises SettingsError if the files cannot be used."""
        self._files = files
        self._state = files.state()
        self._context = files.context()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, listening: socket.socket, new_protocol: NewProtocol) -> None:
        """Accept clients on this socket from now on; each that is let in gets a protocol of its own."""
        self._run(self._accept(listening, new_protocol))
        self._run(self._watch())

    async def close(self) -> None:
        """Accept nobody any more. Who is connected stays so."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _run(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listening: socket.socket, new_protocol: NewProtocol) -> None:
        loop = asyncio.get_running_loop()
        with listening:
            while True:
                try:
                    client, _ = await loop.sock_accept(listening)
                except OSError as error:  # no more file descriptors, or a client that left at once
                    _log.warning("a TLS connection could not be accepted: %s", error)
                    await asyncio.sleep(ACCEPT_PAUSE_S)
                    continue
                self._run(self._serve(client, new_protocol))

    async def _serve(self, client: socket.socket, new_protocol: NewProtocol) -> None:
        """Shake hands; the rest is for whoever is behind the admission."""
        try:
            if client.family != socket.AF_UNIX:
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: _Admission(self._files, new_protocol),
                client,
                ssl=self._context,
                ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S,
                ssl_shutdown_timeout=SHUTDOWN_TIMEOUT_S,
            )
        except (OSError, TimeoutError) as error:
            _log.info("a TLS connection was refused: %s", str(error) or type(error).__name__)
            client.close()

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


class _Admission(asyncio.Protocol):
    """The protocol of a connection until its client's names were looked at, which is when it is made."""

    def __init__(self, files: TlsFiles, new_protocol: NewProtocol) -> None:
        self._files = files
        self._new_protocol = new_protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        secured = cast("asyncio.Transport", transport)  # uvloop's are not instances of it
        certificate = secured.get_extra_info("peercert")
        if not self._files.admits(certificate):
            _log.info("a TLS client was refused: its certificate is made out to %s", certificate.get("subjectAltName"))
            secured.abort()
            return
        protocol = self._new_protocol()
        secured.set_protocol(protocol)
        protocol.connection_made(secured)
