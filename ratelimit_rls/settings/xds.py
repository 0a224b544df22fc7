"""Rules over xDS: the variables, and what their texts mean."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from pydantic import BaseModel, Field

from ratelimit_rls.settings.parse import Bool, Count, Duration, Float, TextMap

if TYPE_CHECKING:
    from ratelimit_rls.settings import Settings

XDS = "GRPC_XDS_SOTW"
"""As CONFIG_TYPE."""

MOST_MESSAGE_BYTES = 2**31 - 1
"""gRPC counts them in 32 bits."""

_SECONDS = timedelta(seconds=1)

_HOST_AND_PORT = re.compile(r"(?:dns:///|dns:)?(\[[0-9A-Fa-f:.%a-z]+\]|[^\s/:\[\]@]+):([0-9]{1,5})")
_UNIX = re.compile(r"unix:\S+")
_HEADER_NAME = re.compile(r"(?!grpc-)[0-9a-z_.-]+")
_HEADER_VALUE = re.compile(r"[ -~]*")


class XdsSettings(BaseModel):
    """Rules over xDS"""

    config_grpc_xds_node_id: str = Field("default", description="Who we say we are: node.id.")
    config_grpc_xds_node_metadata: str = Field("", description="key=value,… said beside it: node.metadata.")
    config_grpc_xds_server_url: str = Field("localhost:18000", description="host:port of the xDS server, or unix:path.")
    config_grpc_xds_server_connect_retry_interval: Duration = Field(
        3 * _SECONDS, description="Longest wait between two attempts while no configuration has come yet."
    )
    config_grpc_xds_client_additional_headers: TextMap = Field(
        {}, repr=False, description="key:value,… sent as gRPC metadata; taken for secrets."
    )
    config_grpc_xds_server_use_tls: Bool = Field(False, description="TLS to the xDS server.")
    config_grpc_xds_client_tls_cert: str = Field(
        "", description="File with the certificate (PEM) shown to it; reloaded."
    )
    config_grpc_xds_client_tls_key: str = Field("", description="File with its private key (PEM); reloaded.")
    config_grpc_xds_server_tls_cacert: str = Field(
        "", description="File with the only CA (PEM) to trust; empty: the usual ones; reloaded."
    )
    config_grpc_xds_server_tls_san: str = Field("", description="Name to expect in its certificate; empty: the host's.")
    xds_client_backoff_initial_interval: Duration = Field(
        10 * _SECONDS, description="First wait after a stream that failed or was lost."
    )
    xds_client_backoff_max_interval: Duration = Field(60 * _SECONDS, description="Longest wait.")
    xds_client_backoff_random_factor: Float = Field(
        0.5, ge=0, description="By which the wait grows each time; 1 or less: it doubles."
    )
    xds_client_backoff_jitter: Bool = Field(True, description="Cut each wait by up to a half, at random.")
    xds_client_max_msg_size_in_bytes: Count = Field(0, le=MOST_MESSAGE_BYTES, description="Longest response; 0: 4 MiB.")
    rls_xds_keepalive: Duration = Field(
        310 * _SECONDS,
        gt=_SECONDS,
        le=timedelta(days=1),
        description="Between two pings, which show that the server is there; many cut off who pings within 5m.",
    )


def refusals(settings: Settings) -> Iterator[str]:
    """What cannot be used. Files are not looked at: they may come later."""
    certificate, key = settings.config_grpc_xds_client_tls_cert, settings.config_grpc_xds_client_tls_key
    if certificate and not key:
        yield "CONFIG_GRPC_XDS_CLIENT_TLS_CERT is given without CONFIG_GRPC_XDS_CLIENT_TLS_KEY; give both or neither"
    if key and not certificate:
        yield "CONFIG_GRPC_XDS_CLIENT_TLS_KEY is given without CONFIG_GRPC_XDS_CLIENT_TLS_CERT; give both or neither"
    if settings.config_type != XDS:
        return
    url = settings.config_grpc_xds_server_url
    if not _is_address(url):
        yield f"CONFIG_GRPC_XDS_SERVER_URL={url!r} is not an address; use host:port or unix:path"
    try:
        node_metadata(settings.config_grpc_xds_node_metadata)
    except ValueError as fault:
        yield f"CONFIG_GRPC_XDS_NODE_METADATA={settings.config_grpc_xds_node_metadata!r} {fault}"
    for name, value in settings.config_grpc_xds_client_additional_headers.items():
        if not _HEADER_NAME.fullmatch(name.strip().lower()):
            yield (
                "CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS has a name that gRPC metadata cannot have; "
                "use letters, digits and dashes, and nothing that starts with grpc-"
            )
        elif not _HEADER_VALUE.fullmatch(value):
            yield f"CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS: the value of {name!r} is not printable ASCII"


def warnings(settings: Settings) -> Iterator[str]:
    """What was said of a source of rules that is not used so."""
    if settings.config_type != XDS:
        return
    if settings.rls_rules:
        yield f"RLS_RULES has no effect with CONFIG_TYPE={XDS}: rules come from the xDS server"
    if not settings.config_grpc_xds_server_use_tls:
        for name in ("client_tls_cert", "server_tls_cacert", "server_tls_san"):
            if getattr(settings, f"config_grpc_xds_{name}"):
                yield f"CONFIG_GRPC_XDS_{name.upper()} has no effect without CONFIG_GRPC_XDS_SERVER_USE_TLS=true"


def node_metadata(text: str) -> Mapping[str, str]:
    """Raises ValueError with the end of a sentence."""
    pairs = [pair.partition("=") for pair in text.split(",")] if text.strip() else []
    if any(not key.strip() or not equals for key, equals, _ in pairs):
        raise ValueError("is not a map; use key=value,key=value")
    return {key.strip(): value.strip() for key, _, value in pairs}


def grpc_metadata(headers: Mapping[str, str]) -> tuple[tuple[str, str | bytes], ...]:
    """As gRPC takes it: names in lower case, and bytes where the name says so."""
    lower = ((name.strip().lower(), value) for name, value in headers.items())
    return tuple((name, value.encode() if name.endswith("-bin") else value) for name, value in lower)


def _is_address(text: str) -> bool:
    found = _HOST_AND_PORT.fullmatch(text)
    return 0 < int(found[2]) < 65_536 if found else _UNIX.fullmatch(text) is not None
