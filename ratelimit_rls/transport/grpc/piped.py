"""TLS for a transport that only takes connections it has accepted itself: bytes are piped to a Unix socket of it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ratelimit_rls.transport.grpc.certificates import TlsFiles
from ratelimit_rls.transport.grpc.pipe import Pipe
from ratelimit_rls.transport.grpc.tls import SHUTDOWN_TIMEOUT_S, TlsListener
from ratelimit_rls.transport.listen import listening_socket

if TYPE_CHECKING:
    from ratelimit_rls.transport.grpc.server import Transport


class PipedServer:
    def __init__(self, plain: Transport, tls: TlsFiles, directory: Path, *, reuse_port: bool) -> None:
        """Raises SettingsError if the files of TLS cannot be used."""
        self._plain = plain
        self._behind = directory / "grpc.sock"
        self._reuse_port = reuse_port
        self._tls = TlsListener(tls)
        self._pipe = Pipe(self._behind)
        self._unix_path = ""

    @property
    def in_flight(self) -> int:
        return self._plain.in_flight

    async def start(self, target: str) -> int:
        await self._plain.start(f"unix:{self._behind}")
        listening = listening_socket(target, reuse_port=self._reuse_port)
        self._tls.start(listening, self._pipe.new_end)
        if target.startswith("unix:"):
            self._unix_path = target.removeprefix("unix:")
            return 0
        return int(listening.getsockname()[1])

    async def drain(self, timeout_s: float) -> None:
        await self._plain.drain(timeout_s)

    async def close(self) -> None:
        await self._plain.close()
        await self._tls.close()
        if self._unix_path:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._unix_path)
        await self._pipe.close(SHUTDOWN_TIMEOUT_S)
