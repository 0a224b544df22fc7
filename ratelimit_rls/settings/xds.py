"""Variables for rules over xDS, with their parsers."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from pydantic import BaseModel, Field

from ratelimit_rls.settings.parse import Bool, Count, Duration, Float, TextMap

XDS = "GRPC_XDS_SOTW"
"""Value of CONFIG_TYPE that selects xDS."""

MAX_MESSAGE_BYTES = 2**31 - 1
"""Maximum message size: gRPC uses a signed 32-bit integer."""

_SECONDS = timedelta(seconds=1)


class XdsSettings(BaseModel):
    """Rules over xDS"""

    config_grpc_xds_node_id: str = Field("default", description="node.id sent to the xDS server.")
    config_grpc_xds_node_metadata: str = Field("", description="key=value,… sent as node.metadata.")
    config_grpc_xds_server_url: str = Field("localhost:18000", description="host:port of the xDS server, or unix:path.")
    config_grpc_xds_server_connect_retry_interval: Duration = Field(
        3 * _SECONDS, description="Maximum wait between attempts until the first configuration arrives."
    )
    config_grpc_xds_client_additional_headers: TextMap = Field(
        {}, repr=False, description="key:value,… sent as gRPC metadata; treated as secrets."
    )
    config_grpc_xds_server_use_tls: Bool = Field(False, description="Use TLS to the xDS server.")
    config_grpc_xds_client_tls_cert: str = Field(
        "", description="File with the client certificate (PEM) for the xDS server; reloaded."
    )
    config_grpc_xds_client_tls_key: str = Field("", description="File with the client's private key (PEM); reloaded.")
    config_grpc_xds_server_tls_cacert: str = Field(
        "", description="File with the only CA (PEM) to trust; empty: the default CAs; reloaded."
    )
    config_grpc_xds_server_tls_san: str = Field(
        "", description="Expected name in the server's certificate; empty: the host."
    )
    xds_client_backoff_initial_interval: Duration = Field(
        10 * _SECONDS, description="First wait after a stream failed."
    )
    xds_client_backoff_max_interval: Duration = Field(60 * _SECONDS, description="Maximum wait after a stream failed.")
    xds_client_backoff_random_factor: Float = Field(
        0.5, ge=0, description="Factor by which the wait grows after each failure; values up to 1 mean 2."
    )
    xds_client_backoff_jitter: Bool = Field(True, description="Shorten each wait at random, by up to a half.")
    xds_client_max_msg_size_in_bytes: Count = Field(
        0, le=MAX_MESSAGE_BYTES, description="Maximum response size; 0: 4 MiB."
    )
    rls_xds_keepalive: Duration = Field(
        310 * _SECONDS,
        gt=_SECONDS,
        le=timedelta(days=1),
        description="Interval of keepalive pings; many servers disconnect clients below 5m.",
    )


def node_metadata(text: str) -> Mapping[str, str]:
    """Parse node.metadata. Raises ValueError with the end of a sentence."""
    pairs = [pair.partition("=") for pair in text.split(",")] if text.strip() else []
    if any(not key.strip() or not equals for key, equals, _ in pairs):
        raise ValueError("is not a map; use key=value,key=value")
    return {key.strip(): value.strip() for key, _, value in pairs}


def grpc_metadata(headers: Mapping[str, str]) -> tuple[tuple[str, str | bytes], ...]:
    """Return headers as gRPC metadata: lower-case names, and bytes for names that end in -bin."""
    lower = ((name.strip().lower(), value) for name, value in headers.items())
    return tuple((name, value.encode() if name.endswith("-bin") else value) for name, value in lower)
