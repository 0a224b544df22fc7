"""The variables of what this version does, in groups. A group's docstring is its title in --help and in the docs.

The variable is the field's name in capitals. RLS_… are ours; every other is the reference's, with its meaning.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Literal

from pydantic import BaseModel, Field, SecretStr

from ratelimit_rls.settings.parse import Bool, Count, Duration, FileMode, Float, Int, Port, Positive, TextList

_TOKEN = r"^[!#$%&'*+.^_`|~0-9A-Za-z-]+$"  # noqa: S105 - RFC 9110's word for what a header name is made of

SMALLEST_EMBEDDED_MEMORY_BYTES = 1 << 20


class RulesSettings(BaseModel):
    """Rules"""

    rls_rules: TextList = Field((), description="Files or directories to read rules from, in place of RUNTIME_*.")
    runtime_root: str = Field("/srv/runtime_data/current", description="Directory above the rules; may be a link.")
    runtime_subdirectory: str = Field("", description="Directory below RUNTIME_ROOT.")
    runtime_appdirectory: str = Field("config", description="Directory below that: where the rules files are.")
    runtime_ignoredotfiles: Bool = Field(False, description="Skip files and directories whose name starts with a dot.")
    runtime_watch_root: Bool = Field(True, description="Take files beside it whose names start so, too.")
    config_type: str = Field(
        "FILE", description="Where rules come from: FILE, or GRPC_XDS_SOTW (a stream for each of RLS_WORKERS)."
    )
    merge_domain_config: Bool = Field(False, description="Several files may add to one domain.")
    force_start_without_initial_config: Bool = Field(False, description="Serve before the first rules are loaded.")
    healthy_with_at_least_one_config_loaded: Bool = Field(False, description="Unhealthy until some domain has rules.")


class GrpcSettings(BaseModel):
    """gRPC"""

    grpc_host: str = Field("0.0.0.0", description="Address the gRPC server listens on.")
    grpc_port: Port = Field(8081, description="Port of the gRPC server; 0 takes a free one.")
    grpc_uds: str = Field("", description="Unix socket to listen on, in place of GRPC_HOST and GRPC_PORT.")
    rls_grpc_uds_mode: FileMode = Field("", description="Its permissions, e.g. 0660; empty: by the process's umask.")
    grpc_server_use_tls: Bool = Field(False, description="TLS on the gRPC server.")
    grpc_server_tls_cert: str = Field("", description="File with the server's certificate chain (PEM); reloaded.")
    grpc_server_tls_key: str = Field("", description="File with the server's private key (PEM); reloaded.")
    grpc_client_tls_cacert: str = Field("", description="File with the CA (PEM) that must vouch for every client.")
    grpc_server_tls_ca_cert: str = Field("", description="The same, under the name Envoy Gateway gives it.")
    grpc_client_tls_san: TextList = Field((), description="DNS names, one of which a client's certificate must have.")
    grpc_max_connection_age: Duration = Field(
        timedelta(hours=24), description="Ask a client to reconnect after this long."
    )
    grpc_max_connection_age_grace: Duration = Field(
        timedelta(hours=1), description="And cut it off after this much more."
    )
    rls_transport: Literal["native", "grpcio"] = Field("native", description="gRPC server: native or grpcio.")
    rls_workers: Positive = Field(1, description="Processes that share the gRPC port; more than one needs Redis.")
    rls_max_concurrent_streams: Positive = Field(1024, description="Calls in flight on one connection, at most.")
    rls_plan_cache_bytes: Count = Field(160 << 20, description="Memory for what was worked out per request; 0: none.")
    rls_max_held_calls: Count = Field(10_000, description="Calls that `action: throttle` may hold at once; 0: none.")
    rls_deadline_margin: Duration = Field(
        timedelta(milliseconds=3), description="Every call is answered this long before its caller's deadline."
    )
    rls_ext_authz_domain: str = Field(
        "", description="Domain that decides ext_authz checks that name none; empty: the only one with `ext_authz`."
    )
    rls_drain_delay: Duration = Field(
        timedelta(seconds=5), description="After SIGTERM, serve on for this long while health says NOT_SERVING."
    )
    rls_drain_timeout: Duration = Field(
        timedelta(seconds=30), description="Then wait at most this long for calls in flight."
    )
    rls_runtime_dir: str = Field("", description="Directory for internal sockets; empty: the first that is writable.")


class HttpSettings(BaseModel):
    """HTTP"""

    host: str = Field("0.0.0.0", description="Address of /json and /healthcheck.")
    port: Port = Field(8080, description="Port of /json and /healthcheck; 0 takes a free one.")
    debug_host: str = Field("0.0.0.0", description="Address of /rlconfig and /stats.")
    debug_port: Port = Field(6070, description="Port of /rlconfig and /stats; 0 takes a free one.")


class StoreSettings(BaseModel):
    """Store"""

    rls_store_timeout: Duration = Field(
        timedelta(seconds=1),
        gt=timedelta(),
        description="For an answer of the store, at most; a caller's shorter deadline ends its call sooner.",
    )
    rls_embedded_memory_bytes: Int = Field(
        256 << 20, ge=SMALLEST_EMBEDDED_MEMORY_BYTES, description="Memory for the counters of the embedded store."
    )
    backend_type: str = Field("redis", description="redis; without REDIS_URL the embedded store is used.")
    cache_key_prefix: str = Field("", description="Put before every key in Redis.")
    expiration_jitter_max_seconds: Count = Field(
        300, le=32_768, description="Added at random to how long Redis keeps a key; 0: nothing."
    )
    stop_cache_key_increment_when_overlimit: Bool = Field(
        False, description="A refused call charges nothing: `charge: admitted` for rules that do not say."
    )
    rls_denial_cache_bytes: Count = Field(
        16 << 20, description="Memory for refusals that still hold, answered without Redis; 0: none."
    )
    local_cache_size_in_bytes: Count = Field(
        0, description="If not 0: that memory, which then holds refusals of `charge: always`, too."
    )
    rls_request_id_entry: str = Field(
        "", description="Key of a descriptor entry with a request id: retries of it are counted once."
    )
    rls_request_id_metadata: str = Field("", description="The same, from the gRPC metadata of a call.")
    rls_request_id_ttl: Duration = Field(
        timedelta(minutes=5),
        gt=timedelta(),
        le=timedelta(hours=18),
        description="How long a request id is remembered; at most 18h.",
    )
    rls_hot_key_rate: Count = Field(
        1000, description="A counter asked for so many times a second is reported as hot; 0: never."
    )


class RedisSettings(BaseModel):
    """Redis"""

    redis_url: SecretStr = Field(
        SecretStr(""), description="Address; node,node,… (cluster); name,sentinel,…; empty: counters in this process."
    )
    redis_type: str = Field("SINGLE", description="SINGLE, CLUSTER or SENTINEL; when not given, taken from REDIS_URL.")
    redis_socket_type: str = Field("unix", description="tcp or unix; when not given, taken from REDIS_URL.")
    redis_auth: SecretStr = Field(SecretStr(""), description="password or user:password; wins over REDIS_URL's.")
    redis_auth_file: str = Field("", description="File with what REDIS_AUTH would have; read at every connection.")
    redis_sentinel_auth: SecretStr = Field(
        SecretStr(""), description="password or user:password for the sentinels; wins over REDIS_URL's."
    )
    redis_tls: Bool = Field(False, description="TLS to Redis and its sentinels, as rediss:// in REDIS_URL.")
    redis_tls_cacert: str = Field("", description="File with a CA (PEM) trusted beside the system's; read anew.")
    redis_tls_client_cert: str = Field("", description="File with the certificate (PEM) shown to Redis; read anew.")
    redis_tls_client_key: str = Field("", description="File with its private key (PEM); read anew.")
    redis_tls_skip_hostname_verification: Bool = Field(False, description="Accept any name in Redis's certificate.")
    redis_timeout: Duration = Field(timedelta(seconds=10), gt=timedelta(), description="To connect to Redis, at most.")
    redis_startup_initial_interval: Duration = Field(
        timedelta(seconds=1), description="First wait between attempts to connect at start."
    )
    redis_startup_max_interval: Duration = Field(
        timedelta(seconds=30), description="Longest wait between attempts to connect at start."
    )
    redis_startup_max_elapsed_time: Duration = Field(
        timedelta(), description="Give up starting when Redis is not there for this long; 0: never."
    )
    redis_health_check_active_connection: Bool = Field(
        False, description="Unhealthy while there is no connection to Redis."
    )


class PerSecondSettings(BaseModel):
    """A second Redis for limits per second"""

    redis_persecond: Bool = Field(False, description="Limits per second are counted on a Redis of their own.")
    redis_persecond_url: SecretStr = Field(SecretStr(""), description="As REDIS_URL.")
    redis_persecond_type: str = Field("SINGLE", description="As REDIS_TYPE.")
    redis_persecond_socket_type: str = Field("unix", description="As REDIS_SOCKET_TYPE.")
    redis_persecond_auth: SecretStr = Field(SecretStr(""), description="As REDIS_AUTH.")
    redis_persecond_auth_file: str = Field("", description="As REDIS_AUTH_FILE.")
    redis_persecond_sentinel_auth: SecretStr = Field(SecretStr(""), description="As REDIS_SENTINEL_AUTH.")
    redis_persecond_tls: Bool = Field(False, description="As REDIS_TLS; the files are those of REDIS_TLS_….")
    redis_persecond_timeout: Duration = Field(timedelta(seconds=10), gt=timedelta(), description="As REDIS_TIMEOUT.")


class FailureSettings(BaseModel):
    """When the store does not answer"""

    rls_failure_mode: Literal["allow", "deny", "local", "error"] = Field(
        "error", description="What a call is told whose rules have no `on_store_failure`."
    )
    rls_replicas: Positive = Field(
        1, description="Replicas of the service that share a limit under `local` (times RLS_WORKERS)."
    )
    rls_max_in_flight: Positive = Field(10_000, description="Calls of one process that wait for the store, at most.")
    rls_wait_for_redis: Bool = Field(
        True, description="At start, wait for Redis; false: serve without it until it is there."
    )


class AnswerSettings(BaseModel):
    """Answers"""

    shadow_mode: Bool = Field(False, description="Count everything, refuse nothing.")
    quota_mode: Bool = Field(False, description="Treat every limit as a quota.")
    near_limit_ratio: Float = Field(0.8, description="Share of a limit above which hits count as near_limit.")
    response_dynamic_metadata: Bool = Field(False, description="Send dynamic metadata with every answer.")
    limit_response_headers_enabled: Bool = Field(False, description="Send the three headers below.")
    limit_limit_header: str = Field("RateLimit-Limit", pattern=_TOKEN, description="Header with the limit.")
    limit_remaining_header: str = Field(
        "RateLimit-Remaining", pattern=_TOKEN, description="Header with what is left of it."
    )
    limit_reset_header: str = Field("RateLimit-Reset", pattern=_TOKEN, description="Header with the seconds to reset.")


class LogSettings(BaseModel):
    """Logs"""

    log_level: str = Field("WARN", description="panic, fatal, error, warn, info, debug or trace.")
    log_format: str = Field("text", description="text or json.")
    rls_log_denials: Count = Field(1, description="Refusals logged at info in a second, at most, each with its rule.")
