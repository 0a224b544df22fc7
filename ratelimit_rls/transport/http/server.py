"""An ASGI app on a port, served by uvicorn inside our own loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette

from ratelimit_rls.transport.listen import listening_socket

GRACE_S = 2


class HttpServer:
    def __init__(self, app: Starlette) -> None:
        self._app = app
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self.port = 0  # once started

    async def start(self, host: str, port: int, *, reuse_port: bool = False) -> None:
        """Raises SettingsError if the address cannot be used; port 0 lets the kernel choose."""
        target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        listening = listening_socket(target, reuse_port=reuse_port)
        self.port = listening.getsockname()[1]
        self._server = _Server(
            uvicorn.Config(
                self._app,
                lifespan="off",
                ws="none",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=GRACE_S,
            )
        )
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]))
        await self._server.up.wait()

    async def stop(self) -> None:
        """Finish what was begun, within a bound, and close."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving


class _Server(uvicorn.Server):
    """uvicorn as a guest: signals are the host's affair."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()
