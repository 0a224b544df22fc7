"""Access control of an HTTP port: rejects web pages of other origins and, if configured, requests without
credentials."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ratelimit_rls.telemetry.abuse import Abuse, AbuseLog
from ratelimit_rls.transport.http.connection import CLIENT_CERTIFICATE
from ratelimit_rls.transport.http.hosts import AllowedHosts, is_cross_origin
from ratelimit_rls.transport.http.tokens import BearerToken
from ratelimit_rls.transport.peers import UNIX

HEALTH_PATHS = frozenset({"/healthcheck", "/livez"})
"""Paths that are always open: probes use any host name and have no credentials."""


class Guard:
    """ASGI middleware. If a token or client certificates are configured, a request needs one of them."""

    def __init__(
        self,
        app: ASGIApp,
        abuse: AbuseLog,
        *,
        hosts: AllowedHosts | None = None,
        token: BearerToken | None = None,
        client_certificates: bool = False,
        open_paths: frozenset[str] = frozenset(),
        closed_paths: Mapping[str, str] | None = None,
    ) -> None:
        """Wrap `app`.

        `hosts` is checked only if no credentials are required, because a malicious page has none. `closed_paths` maps
        paths that are rejected to the text of the response.
        """
        self._app = app
        self._abuse = abuse
        self._hosts = hosts
        self._token = token
        self._client_certificates = client_certificates
        self._open_paths = open_paths
        self._closed_paths = closed_paths or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            rejected = self._rejection(scope)
            if rejected is not None:
                reason, response = rejected
                self._abuse.record(reason, scope_peer(scope))
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _rejection(self, scope: Scope) -> tuple[Abuse, Response] | None:
        fields = scope["headers"]
        if is_cross_origin(fields):
            return Abuse.CROSS_ORIGIN, PlainTextResponse("pages of other origins may not use this port\n", 403)
        if scope["path"] in self._closed_paths:
            return Abuse.UNAUTHENTICATED, PlainTextResponse(self._closed_paths[scope["path"]], 403)
        if self._token is not None or self._client_certificates:
            return None if self._has_credentials(scope) else (Abuse.UNAUTHENTICATED, self._challenge())
        if self._hosts is not None and not self._hosts.allow(fields):
            text = "the Host header of this request is not allowed; add it to RLS_HTTP_ALLOWED_HOSTS\n"
            return Abuse.UNKNOWN_HOST, PlainTextResponse(text, 421)
        return None

    def _has_credentials(self, scope: Scope) -> bool:
        if self._client_certificates and scope.get("state", {}).get(CLIENT_CERTIFICATE):
            return True
        return self._token is not None and self._token.authorizes(scope["headers"])

    def _challenge(self) -> Response:
        if self._token is None:
            return PlainTextResponse("this needs a client certificate\n", 403)
        text = "this needs a token: Authorization: Bearer …\n"
        return PlainTextResponse(text, 401, {"WWW-Authenticate": 'Bearer realm="ratelimit-rls"'})


def scope_peer(scope: Scope) -> str:
    client = scope.get("client")
    return str(client[0]) if client else UNIX
