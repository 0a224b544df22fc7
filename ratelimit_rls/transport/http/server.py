"""An ASGI app on a port, served by uvicorn inside our own loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette

from ratelimit_rls.transport.listen import host_port, listening_socket

GRACE_S = 2
TICK_S = 1.0
"""How often the date that answers carry is written anew."""


class HttpServer:
    def __init__(self, app: Starlette) -> None:
        self._app = app
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self.port = 0  # once started

    async def start(self, host: str, port: int, *, reuse_port: bool = False) -> None:
        """Raises SettingsError if the address cannot be used; port 0 lets the kernel choose."""
        listening = listening_socket(host_port(host, port), reuse_port=reuse_port)
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
            self._server.leave()
            await self._serving


class _Server(uvicorn.Server):
    """uvicorn as a guest: signals are the host's affair, and what it would look for ten times a second, it is told."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()
        self._leaving = asyncio.Event()

    def leave(self) -> None:
        self.should_exit = True
        self._leaving.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._leaving.wait(), TICK_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.server_state.connections or self.server_state.tasks:
            await super().shutdown(sockets)
            return
        # There is nobody to wait for, and uvicorn would wait a tenth of a second all the same.
        for listening in (*self.servers, *(sockets or ())):
            listening.close()
