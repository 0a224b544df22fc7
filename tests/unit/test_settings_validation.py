"""Errors and warnings about settings, without secrets; test_settings_redis.py has those about Redis."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest
import structlog

from ratelimit_rls.errors import SettingsError
from ratelimit_rls.telemetry import logs
from tests.unit.conftest import Read

REDIS = {"REDIS_URL": "localhost:6379"}


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        # unsupported features
        ({"USE_CALENDAR_MONTH_RATE_LIMIT": "1"}, "USE_CALENDAR_MONTH_RATE_LIMIT=true is not supported"),
        ({"BACKEND_TYPE": "memcache"}, "BACKEND_TYPE=memcache is not supported; use redis"),
        # errors of envoyproxy/ratelimit, with its sentences
        ({"BACKEND_TYPE": "disk"}, "Invalid setting for BackendType: disk"),
        ({"CONFIG_TYPE": "file"}, "Invalid setting for ConfigType: file"),
        ({"CONFIG_TYPE": ""}, "Invalid setting for ConfigType: "),
        ({"LOG_LEVEL": "loud"}, "Could not parse log level"),
        ({"LOG_LEVEL": ""}, "Could not parse log level"),
        ({"USE_STATSD": "true", "USE_PROMETHEUS": "true"}, "unable to use more than one stats sink at the same time."),
        ({"USE_DOG_STATSD": "1", "USE_PROMETHEUS": "1"}, "Set one of USE_DOG_STATSD, USE_STATSD, USE_PROMETHEUS."),
        (
            {"TRACING_ENABLED": "1", "TRACING_EXPORTER_PROTOCOL": "zipkin"},
            "Invalid otlptrace client protocol: zipkin",
        ),
        ({"RLS_REDIS_INFO_INTERVAL": "999ms"}, "RLS_REDIS_INFO_INTERVAL must be at least 1s, or 0s to switch it off"),
        ({"REDIS_CLUSTER_PIPELINE_PARALLELISM": "-1"}, "redis cluster pipeline parallelism must be >= 0"),
        ({"REDIS_POOL_ON_EMPTY_BEHAVIOR": "CREATE"}, "REDIS_POOL_ON_EMPTY_BEHAVIOR=CREATE is not supported"),
        ({"REDIS_PERSECOND_POOL_ON_EMPTY_BEHAVIOR": "error"}, "REDIS_PERSECOND_POOL_ON_EMPTY_BEHAVIOR=error is not"),
        # inconsistent combinations
        ({"GRPC_SERVER_TLS_CERT": "c"}, "GRPC_SERVER_TLS_CERT is set without GRPC_SERVER_TLS_KEY"),
        ({"GRPC_SERVER_TLS_KEY": "k"}, "GRPC_SERVER_TLS_KEY is set without GRPC_SERVER_TLS_CERT"),
        ({"GRPC_SERVER_USE_TLS": "true"}, "GRPC_SERVER_USE_TLS=true needs GRPC_SERVER_TLS_CERT and"),
        ({"GRPC_CLIENT_TLS_SAN": "envoy"}, "GRPC_CLIENT_TLS_SAN needs GRPC_CLIENT_TLS_CACERT"),
        ({"GRPC_SERVER_TLS_CRL": "crl"}, "GRPC_SERVER_TLS_CRL needs GRPC_CLIENT_TLS_CACERT"),
        (
            {"GRPC_CLIENT_TLS_SAN": "envoy,spiffe://td", "GRPC_CLIENT_TLS_CACERT": "ca"},
            "GRPC_CLIENT_TLS_SAN: 'spiffe://td' is not a SPIFFE ID; write spiffe://trust.domain/path",
        ),
        ({"GRPC_CLIENT_TLS_SAN": "https://td/x", "GRPC_CLIENT_TLS_CACERT": "ca"}, "'https://td/x' is not a SPIFFE ID"),
        ({**REDIS, "RLS_WORKERS": "2", "GRPC_UDS": "/s"}, "GRPC_UDS cannot be shared by several processes"),
        ({"RLS_WORKERS": "2"}, "RLS_WORKERS=2 needs REDIS_URL: the embedded store counts per process"),
        (
            {"RLS_REQUEST_ID_METADATA": "X-Request-Id"},
            "RLS_REQUEST_ID_METADATA='X-Request-Id' is not a valid name of gRPC metadata",
        ),
        ({"CACHE_KEY_PREFIX": "{all}:"}, "CACHE_KEY_PREFIX='{all}:' has a brace or a control character"),
        ({"CACHE_KEY_PREFIX": "a\nb"}, "CACHE_KEY_PREFIX='a\\nb' has a brace or a control character"),
    ],
)
def test_invalid_settings_are_rejected(read: Read, environ: dict[str, str], sentence: str) -> None:
    with pytest.raises(SettingsError) as raised:
        read(**environ)
    assert sentence in str(raised.value)


@pytest.mark.parametrize(
    "environ",
    [
        {"USE_STATSD": "false"},
        {"USE_STATSD": "true", "DISABLE_STATS": "true"},
        {"BACKEND_TYPE": ""},
        {"REDIS_TYPE": "single"},
        {"LOCAL_CACHE_SIZE_IN_BYTES": "1000"},
        {"RLS_REQUEST_ID_METADATA": "x-request-id", "RLS_REQUEST_ID_TTL": "1m"},
        {"LOG_LEVEL": "Trace"},
        {**REDIS, "RLS_WORKERS": "4"},
        {"GRPC_SERVER_USE_TLS": "true", "GRPC_SERVER_TLS_CERT": "/a/c", "GRPC_SERVER_TLS_KEY": "/b/k"},
        {"CONFIG_GRPC_XDS_SERVER_URL": "gateway:18001", "STATSD_PORT": "9125", "TRACING_EXPORTER_PROTOCOL": "zipkin"},
    ],
)
def test_valid_settings_do_not_warn(read: Read, environ: dict[str, str]) -> None:
    assert read(**environ).warnings() == []


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({"REDIS_POOL_SIZE": "10"}, "REDIS_POOL_SIZE has no effect"),
        ({"REDIS_POOL_ON_EMPTY_BEHAVIOR": "WAIT"}, "REDIS_POOL_ON_EMPTY_BEHAVIOR has no effect"),
        ({"REDIS_POOL_ON_EMPTY_WAIT_DURATION": "1s"}, "REDIS_POOL_ON_EMPTY_WAIT_DURATION has no effect"),
        ({"REDIS_PIPELINE_WINDOW": "150us"}, "REDIS_PIPELINE_WINDOW has no effect"),
        ({"REDIS_PIPELINE_LIMIT": "8"}, "REDIS_PIPELINE_LIMIT has no effect"),
        ({"REDIS_CLUSTER_PIPELINE_PARALLELISM": "0"}, "REDIS_CLUSTER_PIPELINE_PARALLELISM has no effect"),
        ({"REDIS_PERSECOND_POOL_SIZE": "10"}, "REDIS_PERSECOND_POOL_SIZE has no effect"),
        (
            {"LOCAL_CACHE_SIZE_IN_BYTES": "1000", "RLS_DENIAL_CACHE_BYTES": "9"},
            "RLS_DENIAL_CACHE_BYTES has no effect: LOCAL_CACHE_SIZE_IN_BYTES",
        ),
        ({"RLS_REQUEST_ID_TTL": "1m"}, "RLS_REQUEST_ID_TTL has no effect without RLS_REQUEST_ID_ENTRY"),
        ({"LOG_FORMAT": "xml"}, "LOG_FORMAT='xml' is neither text nor json; text is used"),
        ({"GRPC_CLIENT_TLS_CACERT": "ca"}, "GRPC_CLIENT_TLS_CACERT has no effect without GRPC_SERVER_USE_TLS=true"),
        ({"RLS_WORKER": "4"}, "RLS_WORKER is not a setting; did you mean RLS_WORKERS?"),
    ],
)
def test_ineffective_settings_warn(read: Read, environ: dict[str, str], sentence: str) -> None:
    (warning,) = read(**environ).warnings()
    assert sentence in warning


def test_kubernetes_service_variables_do_not_warn(read: Read) -> None:
    names = ("RLS_SERVICE_HOST", "RLS_SERVICE_PORT", "RLS_PORT", "RLS_PORT_8081_TCP_ADDR")
    assert read(**dict.fromkeys(names, "10.0.0.1")).warnings() == []


def test_connection_ages(read: Read) -> None:
    assert read(GRPC_MAX_CONNECTION_AGE="1h").warnings() == []


def test_envoy_gateway_name_of_client_ca(read: Read) -> None:
    tls = {"GRPC_SERVER_USE_TLS": "true", "GRPC_SERVER_TLS_CERT": "/certs/c", "GRPC_SERVER_TLS_KEY": "/certs/k"}
    assert read(**tls, GRPC_SERVER_TLS_CA_CERT="/certs/ca").client_ca == "/certs/ca"
    assert read(**tls, GRPC_SERVER_TLS_CA_CERT="/a", GRPC_CLIENT_TLS_CACERT="/b").client_ca == "/b"
    assert read(**tls).client_ca == ""


SECRETS = {
    "REDIS_AUTH": "me:hush-1",
    "REDIS_SENTINEL_AUTH": "hush-2",
    "REDIS_PERSECOND_AUTH": "hush-3",
    "REDIS_PERSECOND_SENTINEL_AUTH": "hush-4",
    "REDIS_URL": "redis://me:hush-5@cache",
    "REDIS_PERSECOND_URL": "main,redis://me:hush-6@sentinel",
    "CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS": "authorization:hush-7",
}


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """The log output."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    logs.configure("info", "json", stream)
    yield stream
    structlog.reset_defaults()
    root.handlers[:], root.level = handlers, level


def test_secrets_are_not_in_repr_or_logs(read: Read, lines: io.StringIO) -> None:
    settings = read(**SECRETS, REDIS_PERSECOND="true")
    redis, second = settings.redis, settings.redis_persecond_servers
    structlog.get_logger().info("starting", settings=settings, redis=redis, second=second, warnings=settings.warnings())
    output = lines.getvalue() + f"{settings} {settings!r} {redis} {redis!r} {second} {second!r} {settings.warnings()}"
    assert "starting" in output
    assert "hush" not in output


def test_error_about_map_has_no_secret(read: Read) -> None:
    with pytest.raises(SettingsError, match="CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS is not a map") as raised:
        read(CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS="authorization:Bearer:hush")
    assert "hush" not in str(raised.value)
