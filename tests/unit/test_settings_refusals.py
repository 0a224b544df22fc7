"""What is refused, what is warned of, where Redis is taken to be, and that no secret is ever told."""

from __future__ import annotations

import io
import logging
import traceback
from collections.abc import Callable, Iterator

import pytest
import structlog

from ratelimit_rls.errors import SettingsError
from ratelimit_rls.settings import Settings
from ratelimit_rls.settings.catalogue import VARIABLES
from ratelimit_rls.telemetry import logs

Read = Callable[..., Settings]

REDIS = {"REDIS_URL": "localhost:6379"}


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Read:
    """Settings from nothing but the given variables."""

    def read(**environ: str) -> Settings:
        for variable in VARIABLES:
            monkeypatch.delenv(variable.name, raising=False)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        return Settings()

    return read


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        # features of later versions
        ({"REDIS_TYPE": "cluster"}, "REDIS_TYPE=cluster is not available in this version"),
        ({"REDIS_TYPE": "SENTINEL", "REDIS_URL": "m,a:1"}, "REDIS_TYPE=SENTINEL is not available in this version"),
        ({"REDIS_URL": "a:1,b:2"}, "REDIS_URL is a list, which is not available in this version"),
        ({"REDIS_URL": "rediss://a:1"}, "REDIS_URL asks for TLS (rediss://), which is not available in this version"),
        ({"REDIS_TLS": "true"}, "REDIS_TLS=true: TLS to Redis is not available in this version"),
        ({"REDIS_PERSECOND_TLS": "true"}, "REDIS_PERSECOND_TLS=true: TLS to Redis is not available in this version"),
        ({"REDIS_PERSECOND": "true"}, "REDIS_PERSECOND=true: a second Redis is not available in this version"),
        ({"CONFIG_TYPE": "GRPC_XDS_SOTW"}, "CONFIG_TYPE=GRPC_XDS_SOTW: rules over xDS are not available"),
        ({"USE_STATSD": "true"}, "USE_STATSD=true: statsd is not available in this version; set USE_STATSD=false"),
        ({"USE_DOG_STATSD": "true"}, "USE_DOG_STATSD=true: DogStatsD is not available in this version"),
        ({"USE_PROMETHEUS": "true"}, "USE_PROMETHEUS=true: Prometheus is not available in this version"),
        ({"TRACING_ENABLED": "true"}, "TRACING_ENABLED=true: tracing is not available in this version"),
        ({"USE_CALENDAR_MONTH_RATE_LIMIT": "1"}, "USE_CALENDAR_MONTH_RATE_LIMIT=true is not available in this version"),
        ({"BACKEND_TYPE": "memcache"}, "BACKEND_TYPE=memcache is not supported and not planned; use redis"),
        # what the reference refuses, in its words
        ({"BACKEND_TYPE": "disk"}, "Invalid setting for BackendType: disk"),
        ({"CONFIG_TYPE": "file"}, "Invalid setting for ConfigType: file"),
        ({"CONFIG_TYPE": ""}, "Invalid setting for ConfigType: "),
        ({"REDIS_TYPE": "ring"}, "Unrecognized redis type ring"),
        ({"REDIS_TYPE": "sentinel", "REDIS_URL": "a:1"}, "Expected master name and a list of urls for the sentinels"),
        ({"LOG_LEVEL": "loud"}, "Could not parse log level"),
        ({"LOG_LEVEL": ""}, "Could not parse log level"),
        ({"USE_STATSD": "true", "USE_PROMETHEUS": "true"}, "unable to use more than one stats sink at the same time."),
        ({"USE_DOG_STATSD": "1", "USE_PROMETHEUS": "1"}, "Set one of USE_DOG_STATSD, USE_STATSD, USE_PROMETHEUS."),
        (
            {"TRACING_ENABLED": "1", "TRACING_EXPORTER_PROTOCOL": "zipkin"},
            "Invalid otlptrace client protocol: zipkin",
        ),
        ({"REDIS_CLUSTER_PIPELINE_PARALLELISM": "-1"}, "redis cluster pipeline parallelism must be >= 0"),
        ({"REDIS_POOL_ON_EMPTY_BEHAVIOR": "CREATE"}, "REDIS_POOL_ON_EMPTY_BEHAVIOR=CREATE is not supported"),
        ({"REDIS_PERSECOND_POOL_ON_EMPTY_BEHAVIOR": "error"}, "REDIS_PERSECOND_POOL_ON_EMPTY_BEHAVIOR=error is not"),
        # what cannot be meant
        ({"GRPC_SERVER_TLS_CERT": "c"}, "GRPC_SERVER_TLS_CERT is given without GRPC_SERVER_TLS_KEY"),
        ({"GRPC_SERVER_TLS_KEY": "k"}, "GRPC_SERVER_TLS_KEY is given without GRPC_SERVER_TLS_CERT"),
        ({"GRPC_SERVER_USE_TLS": "true"}, "GRPC_SERVER_USE_TLS=true needs GRPC_SERVER_TLS_CERT and"),
        ({"GRPC_CLIENT_TLS_SAN": "envoy"}, "GRPC_CLIENT_TLS_SAN needs GRPC_CLIENT_TLS_CACERT"),
        ({**REDIS, "RLS_WORKERS": "2", "GRPC_UDS": "/s"}, "GRPC_UDS cannot be shared by several processes"),
        ({"RLS_WORKERS": "2"}, "RLS_WORKERS=2 needs REDIS_URL: the embedded store's counters are one process's own"),
        (
            {**REDIS, "REDIS_SOCKET_TYPE": "udp"},
            "REDIS_SOCKET_TYPE='udp' is not a network; use tcp, tcp4, tcp6 or unix",
        ),
        ({**REDIS, "REDIS_SOCKET_TYPE": "unix"}, "REDIS_URL is host:port, but REDIS_SOCKET_TYPE=unix"),
        ({"REDIS_URL": "/r.sock", "REDIS_SOCKET_TYPE": "tcp"}, "REDIS_URL is a socket path, but REDIS_SOCKET_TYPE=tcp"),
        ({"REDIS_URL": "localhost"}, "REDIS_URL has no port"),
        ({"REDIS_URL": "localhost:port"}, "REDIS_URL has no port"),
        ({"REDIS_URL": "::1:6379"}, "REDIS_URL has an IPv6 address without brackets"),
        ({"REDIS_URL": "http://localhost"}, "REDIS_URL has a scheme other than redis or unix"),
        ({"REDIS_URL": "redis://localhost/zero"}, "REDIS_URL has a database that is not a number"),
        (
            {"REDIS_URL": "redis://localhost?tls=1"},
            "REDIS_URL has a parameter that is not one of db, username, password",
        ),
        ({"REDIS_URL": "redis://:6379"}, "REDIS_URL names no host"),
        ({"REDIS_URL": "redis://h:port"}, "REDIS_URL is not a URL that can be read"),
        ({"REDIS_URL": "unix://tmp/r.sock"}, "REDIS_URL names no socket"),
        ({"REDIS_URL": "u:p@localhost:6379"}, "REDIS_URL has credentials but no scheme"),
    ],
)
def test_refused(read: Read, environ: dict[str, str], sentence: str) -> None:
    with pytest.raises(SettingsError) as refused:
        read(**environ)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    "environ",
    [
        {"USE_STATSD": "false"},
        {"USE_STATSD": "true", "DISABLE_STATS": "true"},
        {"BACKEND_TYPE": ""},
        {"REDIS_TYPE": "single"},
        {"LOG_LEVEL": "Trace"},
        {**REDIS, "RLS_WORKERS": "4"},
        {"GRPC_SERVER_USE_TLS": "true", "GRPC_SERVER_TLS_CERT": "/a/c", "GRPC_SERVER_TLS_KEY": "/b/k"},
        {"CONFIG_GRPC_XDS_SERVER_URL": "gateway:18001", "STATSD_PORT": "9125", "TRACING_EXPORTER_PROTOCOL": "zipkin"},
    ],
)
def test_accepted_without_a_word(read: Read, environ: dict[str, str]) -> None:
    assert read(**environ).warnings() == []


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({"REDIS_POOL_SIZE": "10"}, "REDIS_POOL_SIZE has no effect in this version"),
        ({"REDIS_POOL_ON_EMPTY_BEHAVIOR": "WAIT"}, "REDIS_POOL_ON_EMPTY_BEHAVIOR has no effect in this version"),
        ({"REDIS_POOL_ON_EMPTY_WAIT_DURATION": "1s"}, "REDIS_POOL_ON_EMPTY_WAIT_DURATION has no effect"),
        ({"REDIS_PIPELINE_WINDOW": "150us"}, "REDIS_PIPELINE_WINDOW has no effect in this version"),
        ({"REDIS_PIPELINE_LIMIT": "8"}, "REDIS_PIPELINE_LIMIT has no effect in this version"),
        ({"REDIS_CLUSTER_PIPELINE_PARALLELISM": "0"}, "REDIS_CLUSTER_PIPELINE_PARALLELISM has no effect"),
        ({"LOCAL_CACHE_SIZE_IN_BYTES": "1000"}, "LOCAL_CACHE_SIZE_IN_BYTES has no effect in this version"),
        ({"GRPC_MAX_CONNECTION_AGE": "1h"}, "GRPC_MAX_CONNECTION_AGE has no effect on the native transport"),
        ({"GRPC_MAX_CONNECTION_AGE_GRACE": "1h"}, "RLS_TRANSPORT=grpcio honours it"),
        ({"LOG_FORMAT": "xml"}, "LOG_FORMAT='xml' is neither text nor json; text is used"),
        ({"GRPC_CLIENT_TLS_CACERT": "ca"}, "GRPC_CLIENT_TLS_CACERT has no effect without GRPC_SERVER_USE_TLS=true"),
        ({"REDIS_AUTH": "hush"}, "REDIS_AUTH has no effect without REDIS_URL"),
        ({"RLS_WORKER": "4"}, "RLS_WORKER is not a setting; did you mean RLS_WORKERS?"),
    ],
)
def test_warned_of(read: Read, environ: dict[str, str], sentence: str) -> None:
    (warning,) = read(**environ).warnings()
    assert sentence in warning


