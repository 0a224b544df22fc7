"""Groups of variables. The docstring of a group is its title in --help and in the docs.

The name of a variable is the field's name in upper case. RLS_… are our own; all others are those of
envoyproxy/ratelimit, with the same meaning.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Literal

from pydantic import BaseModel, Field, SecretStr

from ratelimit_rls.settings.parse import (
    Bool,
    Count,
    Duration,
    FileMode,
    Float,
    Int,
    Port,
    Positive,
    TextList,
    applies_unset,
)

_TOKEN = r"^[!#$%&'*+.^_`|~0-9A-Za-z-]+$"  # noqa: S105 - "token" in RFC 9110: a header name

_FROM_URL = applies_unset("derived from REDIS_URL")
_FROM_SECOND_URL = applies_unset("derived from REDIS_PERSECOND_URL")

MIN_EMBEDDED_MEMORY_BYTES = 1 << 20
MAX_MESSAGE_BYTES = 4 << 20
MIN_ENTRY_BYTES = 128
"""Minimum of RLS_MAX_ENTRY_BYTES: texts of up to 127 bytes are decoded without checking the bound."""


class RulesSettings(BaseModel):
    """Rules"""

    rls_rules: TextList = Field((), description="Files or directories with the rules; replaces RUNTIME_*.")
    runtime_root: str = Field(
        "/srv/runtime_data/current", description="Root directory of the rules; may be a symbolic link."
    )
    runtime_subdirectory: str = Field("", description="Directory below RUNTIME_ROOT.")
    runtime_appdirectory: str = Field("config", description="Directory of the rules files, below RUNTIME_SUBDIRECTORY.")
    runtime_ignoredotfiles: Bool = Field(False, description="Skip files and directories whose name starts with a dot.")
    runtime_watch_root: Bool = Field(
        True,
        description="Also load files beside the directory RUNTIME_APPDIRECTORY whose names start with its name and a "
        "dot.",
    )
    config_type: str = Field("FILE", description="Source of the rules: FILE, or GRPC_XDS_SOTW (one stream per worker).")
    merge_domain_config: Bool = Field(False, description="Merge files that define the same domain.")
    force_start_without_initial_config: Bool = Field(False, description="Serve before the first rules are loaded.")
    healthy_with_at_least_one_config_loaded: Bool = Field(False, description="Unhealthy until a domain has rules.")


class GrpcSettings(BaseModel):
    """gRPC"""

    grpc_host: str = Field("0.0.0.0", description="Address the gRPC server listens on.")
    grpc_port: Port = Field(8081, description="Port of the gRPC server; 0 takes a free one.")
    grpc_uds: str = Field("", description="Unix socket to listen on; replaces GRPC_HOST and GRPC_PORT.")
    rls_grpc_uds_mode: FileMode = Field("", description="Permissions of Unix sockets, e.g. 0660; empty: by the umask.")
    grpc_server_use_tls: Bool = Field(False, description="Use TLS on the gRPC server.")
    grpc_server_tls_cert: str = Field("", description="File with the server's certificate chain (PEM); reloaded.")
    grpc_server_tls_key: str = Field("", description="File with the server's private key (PEM); reloaded.")
    grpc_client_tls_cacert: str = Field(
        "", description="File with the CA (PEM) of client certificates, which become required."
    )
    grpc_server_tls_ca_cert: str = Field("", description="As GRPC_CLIENT_TLS_CACERT; the name that Envoy Gateway uses.")
    grpc_server_tls_crl: str = Field(
        "", description="File with CRLs (PEM) of the client CA; reloaded. Empty: no check."
    )
    grpc_client_tls_san: TextList = Field(
        (), description="DNS names and SPIFFE IDs; a client certificate must have one of them."
    )
    grpc_max_connection_age: Duration = Field(
        timedelta(hours=24), description="Ask a client to reconnect after this long."
    )
    grpc_max_connection_age_grace: Duration = Field(
        timedelta(hours=1), description="Close the connection this long after asking to reconnect."
    )
    rls_workers: Positive = Field(1, description="Number of processes that share the ports; more than one needs Redis.")
    rls_max_concurrent_streams: Positive = Field(1024, description="Maximum calls in flight per connection.")
    rls_grpc_max_connections: Count = Field(4096, description="Maximum connections to the gRPC port; 0: no bound.")
    rls_grpc_max_connections_per_peer: Count = Field(
        2048, description="Maximum gRPC connections per IPv4 address or IPv6 /64 network; 0: no bound."
    )
    rls_grpc_max_streams: Positive = Field(
        65_536,
        description="Maximum open calls of a process. Above it, calls whose client has not sent or read everything are "
        "reset; then connections may open fewer.",
    )
    rls_grpc_max_unfinished_bytes: Positive = Field(
        32 << 20,
        description="Memory for unfinished input; beyond it, the peer with the most loses a connection.",
    )
    rls_grpc_message_timeout: Duration = Field(
        timedelta(seconds=15),
        gt=timedelta(),
        description="Reset a call whose message stays incomplete, or whose response stays unread, for this long (at "
        "most twice as long).",
    )
    rls_grpc_keepalive_time: Duration = Field(
        timedelta(minutes=5), description="Send a PING to a client that was idle for this long; 0s: never."
    )
    rls_grpc_keepalive_timeout: Duration = Field(
        timedelta(seconds=20), gt=timedelta(), description="Close a connection if a PING is not acknowledged in time."
    )
    rls_max_calls_per_second: Count = Field(0, description="Maximum calls per second of a process; 0: no limit.")
    rls_max_calls_per_second_per_peer: Count = Field(
        0, description="Maximum calls per second per IPv4 address or IPv6 /64 network; 0: no limit."
    )
    rls_plan_cache_bytes: Count = Field(160 << 20, description="Memory for the cache of planned requests; 0: no cache.")
    rls_max_held_calls: Count = Field(10_000, description="Maximum calls delayed by `action: throttle`; 0: none.")
    rls_deadline_margin: Duration = Field(
        timedelta(milliseconds=3), description="Respond at least this long before the caller's deadline."
    )
    rls_ext_authz_domain: str = Field(
        "", description="Default domain of ext_authz checks; empty: the only one with `ext_authz`."
    )
    rls_limiter_domain: str = Field("", description="Default domain of calls to the gRPC service RateLimiter.")
    rls_drain_delay: Duration = Field(
        timedelta(seconds=5), description="After SIGTERM, keep serving this long while health is NOT_SERVING."
    )
    rls_drain_timeout: Duration = Field(
        timedelta(seconds=30), description="After RLS_DRAIN_DELAY, wait at most this long for calls in flight."
    )
    rls_runtime_dir: str = Field("", description="Directory for internal sockets; empty: the first writable one.")


class HttpSettings(BaseModel):
    """HTTP"""

    host: str = Field("0.0.0.0", description="Address of /json and /healthcheck.")
    port: Port = Field(8080, description="Port of /json and /healthcheck; 0 takes a free one.")
    debug_host: str = Field("0.0.0.0", description="Address of /rlconfig and /stats.")
    debug_port: Port = Field(6070, description="Port of /rlconfig and /stats; 0 takes a free one.")
    rls_http_json: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Serve /json. auto: on, unless gRPC requires client certificates and the HTTP port is TCP without "
        "a required token or certificate.",
    )
    rls_http_allowed_hosts: TextList = Field(
        (),
        description="Allowed Host headers besides addresses and internal names; *.domain, or * for all.",
    )
    rls_http_token: SecretStr = Field(
        SecretStr(""), description="Bearer token required by /json, debug and metrics, but not by health."
    )
    rls_http_token_file: str = Field("", description="File with the value of RLS_HTTP_TOKEN; reloaded.")
    rls_http_tls: Bool = Field(
        False, description="Use TLS on all HTTP ports, with GRPC_SERVER_TLS_CERT and GRPC_SERVER_TLS_KEY."
    )
    rls_http_client_cert: Bool = Field(
        False,
        description="Require a client certificate (as gRPC does) or RLS_HTTP_TOKEN on HTTP ports, except for health "
        "checks.",
    )
    rls_http_uds: str = Field("", description="Unix socket of /json and /healthcheck; replaces HOST and PORT.")
    rls_debug_uds: str = Field("", description="Unix socket of the debug port; replaces DEBUG_HOST and DEBUG_PORT.")
    rls_http_max_connections: Count = Field(1024, description="Maximum connections to each HTTP port; 0: no bound.")
    rls_http_max_connections_per_peer: Count = Field(
        256, description="Maximum HTTP connections per IPv4 address or IPv6 /64 network; 0: no bound."
    )
    rls_hot_key_values: Bool = Field(
        False, description="Show descriptor values in /hot and `top`; false: show digests."
    )


class MessageSettings(BaseModel):
    """Messages"""

    rls_max_descriptors: Int = Field(256, ge=1, le=1024, description="Maximum descriptors in a RateLimitRequest.")
    rls_max_entries: Int = Field(
        1024, ge=1, le=1 << 16, description="Maximum entries in all descriptors of a RateLimitRequest."
    )
    rls_max_entry_bytes: Int = Field(
        1 << 16,
        ge=MIN_ENTRY_BYTES,
        le=MAX_MESSAGE_BYTES,
        description="Maximum size of a key or value, or of a text in an ext_authz Check except the body.",
    )
    rls_max_message_bytes: Int = Field(
        1 << 19,
        ge=1 << 10,
        le=MAX_MESSAGE_BYTES,
        description="Maximum size of a RateLimitRequest, compressed or not; 4 MiB for an ext_authz Check.",
    )
    rls_max_check_fields: Int = Field(
        8192, ge=100, le=1 << 20, description="Maximum protobuf fields in an ext_authz Check; a header has three."
    )
    rls_max_json_bytes: Int = Field(
        1 << 16, ge=1 << 10, le=MAX_MESSAGE_BYTES, description="Maximum size of the body of a request to /json."
    )


class StoreSettings(BaseModel):
    """Store"""

    rls_store_timeout: Duration = Field(
        timedelta(seconds=1),
        gt=timedelta(),
        description="Timeout for a reply of the store; a caller's earlier deadline ends its call sooner.",
    )
    rls_batch_window: Duration = Field(
        timedelta(),
        le=timedelta(milliseconds=2),
        description="Time for which calls may wait for others while some are decided, to share a batch; at most 2ms.",
    )
    rls_embedded_memory_bytes: Int = Field(
        256 << 20, ge=MIN_EMBEDDED_MEMORY_BYTES, description="Memory for the counters of the embedded store."
    )
    backend_type: str = Field(
        "redis", description="Only redis is supported; without REDIS_URL the embedded store is used."
    )
    cache_key_prefix: str = Field("", description="Prefix of all keys in Redis.")
    expiration_jitter_max_seconds: Count = Field(
        300, le=32_768, description="Maximum random addition to the TTL of keys in Redis; 0: none."
    )
    stop_cache_key_increment_when_overlimit: Bool = Field(
        False, description="Make `charge: admitted` the default of all rules: denied calls charge nothing."
    )
    rls_denial_cache_bytes: Count = Field(
        16 << 20, description="Memory for the cache of denials, which saves calls to Redis; 0: no cache."
    )
    local_cache_size_in_bytes: Count = Field(
        0, description="If > 0, replaces RLS_DENIAL_CACHE_BYTES and also caches `charge: always`."
    )
    rls_request_id_entry: str = Field(
        "", description="Key of a descriptor entry with a request id; a retry with the same id is not counted again."
    )
    rls_request_id_metadata: str = Field(
        "", description="Name of gRPC metadata with a request id; a retry with the same id is not counted again."
    )
    rls_request_id_ttl: Duration = Field(
        timedelta(minutes=5),
        gt=timedelta(),
        le=timedelta(hours=18),
        description="How long a request id is remembered; at most 18h.",
    )
    rls_hot_key_rate: Count = Field(
        1000, description="Report a counter as hot from this many uses per second; 0: never."
    )


class RedisSettings(BaseModel):
    """Redis"""

    redis_url: SecretStr = Field(
        SecretStr(""), description="Address; node,node,… (cluster); name,sentinel,…; empty: the embedded store."
    )
    redis_type: str = Field("SINGLE", description="SINGLE, CLUSTER or SENTINEL.", json_schema_extra=_FROM_URL)
    redis_socket_type: str = Field("unix", description="tcp or unix.", json_schema_extra=_FROM_URL)
    redis_auth: SecretStr = Field(SecretStr(""), description="password or user:password; replaces that in REDIS_URL.")
    redis_auth_file: str = Field("", description="File with the value of REDIS_AUTH; read for each new connection.")
    redis_sentinel_auth: SecretStr = Field(
        SecretStr(""), description="password or user:password for the sentinels; replaces that in REDIS_URL."
    )
    redis_tls: Bool = Field(False, description="Use TLS to Redis and its sentinels, as with rediss://.")
    redis_tls_cacert: str = Field(
        "", description="File with an additional CA (PEM) to trust; read for each new connection."
    )
    redis_tls_client_cert: str = Field(
        "", description="File with the client certificate (PEM); read for each new connection."
    )
    redis_tls_client_key: str = Field(
        "", description="File with the client's private key (PEM); read for each new connection."
    )
    redis_tls_skip_hostname_verification: Bool = Field(False, description="Accept any name in Redis's certificate.")
    redis_timeout: Duration = Field(
        timedelta(seconds=10), gt=timedelta(), description="Timeout for connecting to Redis."
    )
    redis_startup_initial_interval: Duration = Field(
        timedelta(seconds=1), description="First wait between attempts to connect at start."
    )
    redis_startup_max_interval: Duration = Field(
        timedelta(seconds=30), description="Longest wait between attempts to connect at start."
    )
    redis_startup_max_elapsed_time: Duration = Field(
        timedelta(), description="Stop trying to start if Redis is unavailable for this long; 0s: never."
    )
    redis_health_check_active_connection: Bool = Field(False, description="Unhealthy while not connected to Redis.")
    rls_redis_info_interval: Duration = Field(
        timedelta(seconds=15),
        description="Interval at which INFO is read from each Redis node, for its metrics; 0s: never.",
    )


class PerSecondSettings(BaseModel):
    """A second Redis for limits per second"""

    redis_persecond: Bool = Field(False, description="Count limits per second on a second Redis.")
    redis_persecond_url: SecretStr = Field(SecretStr(""), description="As REDIS_URL.")
    redis_persecond_type: str = Field("SINGLE", description="As REDIS_TYPE.", json_schema_extra=_FROM_SECOND_URL)
    redis_persecond_socket_type: str = Field(
        "unix", description="As REDIS_SOCKET_TYPE.", json_schema_extra=_FROM_SECOND_URL
    )
    redis_persecond_auth: SecretStr = Field(SecretStr(""), description="As REDIS_AUTH.")
    redis_persecond_auth_file: str = Field("", description="As REDIS_AUTH_FILE.")
    redis_persecond_sentinel_auth: SecretStr = Field(SecretStr(""), description="As REDIS_SENTINEL_AUTH.")
    redis_persecond_tls: Bool = Field(False, description="As REDIS_TLS; the files are those of REDIS_TLS_….")
    redis_persecond_timeout: Duration = Field(timedelta(seconds=10), gt=timedelta(), description="As REDIS_TIMEOUT.")


class FailureSettings(BaseModel):
    """Store failures"""

    rls_failure_mode: Literal["allow", "deny", "local", "error"] = Field(
        "error", description="Decision without the store, for rules without `on_store_failure`."
    )
    rls_replicas: Positive = Field(
        1, description="Replicas of the service that share a limit with `local` (times RLS_WORKERS)."
    )
    rls_max_in_flight: Positive = Field(10_000, description="Maximum calls of a process waiting for the store.")
    rls_wait_for_redis: Bool = Field(
        True, description="Wait for Redis at start; false: serve without it until it is available."
    )


class ResponseSettings(BaseModel):
    """Responses"""

    shadow_mode: Bool = Field(False, description="Count everything, deny nothing.")
    quota_mode: Bool = Field(
        False, description="Treat every limit as a quota: a call is denied only when all its quotas are exhausted."
    )
    near_limit_ratio: Float = Field(0.8, description="Fraction of a limit above which hits count as near_limit.")
    response_dynamic_metadata: Bool = Field(False, description="Send dynamic metadata with every response.")
    limit_response_headers_enabled: Bool = Field(False, description="Send the headers named by LIMIT_*_HEADER.")
    limit_limit_header: str = Field("RateLimit-Limit", pattern=_TOKEN, description="Header with the limit.")
    limit_remaining_header: str = Field(
        "RateLimit-Remaining", pattern=_TOKEN, description="Header with the remaining hits."
    )
    limit_reset_header: str = Field(
        "RateLimit-Reset", pattern=_TOKEN, description="Header with the seconds until reset."
    )


class LogSettings(BaseModel):
    """Logs"""

    log_level: str = Field("INFO", description="panic, fatal, error, warn, info, debug or trace.")
    log_format: str = Field("text", description="text or json.")
    rls_log_denials: Count = Field(0, description="Maximum denials logged per second, at info, each with its rule.")
