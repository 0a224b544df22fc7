"""Combinations of settings of the HTTP ports."""

from __future__ import annotations

import pytest

from ratelimit_rls.errors import SettingsError
from tests.unit.conftest import Read

TLS = {"GRPC_SERVER_TLS_CERT": "c", "GRPC_SERVER_TLS_KEY": "k"}
MUTUAL = {**TLS, "GRPC_SERVER_USE_TLS": "true", "GRPC_CLIENT_TLS_CACERT": "ca"}
TOKEN = {"RLS_HTTP_TOKEN": "a-token-of-twenty-letters"}


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({"RLS_HTTP_ALLOWED_HOSTS": "a.example,http://b.example"}, "has 'http://b.example', which is not a host name"),
        ({"RLS_HTTP_ALLOWED_HOSTS": "a.example:8080"}, "has 'a.example:8080', which is not a host name"),
        ({"RLS_HTTP_ALLOWED_HOSTS": "a.*"}, "which is not a host name"),
        ({"RLS_HTTP_TOKEN": "short"}, "RLS_HTTP_TOKEN is too short; it must have at least 20 characters"),
        ({**TOKEN, "RLS_HTTP_TOKEN_FILE": "f"}, "RLS_HTTP_TOKEN and RLS_HTTP_TOKEN_FILE are both set"),
        ({"RLS_HTTP_TLS": "true"}, "RLS_HTTP_TLS=true needs GRPC_SERVER_TLS_CERT and GRPC_SERVER_TLS_KEY"),
        (
            {**TLS, "RLS_HTTP_TLS": "1", "RLS_HTTP_CLIENT_CERT": "1"},
            "needs RLS_HTTP_TLS=true and GRPC_CLIENT_TLS_CACERT",
        ),
        ({**MUTUAL, "RLS_HTTP_CLIENT_CERT": "true"}, "RLS_HTTP_CLIENT_CERT=true needs RLS_HTTP_TLS=true"),
        ({"RLS_WORKERS": "2", "REDIS_URL": "r:1", "RLS_HTTP_UDS": "/s"}, "RLS_HTTP_UDS cannot be shared by several"),
        ({"RLS_WORKERS": "2", "REDIS_URL": "r:1", "RLS_DEBUG_UDS": "/s"}, "RLS_DEBUG_UDS cannot be shared by several"),
        ({"GRPC_UDS": "/s", "RLS_HTTP_UDS": "/s"}, "must be different sockets"),
        ({"RLS_HTTP_JSON": "yes"}, "RLS_HTTP_JSON='yes' is not a valid choice"),
    ],
)
def test_invalid_combination_is_rejected(read: Read, environ: dict[str, str], sentence: str) -> None:
    with pytest.raises(SettingsError) as raised:
        read(**environ)
    assert sentence in str(raised.value)
    assert "short" not in str(raised.value).replace("too short", "")


@pytest.mark.parametrize(
    ("environ", "is_served"),
    [
        ({}, True),
        ({**TLS, "GRPC_SERVER_USE_TLS": "true"}, True),
        (MUTUAL, False),
        ({**MUTUAL, "RLS_HTTP_JSON": "on"}, True),
        ({"RLS_HTTP_JSON": "off"}, False),
        ({**TOKEN, "RLS_HTTP_JSON": "off"}, False),
        ({**MUTUAL, **TOKEN}, True),
        ({**MUTUAL, "RLS_HTTP_TOKEN_FILE": "f"}, True),
        ({**MUTUAL, "RLS_HTTP_UDS": "/s"}, True),
        ({**MUTUAL, "RLS_HTTP_TLS": "true"}, False),
        ({**MUTUAL, "RLS_HTTP_TLS": "true", "RLS_HTTP_CLIENT_CERT": "true"}, True),
        # A CA without TLS on gRPC does not require client certificates.
        ({**MUTUAL, "GRPC_SERVER_USE_TLS": "false"}, True),
    ],
)
def test_json_is_off_if_only_grpc_requires_client_certificates(
    read: Read, environ: dict[str, str], is_served: bool
) -> None:
    settings = read(**environ)
    assert settings.serves_json is is_served
    is_automatic = "RLS_HTTP_JSON" not in environ
    assert any("/json is off" in warning for warning in settings.warnings()) is (is_automatic and not is_served)


def test_grpc_certificate_is_used_for_http_tls(read: Read) -> None:
    assert not read(**TLS, RLS_HTTP_TLS="true").warnings()
    assert read(**TLS).warnings() == ["GRPC_SERVER_TLS_CERT has no effect without GRPC_SERVER_USE_TLS=true"]
