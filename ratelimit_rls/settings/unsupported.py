"""Variables that have no effect, or whose feature is not supported: of envoyproxy/ratelimit, and our own former ones.

They are parsed to find typing errors, and validation.py rejects the values that cannot be supported.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, Field

from ratelimit_rls.settings.parse import Bool, Duration, Int, TextList


def _check_transport(value: object) -> object:
    if value != "native":
        raise ValueError("is not available: gRPC is served by the native HTTP/2 server; unset RLS_TRANSPORT")
    return value


class CalendarSettings(BaseModel):
    """Calendar for all rules (not supported: use `calendar: true` in a limit)"""

    use_calendar_month_rate_limit: Bool = Field(
        False, description="Use calendar months instead of 30 days, in all rules."
    )


class NoEffectSettings(BaseModel):
    """Without effect (a warning gives the reason)"""

    rls_transport: Annotated[Literal["native"], BeforeValidator(_check_transport)] = Field(
        "native", description="The gRPC server; there is only native."
    )
    redis_pool_size: Int = Field(10, description="Connections to Redis.")
    redis_pool_on_empty_behavior: str = Field("WAIT", description="WAIT; CREATE and ERROR are rejected.")
    redis_pool_on_empty_wait_duration: str = Field(
        "", description="Not used by the code of envoyproxy/ratelimit either."
    )
    redis_pipeline_window: Duration = Field(timedelta(), description="How long to collect commands for a pipeline.")
    redis_pipeline_limit: Int = Field(0, description="How many commands to collect for a pipeline.")
    redis_cluster_pipeline_parallelism: Int = Field(1, description="Parallel pipelines on a cluster.")
    redis_persecond_pool_size: Int = Field(10, description="As REDIS_POOL_SIZE.")
    redis_persecond_pool_on_empty_behavior: str = Field("WAIT", description="As REDIS_POOL_ON_EMPTY_BEHAVIOR.")
    redis_persecond_pipeline_window: Duration = Field(timedelta(), description="As REDIS_PIPELINE_WINDOW.")
    redis_persecond_pipeline_limit: Int = Field(0, description="As REDIS_PIPELINE_LIMIT.")
    redis_persecond_cluster_pipeline_parallelism: Int = Field(1, description="As REDIS_CLUSTER_PIPELINE_PARALLELISM.")


class MemcachedSettings(BaseModel):
    """Memcached (not supported)"""

    memcache_host_port: TextList = Field((), description="Memcached servers.")
    memcache_max_idle_conns: Int = Field(2, description="Idle connections per Memcached server.")
    memcache_srv: str = Field("", description="SRV record to discover Memcached servers with.")
    memcache_srv_refresh: Duration = Field(timedelta(), description="Refresh interval of MEMCACHE_SRV.")
    memcache_tls: Bool = Field(False, description="Use TLS to Memcached.")
    memcache_tls_client_cert: str = Field("", description="File with the client certificate for Memcached.")
    memcache_tls_client_key: str = Field("", description="File with the private key of the client certificate.")
    memcache_tls_cacert: str = Field("", description="File with the CA of Memcached's certificates.")
    memcache_tls_skip_hostname_verification: Bool = Field(
        False, description="Accept any name in Memcached's certificates."
    )
