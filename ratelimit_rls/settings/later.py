"""The reference's variables without a feature behind them here: of features that come later, and of none at all.

They are parsed, so that a typing error is found, and refusals.py says which of their values cannot be used.
"""

from __future__ import annotations

from datetime import timedelta

from pydantic import BaseModel, Field

from ratelimit_rls.settings.parse import Bool, Duration, Int, TextList


class CalendarSettings(BaseModel):
    """Calendar (not in this version)"""

    use_calendar_month_rate_limit: Bool = Field(False, description="Months of the calendar in place of 30 days.")


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
