"""Validation of combinations of settings: errors, which prevent the start, and warnings, which do not.

Each is one sentence that names the variable first and says what would be valid. It includes the sentence of
envoyproxy/ratelimit, where that has one, and never a secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from difflib import get_close_matches

from ratelimit_rls.settings import database_validation, http_validation, xds_validation
from ratelimit_rls.settings.redis_servers import RedisVariables, deployment_kind, parse_redis_servers
from ratelimit_rls.settings.telemetry import is_http_path
from ratelimit_rls.settings.values import SettingsValues
from ratelimit_rls.settings.xds import XDS
from ratelimit_rls.tls import spiffe

LOG_LEVELS = ("panic", "fatal", "error", "warn", "warning", "info", "debug", "trace")

_METADATA_NAME = re.compile(r"[0-9a-z_.-]+")

_ONE_SINK = (
    "Error: unable to use more than one stats sink at the same time. "
    "Set one of USE_DOG_STATSD, USE_STATSD, USE_PROMETHEUS."
)
_NO_EFFECT = {
    "rls_transport": "the native HTTP/2 server is the only one",
    "redis_pool_size": "one connection carries every call",
    "redis_pool_on_empty_behavior": "one connection carries every call",
    "redis_pool_on_empty_wait_duration": "RLS_STORE_TIMEOUT bounds how long a call waits",
    "redis_pipeline_window": "calls that arrive together are always sent together; RLS_BATCH_WINDOW may delay them",
    "redis_pipeline_limit": "calls that arrive together are always sent together",
    "redis_cluster_pipeline_parallelism": "all nodes of a cluster are always called in parallel",
}
# envoyproxy/ratelimit documents REDIS_POOL_ON_EMPTY_WAIT_DURATION without implementing it, and not for PERSECOND.
_NO_EFFECT |= {
    name.replace("redis_", "redis_persecond_", 1): reason
    for name, reason in _NO_EFFECT.items()
    if name != "redis_pool_on_empty_wait_duration"
}


def errors(settings: SettingsValues) -> Iterator[str]:
    yield from _logs(settings)
    yield from _grpc(settings)
    yield from http_validation.errors(settings)
    yield from _store(settings)
    yield from _redis(settings)
    yield from _unsupported(settings)
    yield from xds_validation.errors(settings)
    yield from database_validation.errors(settings)
    yield from _stats(settings)
    yield from _tracing(settings)


def warnings(settings: SettingsValues, environ: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yield warnings. `environ` has the names of all environment variables: those similar to ours are likely typos."""
    for name, reason in _NO_EFFECT.items():
        if settings.given(name):
            yield f"{name.upper()} has no effect: {reason}"
    if settings.log_format.lower() not in ("text", "json"):
        yield f"LOG_FORMAT={settings.log_format!r} is neither text nor json; text is used"
    if not (settings.grpc_server_use_tls or settings.rls_http_tls):
        for name in ("grpc_server_tls_cert", "grpc_client_tls_cacert", "grpc_server_tls_ca_cert"):
            if getattr(settings, name):
                yield f"{name.upper()} has no effect without GRPC_SERVER_USE_TLS=true"
    yield from http_validation.warnings(settings)
    yield from _unused_store_settings(settings)
    yield from _unused_redis_settings(settings)
    yield from xds_validation.warnings(settings)
    yield from database_validation.warnings(settings)
    known = sorted(name.upper() for name in type(settings).model_fields if name.startswith("rls_"))
    for name in sorted(environ):
        # Not every RLS_… variable is ours: Kubernetes sets RLS_SERVICE_HOST for a service called rls.
        if name.startswith("RLS_") and name not in known and (near := get_close_matches(name, known, 1, 0.85)):
            yield f"{name} is not a setting; did you mean {near[0]}?"


def _unused_store_settings(settings: SettingsValues) -> Iterator[str]:
    if settings.rls_batch_window and settings.redis is None:
        yield "RLS_BATCH_WINDOW has no effect without REDIS_URL: the embedded store answers at once"
    if settings.local_cache_size_in_bytes and settings.given("rls_denial_cache_bytes"):
        yield "RLS_DENIAL_CACHE_BYTES has no effect: LOCAL_CACHE_SIZE_IN_BYTES is set and replaces it"
    if settings.given("rls_request_id_ttl") and not (settings.rls_request_id_entry or settings.rls_request_id_metadata):
        yield "RLS_REQUEST_ID_TTL has no effect without RLS_REQUEST_ID_ENTRY or RLS_REQUEST_ID_METADATA"


