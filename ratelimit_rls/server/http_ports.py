"""The HTTP ports of a process, with their limits, TLS and access control."""

from __future__ import annotations

import socket
from dataclasses import replace

from starlette.types import ASGIApp

from ratelimit_rls.settings import Settings
from ratelimit_rls.telemetry.abuse import AbuseLog
from ratelimit_rls.tls.certificates import TlsFiles
from ratelimit_rls.transport.http.guard import HEALTH_PATHS, Guard
from ratelimit_rls.transport.http.hosts import AllowedHosts
from ratelimit_rls.transport.http.limits import BufferBudget, HttpLimits
from ratelimit_rls.transport.http.loop_share import LoopShare
from ratelimit_rls.transport.http.server import HttpServer
from ratelimit_rls.transport.http.tls import HttpTlsFiles
from ratelimit_rls.transport.http.tokens import BearerToken

_NO_JSON = (
    "/json is disabled by RLS_HTTP_JSON, or because gRPC requires client certificates and this port does not; "
    "RLS_HTTP_JSON=on enables it\n"
)


class HttpPorts:
    def __init__(self, settings: Settings, grpc_tls: TlsFiles, abuse: AbuseLog) -> None:
        """Read the configuration shared by all ports. Raises SettingsError if the token file is unusable."""
        self._settings = settings
        self._abuse = abuse
        self._buffer_budget = BufferBudget()
        self._share = LoopShare()
        self._limits = HttpLimits(
            max_connections=settings.rls_http_max_connections,
            max_connections_per_peer=settings.rls_http_max_connections_per_peer,
        )
        self._tls = _tls(settings, grpc_tls) if settings.rls_http_tls else None
        self._token: BearerToken | None = None
        if settings.has_http_token:
            self._token = BearerToken(settings.rls_http_token.get_secret_value(), settings.rls_http_token_file)

    def json(self, app: ASGIApp) -> HttpServer:
        """Return the server of /json and the health endpoints."""
        settings = self._settings
        closed_paths = {} if settings.serves_json else {"/json": _NO_JSON}
        guard = self._guard(app, settings.host, bool(settings.rls_http_uds), HEALTH_PATHS, closed_paths)
        return self._server(guard)

    def debug(self, app: ASGIApp) -> HttpServer:
        return self._server(self._guard(app, self._settings.debug_host, bool(self._settings.rls_debug_uds)))

    def metrics(self, app: ASGIApp) -> HttpServer:
        host, _ = self._settings.prometheus_listen
        return self._server(self._guard(app, host))

    def admin(self, app: ASGIApp) -> HttpServer:
        """Return the server of the admin API, which has its own tokens and checks origins and hosts itself."""
        return self._server(app)

    def _guard(
        self,
        app: ASGIApp,
        own_name: str,
        is_unix_socket: bool = False,
        open_paths: frozenset[str] = frozenset(),
        closed_paths: dict[str, str] | None = None,
    ) -> Guard:
        if is_unix_socket:  # file permissions control access
            return Guard(app, self._abuse, open_paths=open_paths, closed_paths=closed_paths)
        return Guard(
            app,
            self._abuse,
            hosts=AllowedHosts((*self._settings.rls_http_allowed_hosts, socket.gethostname(), own_name)),
            token=self._token,
            client_certificates=self._settings.rls_http_client_cert,
            open_paths=open_paths,
            closed_paths=closed_paths,
        )

    def _server(self, app: ASGIApp) -> HttpServer:
        return HttpServer(
            app,
            limits=self._limits,
            abuse=self._abuse,
            buffer_budget=self._buffer_budget,
            share=self._share,
            tls=self._tls,
        )


def _tls(settings: Settings, grpc_tls: TlsFiles) -> HttpTlsFiles:
    if not settings.rls_http_client_cert:
        grpc_tls = replace(grpc_tls, client_ca="", client_names=(), crl="")
    return HttpTlsFiles.from_files(grpc_tls)
