"""The store on Redis that the settings ask for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ratelimit_rls.settings import Settings
from ratelimit_rls.settings.redis_address import RedisServers
from ratelimit_rls.store.redis.node import Terms
from ratelimit_rls.store.redis.servers import OneServer, Servers
from ratelimit_rls.store.redis.sharded import ShardedStore
from ratelimit_rls.store.redis.store import RedisStore
from ratelimit_rls.store.redis.topology import Cluster

InRedis = RedisStore | ShardedStore


def new_redis_store(
    settings: Settings, on_connection: Callable[[bool], None] = lambda connected: None, *, must_write: bool = True
) -> InRedis:
    """`settings.redis` is there. Not connected yet. `must_write` is not for who only looks or forgets."""
    import ratelimit_rls.store.redis.redis_py  # noqa: F401, it takes long: now, and not when calls may be waiting

    assert settings.redis is not None
    terms = Terms(
        timeout_s=settings.rls_store_timeout.total_seconds(),
        connect_timeout_s=settings.redis_timeout.total_seconds(),
        jitter_ms=settings.expiration_jitter_max_seconds * 1000,
        once_s=settings.request_id_s,
        key_prefix=settings.cache_key_prefix.encode(),
        must_write=must_write,
        on_connection=on_connection,
    )
    patience_s = settings.redis_persecond_timeout.total_seconds()
    return redis_store(settings.redis, settings.redis_persecond_servers, terms, per_second_connect_timeout_s=patience_s)


def redis_store(
    main: RedisServers,
    per_second: RedisServers | None,
    terms: Terms,
    *,
    per_second_connect_timeout_s: float | None = None,
) -> InRedis:
    if main.kind != "cluster" and per_second is None:
        return RedisStore(OneServer(main, terms))
    if per_second is None:
        return ShardedStore(_servers(main, terms))
    both = _Both(terms.on_connection)
    patience_s = per_second_connect_timeout_s or terms.connect_timeout_s
    return ShardedStore(
        _servers(main, replace(terms, on_connection=partial(both.told, "main"))),
        _servers(
            per_second,
            replace(terms, on_connection=partial(both.told, "per second"), connect_timeout_s=patience_s),
        ),
    )


class _Both:
    """Two that are connected only together."""

    def __init__(self, on_connection: Callable[[bool], None]) -> None:
        self._on_connection = on_connection
        self._up = {"main": False, "per second": False}

    def told(self, which: str, up: bool) -> None:
        self._up[which] = up
        self._on_connection(all(self._up.values()))


def _servers(servers: RedisServers, terms: Terms) -> Servers:
    return Cluster(servers, terms) if servers.kind == "cluster" else OneServer(servers, terms)
