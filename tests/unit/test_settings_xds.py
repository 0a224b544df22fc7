"""Settings of rules over xDS: parsing, errors and warnings."""

from __future__ import annotations

import pytest

from ratelimit_rls.errors import SettingsError
from ratelimit_rls.settings.xds import grpc_metadata, node_metadata
from tests.unit.conftest import Read

XDS = {"CONFIG_TYPE": "GRPC_XDS_SOTW"}
HEADERS = "CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS"


@pytest.mark.parametrize(
    "url",
    [
        "localhost:18000",
        "envoy-gateway:18001",
        "10.0.0.1:1",
        "[::1]:18000",
        "dns:///gateway.svc:18001",
        "unix:/run/xds.s",
    ],
)
def test_valid_server_addresses(read: Read, url: str) -> None:
    assert read(**XDS, CONFIG_GRPC_XDS_SERVER_URL=url).warnings() == []


@pytest.mark.parametrize(
    "url", ["", "gateway", "gateway:", ":18000", "gateway:0", "gateway:70000", "http://gateway:18000", "a b:1"]
)
def test_invalid_server_address(read: Read, url: str) -> None:
    with pytest.raises(SettingsError) as raised:
        read(**XDS, CONFIG_GRPC_XDS_SERVER_URL=url)
    assert str(raised.value).startswith(f"CONFIG_GRPC_XDS_SERVER_URL={url!r} is not an address; use host:port")


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({"CONFIG_GRPC_XDS_CLIENT_TLS_CERT": "c"}, "_TLS_CERT is set without CONFIG_GRPC_XDS_CLIENT_TLS_KEY"),
        ({"CONFIG_GRPC_XDS_CLIENT_TLS_KEY": "k"}, "_TLS_KEY is set without CONFIG_GRPC_XDS_CLIENT_TLS_CERT"),
        ({"CONFIG_GRPC_XDS_NODE_METADATA": "a:b"}, "CONFIG_GRPC_XDS_NODE_METADATA='a:b' is not a map; use key=value"),
        ({"CONFIG_GRPC_XDS_NODE_METADATA": "a=b,=c"}, "is not a map; use key=value"),
        ({HEADERS: "x y:hush"}, f"{HEADERS} has an invalid name of gRPC metadata"),
        ({HEADERS: "grpc-timeout:hush"}, f"{HEADERS} has an invalid name of gRPC metadata"),
        ({HEADERS: "a:hush\n"}, f"{HEADERS}: the value of 'a' is not printable ASCII"),
        ({"XDS_CLIENT_BACKOFF_RANDOM_FACTOR": "-1"}, "XDS_CLIENT_BACKOFF_RANDOM_FACTOR='-1' is too small"),
        ({"XDS_CLIENT_MAX_MSG_SIZE_IN_BYTES": "2147483648"}, "is too large; it must be ≤ 2147483647"),
        ({"RLS_XDS_KEEPALIVE": "0"}, "RLS_XDS_KEEPALIVE='0' is too small"),
    ],
)
def test_invalid_xds_settings_are_rejected(read: Read, environ: dict[str, str], sentence: str) -> None:
    with pytest.raises(SettingsError) as raised:
        read(**XDS, **environ)
    assert sentence in str(raised.value)
    assert "hush" not in str(raised.value)


def test_certificate_without_key_is_rejected_for_any_source(read: Read) -> None:
    with pytest.raises(SettingsError, match="set both or neither"):
        read(CONFIG_GRPC_XDS_CLIENT_TLS_CERT="c")


def test_tls_files_need_not_exist(read: Read) -> None:
    files = {"CONFIG_GRPC_XDS_CLIENT_TLS_CERT": "/no/c", "CONFIG_GRPC_XDS_CLIENT_TLS_KEY": "/no/k"}
    assert read(**XDS, **files, CONFIG_GRPC_XDS_SERVER_USE_TLS="true").warnings() == []


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({"RLS_RULES": "rules/"}, "RLS_RULES has no effect with CONFIG_TYPE=GRPC_XDS_SOTW"),
        ({"CONFIG_GRPC_XDS_SERVER_TLS_CACERT": "/ca"}, "has no effect without CONFIG_GRPC_XDS_SERVER_USE_TLS=true"),
        ({"CONFIG_GRPC_XDS_SERVER_TLS_SAN": "x"}, "has no effect without CONFIG_GRPC_XDS_SERVER_USE_TLS=true"),
    ],
)
def test_unused_xds_settings_warn(read: Read, environ: dict[str, str], sentence: str) -> None:
    (warning,) = read(**XDS, **environ).warnings()
    assert sentence in warning


def test_node_metadata() -> None:
    assert node_metadata("") == {}
    assert node_metadata(" zone = b ,x=a=b,empty=") == {"zone": "b", "x": "a=b", "empty": ""}


def test_headers_as_grpc_metadata() -> None:
    assert grpc_metadata({"Authorization": "Bearer x", "Trace-Bin": "y"}) == (
        ("authorization", "Bearer x"),
        ("trace-bin", b"y"),
    )
