"""Connection options of the clients."""

from __future__ import annotations

from dataclasses import dataclass, field

import grpc

OPTIONS: tuple[tuple[str, int | str], ...] = (
    # Reconnect within a second; the default back-off of gRPC is up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # No retries: a request that was sent may have been counted.
    ("grpc.enable_retries", 0),
    ("grpc.service_config_disable_resolution", 1),
)

DEFAULT_TIMEOUT_S = 0.25
"""Default deadline of a call: long for a service nearby, short for a client that waits."""


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS credentials in PEM. Without `ca`, the CAs of the system are trusted."""

    ca: bytes | None = None
    certificate: bytes | None = None  # client certificate, if the service requires one
    key: bytes | None = field(default=None, repr=False)
    server_name: str = ""  # name in the service's certificate, if it is not the host of the target


def credentials(tls: Tls) -> grpc.ChannelCredentials:
    if (tls.certificate is None) != (tls.key is None):
        raise ValueError("tls.certificate and tls.key must be given together")
    return grpc.ssl_channel_credentials(tls.ca, tls.key, tls.certificate)


def options(tls: Tls | None) -> tuple[tuple[str, int | str], ...]:
    if tls is not None and tls.server_name:
        return (*OPTIONS, ("grpc.ssl_target_name_override", tls.server_name))
    return OPTIONS