def test_what_kubernetes_sets_for_a_service_called_rls_is_not_warned_of(read: Read) -> None:
    names = ("RLS_SERVICE_HOST", "RLS_SERVICE_PORT", "RLS_PORT", "RLS_PORT_8081_TCP_ADDR")
    assert read(**dict.fromkeys(names, "10.0.0.1")).warnings() == []


def test_the_grpcio_transport_honours_connection_ages(read: Read) -> None:
    assert read(GRPC_MAX_CONNECTION_AGE="1h", RLS_TRANSPORT="grpcio").warnings() == []


@pytest.mark.parametrize(
    ("environ", "address"),
    [
        ({"REDIS_URL": "cache:6379"}, "redis://cache:6379"),
        ({"REDIS_URL": ":6379"}, "redis://localhost:6379"),
        ({"REDIS_URL": "[::1]:6379"}, "redis://[::1]:6379"),
        ({"REDIS_URL": "cache:6379", "REDIS_SOCKET_TYPE": "tcp"}, "redis://cache:6379"),
        ({"REDIS_URL": "cache:6379", "REDIS_SOCKET_TYPE": "tcp4"}, "redis://cache:6379"),
        ({"REDIS_URL": "/run/redis.sock"}, "unix:///run/redis.sock"),
        ({"REDIS_URL": "/run/redis.sock", "REDIS_SOCKET_TYPE": "unix"}, "unix:///run/redis.sock"),
        ({"REDIS_URL": "redis.sock", "REDIS_SOCKET_TYPE": "unix"}, "unix://redis.sock"),
        ({"REDIS_URL": "redis://cache"}, "redis://cache:6379"),
        ({"REDIS_URL": "redis://me:hush@cache:7000/3"}, "redis://me@cache:7000/3"),
        ({"REDIS_URL": "redis://cache?db=3&username=me&password=hush"}, "redis://me@cache:6379/3"),
        ({"REDIS_URL": "unix://me:hush@/run/redis.sock?db=2"}, "unix://me@/run/redis.sock?db=2"),
        ({"REDIS_URL": "redis://me:hush@cache", "REDIS_AUTH": "you:loud"}, "redis://you@cache:6379"),
        ({"REDIS_URL": "redis://me:hush@cache", "REDIS_AUTH": "loud"}, "redis://cache:6379"),
    ],
)
def test_redis_is_found_where_the_url_says(read: Read, environ: dict[str, str], address: str) -> None:
    assert str(read(**environ).redis) == address


