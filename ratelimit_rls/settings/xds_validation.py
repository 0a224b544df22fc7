"""Validation of the settings of rules over xDS."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ratelimit_rls.settings.values import SettingsValues
from ratelimit_rls.settings.xds import XDS, node_metadata

_HOST_AND_PORT = re.compile(r"(?:dns:///|dns:)?(\[[0-9A-Fa-f:.%a-z]+\]|[^\s/:\[\]@]+):([0-9]{1,5})")
_UNIX = re.compile(r"unix:\S+")
_HEADER_NAME = re.compile(r"(?!grpc-)[0-9a-z_.-]+")
_HEADER_VALUE = re.compile(r"[ -~]*")


def errors(settings: SettingsValues) -> Iterator[str]:
    """Yield errors in the settings. Files are not checked, since they may be created later."""
    certificate, key = settings.config_grpc_xds_client_tls_cert, settings.config_grpc_xds_client_tls_key
    if certificate and not key:
        yield "CONFIG_GRPC_XDS_CLIENT_TLS_CERT is set without CONFIG_GRPC_XDS_CLIENT_TLS_KEY; set both or neither"
    if key and not certificate:
        yield "CONFIG_GRPC_XDS_CLIENT_TLS_KEY is set without CONFIG_GRPC_XDS_CLIENT_TLS_CERT; set both or neither"
    if settings.config_type != XDS:
        return
    url = settings.config_grpc_xds_server_url
    if not _is_address(url):
        yield f"CONFIG_GRPC_XDS_SERVER_URL={url!r} is not an address; use host:port or unix:path"
    try:
        node_metadata(settings.config_grpc_xds_node_metadata)
    except ValueError as error:
        yield f"CONFIG_GRPC_XDS_NODE_METADATA={settings.config_grpc_xds_node_metadata!r} {error}"
    for name, value in settings.config_grpc_xds_client_additional_headers.items():
        if not _HEADER_NAME.fullmatch(name.strip().lower()):
            yield (
                "CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS has an invalid name of gRPC metadata; "
                "use letters, digits and dashes, without the prefix grpc-"
            )
        elif not _HEADER_VALUE.fullmatch(value):
            yield f"CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS: the value of {name!r} is not printable ASCII"


def warnings(settings: SettingsValues) -> Iterator[str]:
    """Yield warnings about settings of rules sources that have no effect."""
    if settings.config_type != XDS:
        return
    if settings.rls_rules:
        yield f"RLS_RULES has no effect with CONFIG_TYPE={XDS}: rules come from the xDS server"
    if not settings.config_grpc_xds_server_use_tls:
        for name in ("client_tls_cert", "server_tls_cacert", "server_tls_san"):
            if getattr(settings, f"config_grpc_xds_{name}"):
                yield f"CONFIG_GRPC_XDS_{name.upper()} has no effect without CONFIG_GRPC_XDS_SERVER_USE_TLS=true"


def _is_address(text: str) -> bool:
    found = _HOST_AND_PORT.fullmatch(text)
    return 0 < int(found[2]) < 65_536 if found else _UNIX.fullmatch(text) is not None