def _unused_redis_settings(settings: SettingsValues) -> Iterator[str]:
    """Yield warnings about Redis credentials and TLS options that are not used."""
    if not settings.redis_persecond:
        for name in type(settings).model_fields:
            if name.startswith("redis_persecond_") and name not in _NO_EFFECT and settings.given(name):
                yield f"{name.upper()} has no effect without REDIS_PERSECOND=true"
    has_tls = False
    for variables, servers in (
        (settings.redis_family, settings.redis),
        (settings.redis_persecond_family, settings.redis_persecond_servers),
    ):
        has_tls |= servers is not None and servers.addresses[0].tls is not None
        if servers is None and variables.prefix == "REDIS_":
            for name in ("auth", "auth_file", "sentinel_auth", "tls"):
                if getattr(variables, name):
                    yield f"REDIS_{name.upper()} has no effect without REDIS_URL: the embedded store is used"
        elif servers is not None and servers.kind != "sentinel" and variables.sentinel_auth:
            yield f"{variables.prefix}SENTINEL_AUTH has no effect without sentinels in {variables.prefix}URL"
    if not has_tls:
        for name in ("cacert", "client_cert", "client_key", "skip_hostname_verification"):
            if getattr(settings, f"redis_tls_{name}"):
                yield f"REDIS_TLS_{name.upper()} has no effect without REDIS_TLS=true or rediss://"


def _logs(settings: SettingsValues) -> Iterator[str]:
    if settings.log_level.lower() not in LOG_LEVELS:
        yield f"LOG_LEVEL={settings.log_level!r}: Could not parse log level; use {_join_or(LOG_LEVELS)}"


def _grpc(settings: SettingsValues) -> Iterator[str]:
    cert, key = settings.grpc_server_tls_cert, settings.grpc_server_tls_key
    if cert and not key:
        yield "GRPC_SERVER_TLS_CERT is set without GRPC_SERVER_TLS_KEY; set both or neither"
    if key and not cert:
        yield "GRPC_SERVER_TLS_KEY is set without GRPC_SERVER_TLS_CERT; set both or neither"
    if settings.grpc_server_use_tls and not (cert or key):
        yield "GRPC_SERVER_USE_TLS=true needs GRPC_SERVER_TLS_CERT and GRPC_SERVER_TLS_KEY"
    if settings.rls_workers > 1 and settings.grpc_uds:
        yield "GRPC_UDS cannot be shared by several processes; use GRPC_PORT, or RLS_WORKERS=1"
    if settings.grpc_client_tls_san and not settings.client_ca:
        yield "GRPC_CLIENT_TLS_SAN needs GRPC_CLIENT_TLS_CACERT: names are trusted only in certificates of a CA"
    for name in settings.grpc_client_tls_san:
        if "://" in name and not spiffe.is_pattern(name):
            yield (
                f"GRPC_CLIENT_TLS_SAN: {name!r} is not a SPIFFE ID; write spiffe://trust.domain/path, or "
                "spiffe://trust.domain/path/* for every ID below it"
            )
    if settings.grpc_server_tls_crl and not settings.client_ca:
        yield "GRPC_SERVER_TLS_CRL needs GRPC_CLIENT_TLS_CACERT: without it clients present no certificates"


def _store(settings: SettingsValues) -> Iterator[str]:
    backend = settings.backend_type
    if backend == "memcache":
        yield (
            "BACKEND_TYPE=memcache is not supported; use redis with REDIS_URL, "
            "or leave REDIS_URL empty for the embedded store"
        )
    elif backend not in ("redis", ""):
        yield f"BACKEND_TYPE={backend!r}: Invalid setting for BackendType: {backend}; use redis"
    prefix = settings.cache_key_prefix
    if not prefix.isprintable() or "{" in prefix or "}" in prefix:
        yield (
            f"CACHE_KEY_PREFIX={prefix!r} has a brace or a control character: the braces of a key determine its slot "
            "on a cluster; use letters, digits, colons or dashes"
        )
    if settings.rls_workers > 1 and not settings.redis_url.get_secret_value():
        yield (
            f"RLS_WORKERS={settings.rls_workers} needs REDIS_URL: the embedded store counts per process, "
            "so each worker would admit the whole limit"
        )
    name = settings.rls_request_id_metadata
    if name and not _METADATA_NAME.fullmatch(name):
        yield (
            f"RLS_REQUEST_ID_METADATA={name!r} is not a valid name of gRPC metadata; "
            "use lowercase letters, digits and dashes, such as x-request-id"
        )


