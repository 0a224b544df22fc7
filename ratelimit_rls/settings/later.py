"""The reference's variables without a feature behind them here: of features that come later, and of none at all.

They are parsed, so that a typing error is found, and refusals.py says which of their values cannot be used.
"""

from __future__ import annotations

from datetime import timedelta

from pydantic import BaseModel, Field

from ratelimit_rls.settings.parse import Bool, Count, Duration, Float, Int, Port, TextList, TextMap

_SECONDS = timedelta(seconds=1)


class CalendarSettings(BaseModel):
    """Calendar (not in this version)"""

    use_calendar_month_rate_limit: Bool = Field(False, description="Months of the calendar in place of 30 days.")


class StatsSettings(BaseModel):
    """Statistics (not in this version; /stats on DEBUG_PORT has the counters)"""

    use_statsd: Bool = Field(True, description="Send to statsd; this default does nothing here.")
    statsd_host: str = Field("localhost", description="Host of statsd or DogStatsD.")
    statsd_port: Port = Field(8125, description="Port of statsd or DogStatsD.")
    statsd_protocol: str = Field("tcp", description="tcp or udp.")
    use_dog_statsd: Bool = Field(False, description="Send to DogStatsD.")
    use_dog_statsd_mogrifiers: TextList = Field((), description="Names of DOG_STATSD_MOGRIFIER_<NAME>_… groups.")
    use_prometheus: Bool = Field(False, description="Serve Prometheus metrics.")
    prometheus_addr: str = Field(":9090", description="Address of the metrics.")
    prometheus_path: str = Field("/metrics", description="Path of the metrics.")
    prometheus_mapper_yaml: str = Field("", description="File with a statsd_exporter mapping.")
    prometheus_response_time_as_milliseconds: Bool = Field(False, description="Response times in milliseconds.")
    extra_tags: TextMap = Field({}, description="key:value,… added to every metric.")
    stats_flush_interval: Duration = Field(10 * _SECONDS, description="Between two sendings.")
    disable_stats: Bool = Field(False, description="Send nothing.")


class TracingSettings(BaseModel):
    """Tracing (not in this version)"""

    tracing_enabled: Bool = Field(False, description="Send traces by OTLP, as OTEL_EXPORTER_OTLP_* say.")
    tracing_service_name: str = Field("RateLimit", description="service.name")
    tracing_service_namespace: str = Field("", description="service.namespace")
    tracing_service_instance_id: str = Field("", description="service.instance.id; empty: random.")
    tracing_exporter_protocol: str = Field("http", description="http or grpc.")
    tracing_sampling_rate: Float = Field(1.0, description="Share of traces that are kept.")


class XdsSettings(BaseModel):
    """Rules over xDS (not in this version)"""

    config_grpc_xds_node_id: str = Field("default", description="node.id")
    config_grpc_xds_node_metadata: str = Field("", description="node.metadata: key=value,…")
    config_grpc_xds_server_url: str = Field("localhost:18000", description="Where the xDS server is.")
    config_grpc_xds_server_connect_retry_interval: Duration = Field(3 * _SECONDS, description="Between two attempts.")
    config_grpc_xds_client_additional_headers: TextMap = Field(
        {}, repr=False, description="key:value,… sent as gRPC metadata."
    )
    config_grpc_xds_server_use_tls: Bool = Field(False, description="TLS to the xDS server.")
    config_grpc_xds_client_tls_cert: str = Field("", description="File with the certificate shown to it.")
    config_grpc_xds_client_tls_key: str = Field("", description="File with its private key.")
    config_grpc_xds_server_tls_cacert: str = Field("", description="File with the CA of its certificate.")
    config_grpc_xds_server_tls_san: str = Field("", description="Name to expect in its certificate.")
    xds_client_backoff_initial_interval: Duration = Field(10 * _SECONDS, description="First wait after a failure.")
    xds_client_backoff_max_interval: Duration = Field(60 * _SECONDS, description="Longest wait after a failure.")
    xds_client_backoff_random_factor: Float = Field(0.5, description="By which the wait grows.")
    xds_client_backoff_jitter: Bool = Field(True, description="Vary the wait.")
    xds_client_max_msg_size_in_bytes: Count = Field(0, description="Longest message; 0: 4 MiB.")


class NoEffectSettings(BaseModel):
    """Without effect here (each is answered with a warning that says why)"""

    redis_pool_size: Int = Field(10, description="Connections to Redis.")
    redis_pool_on_empty_behavior: str = Field("WAIT", description="WAIT; CREATE and ERROR are refused.")
    redis_pool_on_empty_wait_duration: str = Field("", description="Unknown to the reference's code, too.")
    redis_pipeline_window: Duration = Field(timedelta(), description="How long to gather commands.")
    redis_pipeline_limit: Int = Field(0, description="How many commands to gather.")
    redis_cluster_pipeline_parallelism: Int = Field(1, description="Pipelines at a time on a cluster.")
    redis_persecond_pool_size: Int = Field(10, description="As REDIS_POOL_SIZE.")
    redis_persecond_pool_on_empty_behavior: str = Field("WAIT", description="As REDIS_POOL_ON_EMPTY_BEHAVIOR.")
    redis_persecond_pipeline_window: Duration = Field(timedelta(), description="As REDIS_PIPELINE_WINDOW.")
    redis_persecond_pipeline_limit: Int = Field(0, description="As REDIS_PIPELINE_LIMIT.")
    redis_persecond_cluster_pipeline_parallelism: Int = Field(1, description="As REDIS_CLUSTER_PIPELINE_PARALLELISM.")


class MemcachedSettings(BaseModel):
    """Memcached (not planned)"""

    memcache_host_port: TextList = Field((), description="Servers.")
    memcache_max_idle_conns: Int = Field(2, description="Idle connections to each.")
    memcache_srv: str = Field("", description="SRV record to find servers by.")
    memcache_srv_refresh: Duration = Field(timedelta(), description="Between two look-ups of it.")
    memcache_tls: Bool = Field(False, description="TLS to them.")
    memcache_tls_client_cert: str = Field("", description="File with the certificate shown to them.")
    memcache_tls_client_key: str = Field("", description="File with its private key.")
    memcache_tls_cacert: str = Field("", description="File with the CA of their certificates.")
    memcache_tls_skip_hostname_verification: Bool = Field(False, description="Accept any name in them.")
