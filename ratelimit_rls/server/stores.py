"""Construction of the store of a process: the counters, and the layers in front of them.

limiter ─► leases ─► denial cache ─► instrumented ─► Redis    with REDIS_URL
limiter ─► instrumented ─► embedded store                     without

The instrumented store measures calls of the store below it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ratelimit_rls.settings import Settings
from ratelimit_rls.store.base import Store
from ratelimit_rls.store.denial_cache import DenialCache
from ratelimit_rls.store.embedded import EmbeddedStore
from ratelimit_rls.store.instrumented import InstrumentedStore
from ratelimit_rls.store.leases import LeasingStore
from ratelimit_rls.store.redis.factory import AnyRedisStore, new_redis_store
from ratelimit_rls.store.redis.pubsub import InvalidationListener
from ratelimit_rls.store.redis.server_sampler import ServerSampler
from ratelimit_rls.telemetry.instruments import STORE_AVAILABLE
from ratelimit_rls.telemetry.metrics import Metrics
from ratelimit_rls.telemetry.series import Series


@dataclass(frozen=True, slots=True)
class Stores:
    counters: EmbeddedStore | AnyRedisStore
    store: Store  # outermost layer, used by the limiter
    denials: DenialCache | None = None
    invalidation_listener: InvalidationListener | None = None
    server_sampler: ServerSampler | None = None  # of the nodes of Redis

    def rules_changed(self) -> None:
        """Clear the denial cache: entries of the previous rules are never looked up again."""
        if self.denials is not None:
            self.denials.forget_all()

    async def close(self) -> None:
        """Close the layers. Leased hits are returned while the connection is still open."""
        if self.server_sampler is not None:
            await self.server_sampler.close()
        if self.invalidation_listener is not None:
            await self.invalidation_listener.close()
        await self.store.close()


def new_stores(
    settings: Settings,
    metrics: Metrics,
    on_connection: Callable[[bool], None],
    on_unusable: Callable[[str], None],
) -> Stores:
    """Construct without connecting.

    `on_connection` is called when Redis is connected (True) or lost (False); `on_unusable` with the reason when it
    answers but cannot be used, and with "" when it does not answer any more.
    """
    if settings.redis is None:
        once_s = settings.request_id_s
        embedded = EmbeddedStore(settings.rls_embedded_memory_bytes, idempotency_s=once_s)
        metrics.export_values(embedded.gauges)
        metrics.export_series(lambda: [(Series(STORE_AVAILABLE.name, ()), 1)])
        return Stores(embedded, InstrumentedStore(embedded, "embedded", metrics, has_traces=settings.tracing_enabled))
    invalidation_listener: InvalidationListener | None = None

    def connection(up: bool) -> None:
        on_connection(up)
        if invalidation_listener is not None:
            invalidation_listener.on_store_connection(up)

    counters = new_redis_store(settings, connection, on_unusable)
    metrics.export_series(lambda: [(Series(STORE_AVAILABLE.name, ()), int(counters.connected))])
    store: Store = InstrumentedStore(counters, "redis", metrics, has_traces=settings.tracing_enabled)
    denials = None
    if max_bytes := settings.local_cache_size_in_bytes or settings.rls_denial_cache_bytes:
        store = denials = DenialCache(store, max_bytes, skip_over_limit_charges=settings.local_cache_size_in_bytes > 0)
        metrics.export_values(denials.gauges)
        main = counters.realms[0]
        invalidation_listener = InvalidationListener(str(settings.redis), main.pubsub_connect(), main.channel, denials)
    leases = LeasingStore(store)
    metrics.export_values(leases.gauges)
    server_sampler = ServerSampler(counters.realms, settings.rls_redis_info_interval.total_seconds())
    metrics.export_series(server_sampler.measured)
    return Stores(counters, leases, denials, invalidation_listener, server_sampler)