@pytest.mark.parametrize(
    ("environ", "username", "password"),
    [
        ({"REDIS_URL": "redis://me:h%40sh@cache"}, "me", "h@sh"),
        ({"REDIS_URL": "redis://:hush@cache"}, "", "hush"),
        ({"REDIS_URL": "redis://me:hush@cache", "REDIS_AUTH": "loud"}, "", "loud"),
        ({"REDIS_URL": "redis://me:hush@cache", "REDIS_AUTH": "you:l:oud"}, "you", "l:oud"),
        ({"REDIS_URL": "cache:1"}, "", ""),
    ],
)
def test_redis_auth_wins_over_the_urls_credentials(
    read: Read, environ: dict[str, str], username: str, password: str
) -> None:
    address = read(**environ).redis
    assert address is not None
    assert (address.username, address.password.get_secret_value()) == (username, password)


@pytest.mark.parametrize("environ", [{}, {"REDIS_URL": ""}, {"REDIS_SOCKET_TYPE": "tcp"}])
def test_without_redis_url_the_store_is_embedded(read: Read, environ: dict[str, str]) -> None:
    assert read(**environ).redis is None


def test_envoy_gateways_name_for_the_client_ca_is_honoured(read: Read) -> None:
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
    "REDIS_PERSECOND_URL": "redis://me:hush-6@cache",
    "CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS": "authorization:hush-7",
}


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What is logged."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    logs.configure("info", "json", stream)
    yield stream
    structlog.reset_defaults()
    root.handlers[:], root.level = handlers, level


