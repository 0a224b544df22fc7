"""What a combination of values cannot mean: refusals, which stop the start, and warnings, which do not.

Each is one sentence that names the variable first and says what would be right. Where the reference has a sentence of
its own for the case, it is in ours. Secrets never are.
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from typing import TYPE_CHECKING

from ratelimit_rls.settings.redis_address import parse_redis_address

if TYPE_CHECKING:
    from ratelimit_rls.settings import Settings

LOG_LEVELS = ("panic", "fatal", "error", "warn", "warning", "info", "debug", "trace")

_SOCKET_TYPES = ("tcp", "tcp4", "tcp6", "unix")

_ONE_SINK = (
    "Error: unable to use more than one stats sink at the same time. "
    "Set one of USE_DOG_STATSD, USE_STATSD, USE_PROMETHEUS."
)
_SENTINELS = (
    "Expected master name and a list of urls for the sentinels, in the format: "
    "<redis master name>,<sentinel1>,...,<sentineln>"
)
_NO_EFFECT = {
    "redis_pool_size": "one connection carries every call",
    "redis_pool_on_empty_behavior": "one connection carries every call",
    "redis_pool_on_empty_wait_duration": "RLS_STORE_TIMEOUT bounds how long a call waits",
    "redis_pipeline_window": "calls that arrive together are always sent together",
    "redis_pipeline_limit": "calls that arrive together are always sent together",
    "redis_cluster_pipeline_parallelism": "there are no clusters yet",
    "local_cache_size_in_bytes": "refusals are not remembered outside the store",
}


def refusals(settings: Settings) -> Iterator[str]:
    yield from _logs(settings)
    yield from _grpc(settings)
    yield from _store(settings)
    yield from _redis(settings)
    yield from _later(settings)
    yield from _stats(settings)


def warnings(settings: Settings, environ: frozenset[str] = frozenset()) -> Iterator[str]:
    """`environ` has the names of all variables there are: one that is nearly ours is likely a slip."""
    for name, why in _NO_EFFECT.items():
        if settings.given(name):
            yield f"{name.upper()} has no effect in this version: {why}"
    if settings.rls_transport == "native":
        for name in ("grpc_max_connection_age", "grpc_max_connection_age_grace"):
            if settings.given(name):
                yield f"{name.upper()} has no effect on the native transport; RLS_TRANSPORT=grpcio honours it"
    if settings.log_format.lower() not in ("text", "json"):
        yield f"LOG_FORMAT={settings.log_format!r} is neither text nor json; text is used"
    if not settings.grpc_server_use_tls:
        for name in ("grpc_server_tls_cert", "grpc_client_tls_cacert", "grpc_server_tls_ca_cert"):
            if getattr(settings, name):
                yield f"{name.upper()} has no effect without GRPC_SERVER_USE_TLS=true"
    if settings.redis is None and settings.redis_auth.get_secret_value():
        yield "REDIS_AUTH has no effect without REDIS_URL: the embedded store is used"
    known = sorted(name.upper() for name in type(settings).model_fields if name.startswith("rls_"))
    for name in sorted(environ):
        # Not every RLS_… is meant for us: Kubernetes sets RLS_SERVICE_HOST for a service called rls.
        if name.startswith("RLS_") and name not in known and (near := get_close_matches(name, known, 1, 0.85)):
            yield f"{name} is not a setting; did you mean {near[0]}?"


def _logs(settings: Settings) -> Iterator[str]:
    if settings.log_level.lower() not in LOG_LEVELS:
        yield f"LOG_LEVEL={settings.log_level!r}: Could not parse log level; use {_either(LOG_LEVELS)}"


def _grpc(settings: Settings) -> Iterator[str]:
    cert, key = settings.grpc_server_tls_cert, settings.grpc_server_tls_key
    if cert and not key:
        yield "GRPC_SERVER_TLS_CERT is given without GRPC_SERVER_TLS_KEY; give both or neither"
    if key and not cert:
        yield "GRPC_SERVER_TLS_KEY is given without GRPC_SERVER_TLS_CERT; give both or neither"
    if settings.grpc_server_use_tls and not (cert or key):
        yield "GRPC_SERVER_USE_TLS=true needs GRPC_SERVER_TLS_CERT and GRPC_SERVER_TLS_KEY"
    if settings.rls_workers > 1 and settings.grpc_uds:
        yield "GRPC_UDS cannot be shared by several processes; use GRPC_PORT, or RLS_WORKERS=1"
    if settings.grpc_client_tls_san and not settings.client_ca:
        yield "GRPC_CLIENT_TLS_SAN needs GRPC_CLIENT_TLS_CACERT: a name needs a CA that vouches for it"


def _store(settings: Settings) -> Iterator[str]:
    backend = settings.backend_type
    if backend == "memcache":
        yield (
            "BACKEND_TYPE=memcache is not supported and not planned; use redis with REDIS_URL, "
            "or leave REDIS_URL empty for the embedded store"
        )
    elif backend not in ("redis", ""):
        yield f"BACKEND_TYPE={backend!r}: Invalid setting for BackendType: {backend}; use redis"
    if settings.rls_workers > 1 and not settings.redis_url.get_secret_value():
        yield (
            f"RLS_WORKERS={settings.rls_workers} needs REDIS_URL: the embedded store's counters are one process's own, "
            "so each worker would admit the whole limit"
        )


def _redis(settings: Settings) -> Iterator[str]:
    kind = settings.redis_type.lower()
    url = settings.redis_url.get_secret_value()
    if kind == "sentinel" and url.count(",") == 0:
        yield f"REDIS_URL: {_SENTINELS}"
    if kind in ("cluster", "sentinel"):
        yield f"REDIS_TYPE={settings.redis_type} is not available in this version; use SINGLE with one Redis server"
    elif kind != "single":
        yield f"REDIS_TYPE={settings.redis_type!r}: Unrecognized redis type {settings.redis_type}; use SINGLE"
    elif "," in url:
        yield "REDIS_URL is a list, which is not available in this version; give one Redis server"
    elif url.lower().startswith("rediss://"):
        yield "REDIS_URL asks for TLS (rediss://), which is not available in this version; use redis://"
    elif settings.redis_socket_type not in _SOCKET_TYPES:
        yield f"REDIS_SOCKET_TYPE={settings.redis_socket_type!r} is not a network; use {_either(_SOCKET_TYPES)}"
    elif url:
        try:
            parse_redis_address(url, settings.given_socket_type, settings.redis_auth.get_secret_value())
        except ValueError as fault:
            yield f"REDIS_URL {fault}"
    for name in ("redis_pool_on_empty_behavior", "redis_persecond_pool_on_empty_behavior"):
        value = getattr(settings, name)
        if value.upper() in ("CREATE", "ERROR"):
            yield f"{name.upper()}={value} is not supported; use WAIT or unset it"
    for name in ("redis_cluster_pipeline_parallelism", "redis_persecond_cluster_pipeline_parallelism"):
        if getattr(settings, name) < 0:
            yield f"{name.upper()}={getattr(settings, name)}: redis cluster pipeline parallelism must be >= 0"


def _later(settings: Settings) -> Iterator[str]:
    if settings.config_type == "GRPC_XDS_SOTW":
        yield "CONFIG_TYPE=GRPC_XDS_SOTW: rules over xDS are not available in this version; use FILE"
    elif settings.config_type != "FILE":
        yield (
            f"CONFIG_TYPE={settings.config_type!r}: Invalid setting for ConfigType: {settings.config_type}; use FILE"
        )
    if settings.redis_tls or settings.redis_persecond_tls:
        name = "REDIS_TLS" if settings.redis_tls else "REDIS_PERSECOND_TLS"
        yield f"{name}=true: TLS to Redis is not available in this version; use a plaintext connection"
    if settings.redis_persecond:
        yield "REDIS_PERSECOND=true: a second Redis is not available in this version; unset it, REDIS_URL holds all"
    if settings.use_calendar_month_rate_limit:
        yield "USE_CALENDAR_MONTH_RATE_LIMIT=true is not available in this version; a month is 30 days"
    if settings.tracing_enabled:
        yield "TRACING_ENABLED=true: tracing is not available in this version; unset it"
        if settings.tracing_exporter_protocol not in ("http", "grpc", ""):
            protocol = settings.tracing_exporter_protocol
            yield f"TRACING_EXPORTER_PROTOCOL: Invalid otlptrace client protocol: {protocol}; use http or grpc"


def _stats(settings: Settings) -> Iterator[str]:
    """DISABLE_STATS wins over every sink (reference behaviour); the default of USE_STATSD asks for nothing."""
    if settings.disable_stats:
        return
    statsd = settings.use_statsd and settings.given("use_statsd")
    if statsd + settings.use_dog_statsd + settings.use_prometheus > 1:
        yield _ONE_SINK
    if statsd:
        yield "USE_STATSD=true: statsd is not available in this version; set USE_STATSD=false and read /stats"
    if settings.use_dog_statsd:
        yield "USE_DOG_STATSD=true: DogStatsD is not available in this version; unset it and read /stats"
    if settings.use_prometheus:
        yield "USE_PROMETHEUS=true: Prometheus is not available in this version; unset it and read /stats"


def _either(words: tuple[str, ...]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"
