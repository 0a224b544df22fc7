"""Factory of the Redis store that the settings describe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ratelimit_rls.settings import Settings
from ratelimit_rls.settings.redis_address import RedisServers
from ratelimit_rls.store.redis.cluster import Cluster
from ratelimit_rls.store.redis.deployment import Deployment, SingleNode
from ratelimit_rls.store.redis.script_node import RedisOptions
from ratelimit_rls.store.redis.sharded_store import ShardedStore
from ratelimit_rls.store.redis.store import RedisStore

AnyRedisStore = RedisStore | ShardedStore


def new_redis_store(
    settings: Settings,
    on_connection: Callable[[bool], None] = lambda connected: None,
    on_unusable: Callable[[str], None] = lambda reason: None,
    *,
    must_write: bool = True,
) -> AnyRedisStore:
    """Return a store that is not connected yet. `settings.redis` must be set.

    `must_write` is False for commands that only inspect or delete counters.
    """
    import ratelimit_rls.store.redis.redis_py  # noqa: F401, slow to import: do it now, and not while calls wait

    assert settings.redis is not None
    options = RedisOptions(
        timeout_s=settings.rls_store_timeout.total_seconds(),
        connect_timeout_s=settings.redis_timeout.total_seconds(),
        jitter_ms=settings.expiration_jitter_max_seconds * 1000,
        idempotency_s=settings.request_id_s,
        key_prefix=settings.cache_key_prefix.encode(),
        must_write=must_write,
        on_connection=on_connection,
        on_unusable=on_unusable,
    )
    connect_timeout_s = settings.redis_persecond_timeout.total_seconds()
    return redis_store(
        settings.redis, settings.redis_persecond_servers, options, per_second_connect_timeout_s=connect_timeout_s
    )


def redis_store(
    main: RedisServers,
    per_second: RedisServers | None,
    options: RedisOptions,
    *,
    per_second_connect_timeout_s: float | None = None,
) -> AnyRedisStore:
    if main.kind != "cluster" and per_second is None:
        return RedisStore(SingleNode(main, options))
    if per_second is None:
        return ShardedStore(_deployment(main, options))
    both = _CombinedConnection(options.on_connection)
    connect_timeout_s = per_second_connect_timeout_s or options.connect_timeout_s
    return ShardedStore(
        _deployment(main, replace(options, on_connection=partial(both.update, "main"))),
        _deployment(
            per_second,
            replace(options, on_connection=partial(both.update, "per second"), connect_timeout_s=connect_timeout_s),
        ),
    )


class _CombinedConnection:
    """The status of two deployments that count as connected only together."""

    def __init__(self, on_connection: Callable[[bool], None]) -> None:
        self._on_connection = on_connection
        self._up = {"main": False, "per second": False}

    def update(self, which: str, up: bool) -> None:
        self._up[which] = up
        self._on_connection(all(self._up.values()))


def _deployment(servers: RedisServers, options: RedisOptions) -> Deployment:
    return Cluster(servers, options) if servers.kind == "cluster" else SingleNode(servers, options)
