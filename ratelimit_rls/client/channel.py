"""How a connection to the service is made."""

from __future__ import annotations

from dataclasses import dataclass, field

import grpc

OPTIONS: tuple[tuple[str, int | str], ...] = (
    # A service that comes back is found within a second; gRPC alone would wait for up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # What was sent may have been counted, so only what never left is sent again.
    ("grpc.enable_retries", 0),
    ("grpc.service_config_disable_resolution", 1),
)

DEFAULT_TIMEOUT_S = 0.25
"""For an answer: long for a service nearby, and short for whoever waits behind it."""


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM, as bytes. Without `ca`, the machine's own authorities are believed."""

    ca: bytes | None = None
    certificate: bytes | None = None  # ours, where the service asks for one
    key: bytes | None = field(default=None, repr=False)
    server_name: str = ""  # in the service's certificate, if it is not the target's host


def credentials(tls: Tls) -> grpc.ChannelCredentials:
    if (tls.certificate is None) != (tls.key is None):
        raise ValueError("tls has a certificate without its key, or a key without its certificate; give both")
    return grpc.ssl_channel_credentials(tls.ca, tls.key, tls.certificate)


def options(tls: Tls | None) -> tuple[tuple[str, int | str], ...]:
    if tls is not None and tls.server_name:
        return (*OPTIONS, ("grpc.ssl_target_name_override", tls.server_name))
    return OPTIONS
