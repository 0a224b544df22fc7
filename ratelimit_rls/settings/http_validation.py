"""Validation of the settings of the HTTP ports."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ratelimit_rls.settings.values import SettingsValues

MIN_TOKEN_CHARACTERS = 20

_HOST = re.compile(r"\*|(\*\.)?[0-9a-z_-]+(\.[0-9a-z_-]+)*\.?", re.IGNORECASE)


def errors(settings: SettingsValues) -> Iterator[str]:
    for name in settings.rls_http_allowed_hosts:
        if not _HOST.fullmatch(name):
            yield (
                f"RLS_HTTP_ALLOWED_HOSTS has {name!r}, which is not a host name; use names without a port such as "
                "rls.example.com, *.example.com for all in a domain, or * for all"
            )
    token = settings.rls_http_token.get_secret_value()
    if token and settings.rls_http_token_file:
        yield "RLS_HTTP_TOKEN and RLS_HTTP_TOKEN_FILE are both set; set only one of them"
    if token and len(token) < MIN_TOKEN_CHARACTERS:
        yield f"RLS_HTTP_TOKEN is too short; it must have at least {MIN_TOKEN_CHARACTERS} characters"
    if settings.rls_http_tls and not (settings.grpc_server_tls_cert and settings.grpc_server_tls_key):
        yield "RLS_HTTP_TLS=true needs GRPC_SERVER_TLS_CERT and GRPC_SERVER_TLS_KEY"
    if settings.rls_http_client_cert and not (settings.rls_http_tls and settings.client_ca):
        yield "RLS_HTTP_CLIENT_CERT=true needs RLS_HTTP_TLS=true and GRPC_CLIENT_TLS_CACERT"
    for name in ("rls_http_uds", "rls_debug_uds"):
        if settings.rls_workers > 1 and getattr(settings, name):
            yield f"{name.upper()} cannot be shared by several processes; use a port, or RLS_WORKERS=1"
    sockets = [path for path in (settings.grpc_uds, settings.rls_http_uds, settings.rls_debug_uds) if path]
    if len(sockets) != len(set(sockets)):
        yield "GRPC_UDS, RLS_HTTP_UDS and RLS_DEBUG_UDS must be different sockets"


def warnings(settings: SettingsValues) -> Iterator[str]:
    if settings.rls_http_json == "auto" and not settings.serves_json:
        yield (
            "/json is off, since gRPC requires client certificates but the HTTP port requires no credentials; set "
            "RLS_HTTP_CLIENT_CERT, RLS_HTTP_TOKEN or RLS_HTTP_UDS, or RLS_HTTP_JSON=on"
        )
