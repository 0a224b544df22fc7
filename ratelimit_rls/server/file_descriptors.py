"""File descriptor limit: raised as far as the system allows, and connection limits that fit into it.

Without a free descriptor a connection cannot even be rejected: it waits in the kernel, and so does every other client.
"""

from __future__ import annotations

import resource
from contextlib import suppress

import structlog

from ratelimit_rls.settings import Settings
from ratelimit_rls.transport.tls_listener import MAX_HANDSHAKES

MARGIN = 64
"""Descriptors for listening sockets, the store, the database, files, the event loop and connections being rejected."""

_log = structlog.get_logger()


def raise_limit() -> int:
    """Raise the soft limit of this process to the hard one, and return the limit in force."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # some systems do not allow what they state
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def fit_connections(settings: Settings, limit: int) -> Settings:
    """Return the settings with connection limits that fit into `limit` descriptors. Log a warning if they did not fit.

    The limits of the HTTP ports are unchanged while gRPC has at least half of the descriptors.
    """
    if limit == resource.RLIM_INFINITY:
        return settings
    http_ports = 2 + (settings.stats_sink == "prometheus") + bool(settings.rls_database_url.get_secret_value())
    handshakes = MAX_HANDSHAKES * (settings.grpc_server_use_tls + http_ports * settings.rls_http_tls)
    grpc, http = settings.rls_grpc_max_connections, settings.rls_http_max_connections
    usable = max(limit - MARGIN - handshakes, 1 + http_ports)
    needed = grpc + http_ports * http + handshakes + MARGIN
    if grpc and http and needed <= limit:
        return settings
    max_grpc = max(usable - http_ports * http, usable // 2) if http else usable // 2
    fitting_grpc = min(grpc, max_grpc) if grpc else max_grpc
    max_http = (usable - fitting_grpc) // http_ports
    fitting_http = max(min(http, max_http) if http else max_http, 1)
    if fitting_grpc < grpc or fitting_http < http:  # 0 means as many as possible: no warning
        _log.warning(
            "file_descriptor_limit_low",
            limit=limit,
            needed=needed,
            grpc_max_connections=fitting_grpc,
            http_max_connections=fitting_http,
        )
    return settings.model_copy(
        update={"rls_grpc_max_connections": fitting_grpc, "rls_http_max_connections": fitting_http}
    )