def _redis(settings: SettingsValues) -> Iterator[str]:
    yield from _redis_variables(settings.redis_family)
    if settings.redis_persecond:
        for name in ("redis_url", "redis_persecond_url"):
            if not getattr(settings, name).get_secret_value():
                yield f"REDIS_PERSECOND=true needs {name.upper()}: one Redis for limits per second, one for the others"
        yield from _redis_variables(settings.redis_persecond_family)
    if timedelta() < settings.rls_redis_info_interval < timedelta(seconds=1):
        yield "RLS_REDIS_INFO_INTERVAL must be at least 1s, or 0s to switch it off"
    certificate, key = settings.redis_tls_client_cert, settings.redis_tls_client_key
    if certificate and not key:
        yield "REDIS_TLS_CLIENT_CERT is set without REDIS_TLS_CLIENT_KEY; set both or neither"
    if key and not certificate:
        yield "REDIS_TLS_CLIENT_KEY is set without REDIS_TLS_CLIENT_CERT; set both or neither"
    for name in ("redis_pool_on_empty_behavior", "redis_persecond_pool_on_empty_behavior"):
        value = getattr(settings, name)
        if value.upper() in ("CREATE", "ERROR"):
            yield f"{name.upper()}={value} is not supported; use WAIT or unset it"
    for name in ("redis_cluster_pipeline_parallelism", "redis_persecond_cluster_pipeline_parallelism"):
        if getattr(settings, name) < 0:
            yield f"{name.upper()}={getattr(settings, name)}: redis cluster pipeline parallelism must be >= 0"


def _redis_variables(variables: RedisVariables) -> Iterator[str]:
    if variables.auth and variables.auth_file:
        yield f"{variables.prefix}AUTH and {variables.prefix}AUTH_FILE are both set; set only one of them"
    try:
        if variables.url:
            parse_redis_servers(variables)
        elif deployment_kind(variables) != "single" and variables.prefix == "REDIS_":
            yield f"REDIS_TYPE={variables.type} needs REDIS_URL: without it, the embedded store is used"
    except ValueError as error:
        yield str(error)


def _unsupported(settings: SettingsValues) -> Iterator[str]:
    if settings.config_type not in ("FILE", XDS):
        kind = settings.config_type
        yield f"CONFIG_TYPE={kind!r}: Invalid setting for ConfigType: {kind}; use FILE or {XDS}"
    if settings.use_calendar_month_rate_limit:
        yield "USE_CALENDAR_MONTH_RATE_LIMIT=true is not supported; a month is 30 days"


def _stats(settings: SettingsValues) -> Iterator[str]:
    """Yield errors in the metrics settings.

    DISABLE_STATS takes precedence over every sink, as in envoyproxy/ratelimit. USE_STATSD counts only if it is set
    explicitly.
    """
    if settings.disable_stats:
        return
    statsd = settings.use_statsd and settings.given("use_statsd")
    if statsd + settings.use_dog_statsd + settings.use_prometheus > 1:
        yield _ONE_SINK
    protocol = settings.statsd_protocol
    if statsd and protocol not in ("tcp", "udp"):
        yield f"STATSD_PROTOCOL={protocol!r} is not a valid choice; use tcp or udp"
    if (statsd or settings.use_dog_statsd) and not (settings.statsd_host and settings.statsd_port):
        yield "STATSD_HOST and STATSD_PORT must be set to send metrics, e.g. localhost and 8125"
    if settings.use_dog_statsd:
        try:
            _ = settings.dog_statsd_mogrifiers
        except ValueError as error:
            yield from str(error).splitlines()
    if settings.use_prometheus:
        yield from _prometheus(settings)


def _prometheus(settings: SettingsValues) -> Iterator[str]:
    try:
        _ = settings.prometheus_listen
    except ValueError as error:
        yield str(error)
    for tag in settings.extra_tags:
        if tag == "le" or tag.startswith("__"):
            yield f"EXTRA_TAGS has {tag!r}, which is reserved by Prometheus; use another name"
    path = settings.prometheus_path
    if not is_http_path(path):
        yield f"PROMETHEUS_PATH={path!r} is not a path; use /metrics, or a path of letters, digits, dashes and slashes"


def _tracing(settings: SettingsValues) -> Iterator[str]:
    protocol = settings.tracing_exporter_protocol
    if settings.tracing_enabled and protocol not in ("http", "grpc", ""):
        yield f"TRACING_EXPORTER_PROTOCOL: Invalid otlptrace client protocol: {protocol}; use http or grpc"


def _join_or(choices: tuple[str, ...]) -> str:
    return f"{', '.join(choices[:-1])} or {choices[-1]}"
