"""The store of a process, in layers: the counters, and before them what the process knows of them by itself.

service ─► leases ─► remembered refusals ─► Redis        with REDIS_URL
service ─► embedded store                                without
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ratelimit_rls.settings import Settings
from ratelimit_rls.store.base import Store
from ratelimit_rls.store.denials import Denials
from ratelimit_rls.store.embedded import EmbeddedStore
from ratelimit_rls.store.leases import Leases
from ratelimit_rls.store.observed import Observed
from ratelimit_rls.store.redis.new import InRedis, new_redis_store
from ratelimit_rls.store.redis.news import News
from ratelimit_rls.telemetry.collected import Series
from ratelimit_rls.telemetry.instruments import STORE_AVAILABLE
from ratelimit_rls.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Stores:
    counters: EmbeddedStore | InRedis
    store: Store  # what the service asks
    denials: Denials | None = None
    news: News | None = None

    def rules_changed(self) -> None:
        """What was remembered under the rules before will not be asked for again."""
        if self.denials is not None:
            self.denials.forget_all()

    async def close(self) -> None:
        """The store gives back what it holds while it can still be told where."""
        if self.news is not None:
            await self.news.close()
        await self.store.close()


def new_stores(settings: Settings, metrics: Metrics, on_connection: Callable[[bool], None]) -> Stores:
    """Nothing is connected yet. `on_connection` hears of Redis coming and going."""
    if settings.redis is None:
        once_s = settings.request_id_s
        embedded = EmbeddedStore(settings.rls_embedded_memory_bytes, once_s=once_s)
        metrics.watch(embedded.gauges)
        metrics.measure(lambda: [(Series(STORE_AVAILABLE.name, ()), 1)])
        return Stores(embedded, Observed(embedded, "embedded", metrics))
    news: News | None = None

    def connection(up: bool) -> None:
        on_connection(up)
        if news is not None:
            news.store_connection(up)

    counters = new_redis_store(settings, connection)
    metrics.measure(lambda: [(Series(STORE_AVAILABLE.name, ()), int(counters.connected))])
    store: Store = Observed(counters, "redis", metrics)
    denials = None
    if most_bytes := settings.local_cache_size_in_bytes or settings.rls_denial_cache_bytes:
        store = denials = Denials(store, most_bytes, as_the_reference=settings.local_cache_size_in_bytes > 0)
        metrics.watch(denials.gauges)
        main = counters.realms[0]
        news = News(str(settings.redis), main.connect_to_listen(), main.channel, denials)
    leases = Leases(store)
    metrics.watch(leases.gauges)
    return Stores(counters, leases, denials, news)
