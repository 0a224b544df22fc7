"""HTTP server: serves an ASGI app with uvicorn in the existing event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from ratelimit_rls.telemetry.abuse import AbuseLog
from ratelimit_rls.transport.http.connection import HttpConnection, HttpPort
from ratelimit_rls.transport.http.limits import BufferBudget, HttpLimits
from ratelimit_rls.transport.http.loop_share import LoopShare
from ratelimit_rls.transport.http.tls import HttpTlsFiles
from ratelimit_rls.transport.sockets import LISTEN_BACKLOG, host_port, listening_socket
from ratelimit_rls.transport.tls_listener import TlsListener

GRACE_S = 2
DATE_S = 1.0
"""Maximum age of the Date header of responses."""


class HttpServer:
    """One HTTP port."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        limits: HttpLimits | None = None,
        abuse: AbuseLog | None = None,
        buffer_budget: BufferBudget | None = None,
        share: LoopShare | None = None,
        tls: HttpTlsFiles | None = None,
    ) -> None:
        """Create a server that is not listening yet. `buffer_budget` and `share` may be shared with other ports."""
        self._app = app
        self._port = HttpPort(
            limits or HttpLimits(), abuse or AbuseLog(), buffer_budget or BufferBudget(), share or LoopShare()
        )
        self._tls = tls
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self.port = 0  # once started; 0 on a Unix socket
        self.target = ""  # once started: host:port, [IPv6 address]:port or unix:/path

    async def start(
        self,
        host: str,
        port: int,
        *,
        unix_socket: str = "",
        socket_mode: int | None = None,
        reuse_port: bool = False,
    ) -> None:
        """Listen on a port (the kernel chooses one for 0), or instead on a Unix socket, without TLS.

        Raises SettingsError if the address or the TLS files cannot be used.
        """
        tls = TlsListener(self._tls, self._port.abuse) if self._tls is not None and not unix_socket else None
        if unix_socket:
            self.target = f"unix:{unix_socket}"
            listening = listening_socket(self.target)
            if socket_mode is not None:
                os.chmod(unix_socket, socket_mode)
        else:
            listening = listening_socket(host_port(host, port), reuse_port=reuse_port)
            self.port = listening.getsockname()[1]
            self.target = host_port(host, self.port)
        config = uvicorn.Config(
            self._app,
            http=HttpConnection,
            lifespan="off",
            ws="none",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=GRACE_S,
        )
        config.timeout_keep_alive = self._port.limits.keep_alive_s  # type: ignore[assignment]  # an int in uvicorn
        self._server = _Server(config, self._port, tls)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]))
        await self._server.up.wait()

    async def stop(self) -> None:
        """Finish requests in progress within GRACE_S, and close."""
        if self._server is not None and self._serving is not None:
            self._server.request_exit()
            await self._serving


class _Server(uvicorn.Server):
    """Embedded uvicorn: it handles no signals, and waits for an event instead of polling ten times a second."""

    def __init__(self, config: uvicorn.Config, port: HttpPort, tls: TlsListener | None) -> None:
        super().__init__(config)
        self.up = asyncio.Event()
        self._exit_requested = asyncio.Event()
        self._port = port
        self._tls = tls

    def request_exit(self) -> None:
        self.should_exit = True
        self._exit_requested.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets is not None
        self.servers = []
        for listening in sockets:
            if self._tls is not None:
                self._tls.start(listening, self._new_connection)
            else:
                loop = asyncio.get_running_loop()
                self.servers.append(
                    await loop.create_server(self._new_connection, sock=listening, backlog=LISTEN_BACKLOG)
                )
        self.started = True
        self.up.set()

    def _new_connection(self) -> HttpConnection:
        return HttpConnection(self.config, self.server_state, self._port)

    async def main_loop(self) -> None:
        loop = asyncio.get_running_loop()
        while not await self.on_tick(0):
            now_s = loop.time()
            for connection in tuple(self.server_state.connections):
                if isinstance(connection, HttpConnection):
                    connection.tick(now_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._exit_requested.wait(), min(DATE_S, self._port.limits.tick_s))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._tls is not None:
            await self._tls.close()
        if self.server_state.connections or self.server_state.tasks:
            await super().shutdown(sockets)
            return
        # Without connections there is nothing to wait for, but uvicorn would wait for a tenth of a second.
        for listening in (*self.servers, *(sockets or ())):
            listening.close()