def test_secrets_are_not_in_the_settings_text_nor_in_logs(read: Read, lines: io.StringIO) -> None:
    settings = read(**SECRETS)
    structlog.get_logger().info("starting", settings=settings, redis=settings.redis, warnings=settings.warnings())
    told = lines.getvalue() + repr(settings) + str(settings) + repr(settings.redis) + "".join(settings.warnings())
    assert "starting" in told
    assert "hush" not in told


@pytest.mark.parametrize(
    "url",
    [
        "rediss://me:hush@cache",
        "http://me:hush@cache",
        "redis://me:hush@cache/x",
        "redis://me:hush@cache:port",
        "redis://me:hush@[cache",
        "redis://cache?secret=hush",
        "me:hush@cache:6379",
        "redis://me:hush@a,redis://me:hush@b",
        "hush",
    ],
)
def test_secrets_are_not_in_what_is_said_of_a_refused_url(read: Read, url: str) -> None:
    with pytest.raises(SettingsError, match="REDIS_URL") as refused:
        read(**{**SECRETS, "REDIS_URL": url, "GRPC_PORT": "x"})
    assert "hush" not in str(refused.value) + "".join(traceback.format_exception(refused.value))


def test_secrets_are_not_in_what_is_said_of_a_refused_map(read: Read) -> None:
    with pytest.raises(SettingsError, match="CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS is not a map") as refused:
        read(CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS="authorization:Bearer:hush")
    assert "hush" not in str(refused.value)
