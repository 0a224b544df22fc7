"""Variables of envoyproxy/ratelimit, with its syntax; our own; and their flags and descriptions."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path

import pytest
from pydantic import ValidationError

import ratelimit_rls
from ratelimit_rls.errors import SettingsError
from ratelimit_rls.settings import Settings
from ratelimit_rls.settings.catalogue import GROUPS, VARIABLES, Variable
from ratelimit_rls.settings.parse import format_duration, parse_duration
from tests.unit.conftest import Read

# As listed in the source of envoyproxy/ratelimit (OTEL_EXPORTER_OTLP_* belong to the exporter library).
REFERENCE = """
HOST PORT DEBUG_HOST DEBUG_PORT GRPC_UDS GRPC_HOST GRPC_PORT GRPC_MAX_CONNECTION_AGE GRPC_MAX_CONNECTION_AGE_GRACE
GRPC_SERVER_USE_TLS GRPC_SERVER_TLS_CERT GRPC_SERVER_TLS_KEY GRPC_CLIENT_TLS_CACERT GRPC_CLIENT_TLS_SAN
LOG_LEVEL LOG_FORMAT CONFIG_TYPE FORCE_START_WITHOUT_INITIAL_CONFIG
CONFIG_GRPC_XDS_NODE_ID CONFIG_GRPC_XDS_NODE_METADATA CONFIG_GRPC_XDS_SERVER_URL
CONFIG_GRPC_XDS_SERVER_CONNECT_RETRY_INTERVAL CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS CONFIG_GRPC_XDS_SERVER_USE_TLS
CONFIG_GRPC_XDS_CLIENT_TLS_CERT CONFIG_GRPC_XDS_CLIENT_TLS_KEY CONFIG_GRPC_XDS_SERVER_TLS_CACERT
CONFIG_GRPC_XDS_SERVER_TLS_SAN XDS_CLIENT_BACKOFF_INITIAL_INTERVAL XDS_CLIENT_BACKOFF_MAX_INTERVAL
XDS_CLIENT_BACKOFF_RANDOM_FACTOR XDS_CLIENT_BACKOFF_JITTER XDS_CLIENT_MAX_MSG_SIZE_IN_BYTES
USE_STATSD STATSD_HOST STATSD_PORT STATSD_PROTOCOL USE_DOG_STATSD USE_DOG_STATSD_MOGRIFIERS USE_PROMETHEUS
PROMETHEUS_ADDR PROMETHEUS_PATH PROMETHEUS_MAPPER_YAML PROMETHEUS_RESPONSE_TIME_AS_MILLISECONDS EXTRA_TAGS
STATS_FLUSH_INTERVAL DISABLE_STATS RUNTIME_ROOT RUNTIME_SUBDIRECTORY RUNTIME_APPDIRECTORY RUNTIME_IGNOREDOTFILES
RUNTIME_WATCH_ROOT EXPIRATION_JITTER_MAX_SECONDS LOCAL_CACHE_SIZE_IN_BYTES NEAR_LIMIT_RATIO CACHE_KEY_PREFIX
BACKEND_TYPE STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT LIMIT_RESPONSE_HEADERS_ENABLED LIMIT_LIMIT_HEADER
LIMIT_REMAINING_HEADER LIMIT_RESET_HEADER HEALTHY_WITH_AT_LEAST_ONE_CONFIG_LOADED
REDIS_SOCKET_TYPE REDIS_TYPE REDIS_URL REDIS_POOL_SIZE REDIS_AUTH REDIS_TLS REDIS_TLS_CLIENT_CERT REDIS_TLS_CLIENT_KEY
REDIS_TLS_CACERT REDIS_TLS_SKIP_HOSTNAME_VERIFICATION REDIS_PIPELINE_WINDOW REDIS_PIPELINE_LIMIT
REDIS_CLUSTER_PIPELINE_PARALLELISM REDIS_PERSECOND REDIS_PERSECOND_SOCKET_TYPE REDIS_PERSECOND_TYPE REDIS_PERSECOND_URL
REDIS_PERSECOND_POOL_SIZE REDIS_PERSECOND_AUTH REDIS_PERSECOND_TLS REDIS_SENTINEL_AUTH REDIS_PERSECOND_SENTINEL_AUTH
REDIS_PERSECOND_PIPELINE_WINDOW REDIS_PERSECOND_PIPELINE_LIMIT REDIS_PERSECOND_CLUSTER_PIPELINE_PARALLELISM
REDIS_HEALTH_CHECK_ACTIVE_CONNECTION REDIS_TIMEOUT REDIS_PERSECOND_TIMEOUT REDIS_POOL_ON_EMPTY_BEHAVIOR
REDIS_PERSECOND_POOL_ON_EMPTY_BEHAVIOR REDIS_STARTUP_INITIAL_INTERVAL REDIS_STARTUP_MAX_INTERVAL
REDIS_STARTUP_MAX_ELAPSED_TIME MEMCACHE_HOST_PORT MEMCACHE_MAX_IDLE_CONNS MEMCACHE_SRV MEMCACHE_SRV_REFRESH
MEMCACHE_TLS MEMCACHE_TLS_CLIENT_CERT MEMCACHE_TLS_CLIENT_KEY MEMCACHE_TLS_CACERT
MEMCACHE_TLS_SKIP_HOSTNAME_VERIFICATION SHADOW_MODE QUOTA_MODE RESPONSE_DYNAMIC_METADATA MERGE_DOMAIN_CONFIG
TRACING_ENABLED TRACING_SERVICE_NAME TRACING_SERVICE_NAMESPACE TRACING_SERVICE_INSTANCE_ID TRACING_EXPORTER_PROTOCOL
TRACING_SAMPLING_RATE
""".split()  # noqa: SIM905 - a list would be three pages

# Set by other projects for envoyproxy/ratelimit, although the version compared with does not read them.
NEIGHBOURS = {"GRPC_SERVER_TLS_CA_CERT", "REDIS_POOL_ON_EMPTY_WAIT_DURATION", "USE_CALENDAR_MONTH_RATE_LIMIT"}

OWN_SETTINGS = {
    "RLS_DATABASE_URL": "",
    "RLS_DATABASE_POLL": "30s",
    "RLS_SNAPSHOT_FILE": "",
    "RLS_AUDIT_SAMPLE": "0.01",
    "RLS_AUDIT_BUFFER": "100000",
    "RLS_AUDIT_REFUSALS_PER_MINUTE": "1000",
    "RLS_USAGE_LINES": "10000",
    "RLS_REGION": "",
    "RLS_AUDIT_RETENTION": "90d",
    "RLS_USAGE_RETENTION": "30d",
    "RLS_USAGE_TOTAL_RETENTION": "365d",
    "RLS_ARCHIVE": "",
    "RLS_KEY_SECRET": "",
    "RLS_JWT_ISSUERS": "",
    "RLS_ADMIN_HOST": "127.0.0.1",
    "RLS_ADMIN_PORT": "8082",
    "RLS_ADMIN_AUTH": "tokens",
    "RLS_ADMIN_TOKEN": "",
    "RLS_LIMITER_DOMAIN": "",
    "GRPC_SERVER_TLS_CRL": "",
    "RLS_XDS_KEEPALIVE": "310s",
    "RLS_TRANSPORT": "native",
    "RLS_WORKERS": "1",
    "RLS_DRAIN_DELAY": "5s",
    "RLS_DRAIN_TIMEOUT": "30s",
    "RLS_STORE_TIMEOUT": "1s",
    "RLS_BATCH_WINDOW": "0s",
    "RLS_EMBEDDED_MEMORY_BYTES": "268435456",
    "RLS_PLAN_CACHE_BYTES": "167772160",
    "RLS_RUNTIME_DIR": "",
    "RLS_RULES": "",
    "RLS_MAX_CONCURRENT_STREAMS": "1024",
    "RLS_GRPC_MAX_CONNECTIONS": "4096",
    "RLS_GRPC_MAX_CONNECTIONS_PER_PEER": "2048",
    "RLS_GRPC_MAX_STREAMS": "65536",
    "RLS_GRPC_MAX_UNFINISHED_BYTES": "33554432",
    "RLS_GRPC_MESSAGE_TIMEOUT": "15s",
    "RLS_GRPC_KEEPALIVE_TIME": "5m",
    "RLS_GRPC_KEEPALIVE_TIMEOUT": "20s",
    "RLS_MAX_CALLS_PER_SECOND": "0",
    "RLS_MAX_CALLS_PER_SECOND_PER_PEER": "0",
    "RLS_MAX_HELD_CALLS": "10000",
    "RLS_MAX_DESCRIPTORS": "256",
    "RLS_MAX_ENTRIES": "1024",
    "RLS_MAX_ENTRY_BYTES": "65536",
    "RLS_MAX_MESSAGE_BYTES": "524288",
    "RLS_MAX_CHECK_FIELDS": "8192",
    "RLS_MAX_JSON_BYTES": "65536",
    "RLS_DEADLINE_MARGIN": "3ms",
    "RLS_EXT_AUTHZ_DOMAIN": "",
    "RLS_FAILURE_MODE": "error",
    "RLS_REPLICAS": "1",
    "RLS_MAX_IN_FLIGHT": "10000",
    "RLS_WAIT_FOR_REDIS": "true",
    "RLS_REDIS_INFO_INTERVAL": "15s",
    "RLS_DENIAL_CACHE_BYTES": "16777216",
    "RLS_REQUEST_ID_ENTRY": "",
    "RLS_REQUEST_ID_METADATA": "",
    "RLS_REQUEST_ID_TTL": "5m",
    "RLS_HOT_KEY_RATE": "1000",
    "RLS_HOT_KEY_VALUES": "false",
    "RLS_HTTP_JSON": "auto",
    "RLS_HTTP_ALLOWED_HOSTS": "",
    "RLS_HTTP_TOKEN": "",
    "RLS_HTTP_TOKEN_FILE": "",
    "RLS_HTTP_TLS": "false",
    "RLS_HTTP_CLIENT_CERT": "false",
    "RLS_HTTP_UDS": "",
    "RLS_DEBUG_UDS": "",
    "RLS_HTTP_MAX_CONNECTIONS": "1024",
    "RLS_HTTP_MAX_CONNECTIONS_PER_PEER": "256",
    "RLS_GRPC_UDS_MODE": "",
    "RLS_LOG_DENIALS": "0",
    "RLS_OTLP_METRICS": "",
    "REDIS_AUTH_FILE": "",
    "REDIS_PERSECOND_AUTH_FILE": "",
}


def test_every_variable_of_ratelimit_is_a_setting() -> None:
    assert {name for name in REFERENCE if name.lower() not in Settings.model_fields} == set()


def test_there_are_no_other_settings() -> None:
    assert {name.upper() for name in Settings.model_fields} == {*REFERENCE, *NEIGHBOURS, *OWN_SETTINGS}


@pytest.mark.parametrize("name", OWN_SETTINGS)
def test_defaults_of_our_settings(name: str) -> None:
    assert next(variable.default for variable in VARIABLES if variable.name == name) == OWN_SETTINGS[name]


@pytest.mark.parametrize(
    ("name", "default"),
    [
        ("PORT", "8080"),
        ("GRPC_PORT", "8081"),
        ("DEBUG_PORT", "6070"),
        ("GRPC_MAX_CONNECTION_AGE", "24h"),
        ("LOG_LEVEL", "INFO"),
        ("RUNTIME_ROOT", "/srv/runtime_data/current"),
        ("RUNTIME_APPDIRECTORY", "config"),
        ("RUNTIME_WATCH_ROOT", "true"),
        ("NEAR_LIMIT_RATIO", "0.8"),
        ("REDIS_TIMEOUT", "10s"),
        ("XDS_CLIENT_BACKOFF_MAX_INTERVAL", "1m"),
        ("EXPIRATION_JITTER_MAX_SECONDS", "300"),
        ("LIMIT_RESET_HEADER", "RateLimit-Reset"),
    ],
)
def test_defaults_of_ratelimit_settings(name: str, default: str) -> None:
    assert next(variable.default for variable in VARIABLES if variable.name == name) == default


@pytest.mark.parametrize(
    ("name", "effective"),
    [
        ("REDIS_TYPE", "derived from REDIS_URL"),
        ("REDIS_SOCKET_TYPE", "derived from REDIS_URL"),
        ("REDIS_PERSECOND_TYPE", "derived from REDIS_PERSECOND_URL"),
        ("REDIS_PERSECOND_SOCKET_TYPE", "derived from REDIS_PERSECOND_URL"),
        ("USE_STATSD", "off"),
        ("RLS_PLAN_CACHE_BYTES", "167772160 = 160MiB"),
        ("RLS_MAX_ENTRY_BYTES", "65536 = 64KiB"),
        ("LOCAL_CACHE_SIZE_IN_BYTES", "0"),
        ("RLS_AUDIT_RETENTION", "90d"),
        ("REDIS_STARTUP_MAX_ELAPSED_TIME", "0s"),
        ("PORT", "8080"),
        ("REDIS_URL", ""),
    ],
)
def test_documented_default_applies_if_the_variable_is_not_set(name: str, effective: str) -> None:
    assert next(variable.effective_default for variable in VARIABLES if variable.name == name) == effective


def test_every_setting_has_a_short_description_and_its_own_flag() -> None:
    assert len({variable.flag for variable in VARIABLES}) == len(VARIABLES) == len(Settings.model_fields)
    for variable in VARIABLES:
        assert variable.description, variable.name
        assert len(variable.description) <= 150, variable.name
        assert re.fullmatch(r"--[a-z]+(-[a-z]+)*", variable.flag)


def test_every_setting_is_used_except_unsupported_ones() -> None:
    """Every documented setting must be read somewhere."""
    package = Path(ratelimit_rls.__file__).parent
    sources = {path: path.read_text() for path in package.rglob("*.py")}
    outside = "".join(text for path, text in sources.items() if path.parent.name != "settings")
    everywhere = "".join(sources.values())
    for group in GROUPS:
        is_offered = group.__module__ != "ratelimit_rls.settings.unsupported"
        for field in group.model_fields:
            is_used = re.search(rf"\.{field}\b", everywhere if is_offered else outside) is not None
            assert is_used is is_offered, field


@pytest.mark.parametrize("text", ["1", "t", "T", "TRUE", "true", "True"])
def test_go_true_values(read: Read, text: str) -> None:
    assert read(SHADOW_MODE=text).shadow_mode is True


@pytest.mark.parametrize("text", ["0", "f", "F", "FALSE", "false", "False"])
def test_go_false_values(read: Read, text: str) -> None:
    assert read(RUNTIME_WATCH_ROOT=text).runtime_watch_root is False


@pytest.mark.parametrize("text", ["yes", "no", "on", "tRuE", " true", "2"])
def test_invalid_booleans(read: Read, text: str) -> None:
    with pytest.raises(SettingsError, match=r"SHADOW_MODE='.*' is not a boolean; use true or false"):
        read(SHADOW_MODE=text)


@pytest.mark.parametrize("text", ["0660", "660", "", "999", "rw-rw----", "00660"])
def test_socket_mode_is_octal(read: Read, text: str) -> None:
    if text in ("0660", "660", ""):
        assert read(RLS_GRPC_UDS_MODE=text).rls_grpc_uds_mode == text
        return
    with pytest.raises(SettingsError, match="is not a file's mode; use octal digits such as 0660"):
        read(RLS_GRPC_UDS_MODE=text)


@pytest.mark.parametrize(
    ("text", "number"),
    [("8081", 8081), ("0", 0), ("+7", 7), ("0x1F91", 8081), ("0b11", 3), ("0o17", 15), ("017", 15), ("1_000", 1000)],
)
def test_integers_in_any_base_of_go(read: Read, text: str, number: int) -> None:
    assert read(GRPC_PORT=text).grpc_port == number


@pytest.mark.parametrize(
    "text", ["abc", "1.5", " 1", "1 ", "08", "1__0", "_1", "0x", "tcp://10.0.0.1:80", "١", "9" * 5000]
)
def test_invalid_integers(read: Read, text: str) -> None:
    with pytest.raises(SettingsError, match=r"GRPC_PORT=.* is not a whole number"):
        read(GRPC_PORT=text)


@pytest.mark.parametrize(("text", "number"), [("0.8", 0.8), ("1", 1.0), (".5", 0.5), ("1e-2", 0.01)])
def test_floats(read: Read, text: str, number: float) -> None:
    assert read(NEAR_LIMIT_RATIO=text).near_limit_ratio == number


@pytest.mark.parametrize("text", ["nan", "inf", "eighty", "0,8", "1e999"])
def test_invalid_floats(read: Read, text: str) -> None:
    with pytest.raises(SettingsError, match="NEAR_LIMIT_RATIO"):
        read(NEAR_LIMIT_RATIO=text)


@pytest.mark.parametrize(
    ("text", "duration"),
    [("0", timedelta()), ("1ns", timedelta(microseconds=1)), ("1h30m", timedelta(minutes=90)), ("1d", timedelta(1))],
)
def test_durations(read: Read, text: str, duration: timedelta) -> None:
    assert read(RLS_DRAIN_DELAY=text).rls_drain_delay == duration


@pytest.mark.parametrize("text", ["5", "-3s", "300000000h"])
def test_invalid_durations(read: Read, text: str) -> None:
    with pytest.raises(SettingsError, match=r"RLS_DRAIN_DELAY=.*duration"):
        read(RLS_DRAIN_DELAY=text)


@pytest.mark.parametrize("text", ["0", "1us", "250ms", "3s", "90s", "2m", "24h", "25h", "90d"])
def test_formatted_duration_parses_back(text: str) -> None:
    duration = parse_duration(text)
    assert isinstance(duration, timedelta)
    assert parse_duration(format_duration(duration)) == duration


def test_lists(read: Read) -> None:
    settings = read(RLS_RULES="a.yaml,dir/b", MEMCACHE_HOST_PORT=" ")
    assert settings.rls_rules == ("a.yaml", "dir/b")
    assert settings.memcache_host_port == ()


def test_maps(read: Read) -> None:
    assert read(EXTRA_TAGS="a:b,c:").extra_tags == {"a": "b", "c": ""}
    with pytest.raises(SettingsError, match="EXTRA_TAGS='a:b:c' is not a map"):
        read(EXTRA_TAGS="a:b:c")


@pytest.mark.parametrize(
    "variable", [v for v in VARIABLES if v.kind in ("bool", "number", "duration")], ids=lambda v: v.name
)
def test_empty_variable_is_rejected_unless_it_may_be_empty(read: Read, variable: Variable) -> None:
    name = variable.name
    with pytest.raises(SettingsError, match=f"^{name} is set but empty; set a value or unset it$"):
        read(**{name: ""})


def test_variable_names_are_upper_case_only(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("grpc_port", "9")
    assert read().grpc_port == 8081


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("GRPC_PORT", "65536", "GRPC_PORT='65536' is too large; it must be ≤ 65535"),
        ("PORT", "-1", "PORT='-1' is too small; it must be ≥ 0"),
        ("RLS_WORKERS", "0", "RLS_WORKERS='0' is too small; it must be ≥ 1"),
        ("RLS_BATCH_WINDOW", "3ms", "RLS_BATCH_WINDOW='3ms' is too large; it must be ≤ 2000 microseconds"),
        ("RLS_STORE_TIMEOUT", "0", "RLS_STORE_TIMEOUT='0' is too small; it must be > 0 seconds"),
        ("RLS_EMBEDDED_MEMORY_BYTES", "5", "RLS_EMBEDDED_MEMORY_BYTES='5' is too small; it must be ≥ 1048576"),
        ("RLS_REPLICAS", "0", "RLS_REPLICAS='0' is too small; it must be ≥ 1"),
        ("RLS_MAX_IN_FLIGHT", "0", "RLS_MAX_IN_FLIGHT='0' is too small; it must be ≥ 1"),
        ("RLS_MAX_DESCRIPTORS", "1025", "RLS_MAX_DESCRIPTORS='1025' is too large; it must be ≤ 1024"),
        ("RLS_MAX_ENTRY_BYTES", "127", "RLS_MAX_ENTRY_BYTES='127' is too small; it must be ≥ 128"),
        ("RLS_REQUEST_ID_TTL", "0s", "RLS_REQUEST_ID_TTL='0s' is too small; it must be > 0 seconds"),
        ("LOCAL_CACHE_SIZE_IN_BYTES", "-1", "LOCAL_CACHE_SIZE_IN_BYTES='-1' is too small; it must be ≥ 0"),
        (
            "RLS_FAILURE_MODE",
            "open",
            "RLS_FAILURE_MODE='open' is not a valid choice; use 'allow', 'deny', 'local' or 'error'",
        ),
        ("RLS_OTLP_METRICS", "udp", "RLS_OTLP_METRICS='udp' is not a valid choice; use '', 'http' or 'grpc'"),
        ("STATS_FLUSH_INTERVAL", "0s", "STATS_FLUSH_INTERVAL='0s' is too small; it must be > 0 seconds"),
        ("TRACING_SAMPLING_RATE", "1.5", "TRACING_SAMPLING_RATE='1.5' is too large; it must be ≤ 1.0"),
        ("TRACING_SAMPLING_RATE", "-1", "TRACING_SAMPLING_RATE='-1' is too small; it must be ≥ 0.0"),
        ("RLS_LOG_DENIALS", "-1", "RLS_LOG_DENIALS='-1' is too small; it must be ≥ 0"),
        (
            "RLS_TRANSPORT",
            "grpcio",
            "RLS_TRANSPORT='grpcio' is not available: gRPC is served by the native HTTP/2 server; unset RLS_TRANSPORT",
        ),
        ("LIMIT_LIMIT_HEADER", "a b", "LIMIT_LIMIT_HEADER='a b' is not a header name; use letters, digits and dashes"),
    ],
)
def test_value_out_of_bounds_is_rejected_with_the_bound(read: Read, name: str, value: str, sentence: str) -> None:
    with pytest.raises(SettingsError) as raised:
        read(**{name: value})
    assert str(raised.value) == sentence


def test_former_transport_setting_has_no_effect(read: Read) -> None:
    assert read(RLS_TRANSPORT="native").warnings() == [
        "RLS_TRANSPORT has no effect: the native HTTP/2 server is the only one"
    ]
    assert not read().warnings()


def test_flag_takes_precedence_over_variable(read: Read) -> None:
    read(GRPC_PORT="1")
    assert Settings(GRPC_PORT="2").grpc_port == 2  # type: ignore[call-arg]
    assert Settings(grpc_port=3).grpc_port == 3


def test_settings_are_immutable(read: Read) -> None:
    with pytest.raises(ValidationError, match="frozen"):
        read().grpc_port = 1  # type: ignore[misc]


def test_unknown_setting_is_rejected() -> None:
    with pytest.raises(SettingsError, match="GRPC_PROT is not a setting"):
        Settings(grpc_prot=1)  # type: ignore[call-arg]


def test_all_problems_are_reported_in_documented_order(read: Read) -> None:
    with pytest.raises(SettingsError) as raised:
        read(NEAR_LIMIT_RATIO="x", GRPC_PORT="x", REDIS_TYPE="cluster", LOG_LEVEL="loud", RLS_WORKERS="2")
    names = [re.split("[= ]", line)[0] for line in str(raised.value).splitlines()]
    assert names == ["GRPC_PORT", "NEAR_LIMIT_RATIO", "LOG_LEVEL", "RLS_WORKERS", "REDIS_TYPE"]
