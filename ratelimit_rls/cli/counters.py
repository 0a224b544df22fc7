"""The counters in Redis that a descriptor moves, found by way of the rules: what `peek` and `reset` share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ratelimit_rls.cli.descriptor import descriptor_options
from ratelimit_rls.cli.rules import rules_arguments

if TYPE_CHECKING:
    from ratelimit_rls.settings import Settings
    from ratelimit_rls.store.redis.store import RedisStore

T = TypeVar("T")

Paths = tuple[Path, ...]


def counter_arguments(command: Callable[..., Any]) -> Callable[..., Any]:
    """The arguments of every verb that goes to the counters of a descriptor."""
    prefix = click.option("--cache-key-prefix", metavar="TEXT", help="As of the server. [CACHE_KEY_PREFIX]")
    url = click.option("--redis-url", metavar="URL", help="Where the counters are, as of the server. [REDIS_URL]")
    return rules_arguments(descriptor_options(url(prefix(command))))


def settings_with(redis_url: str | None, cache_key_prefix: str | None) -> Settings:
    """The server's settings, as far as they say where a counter is."""
    from ratelimit_rls.cli.serve import settings_of

    settings = settings_of({"redis_url": redis_url, "cache_key_prefix": cache_key_prefix})
    if settings.redis is None:
        raise click.UsageError(
            "no --redis-url and no REDIS_URL: the counters of a server without Redis are its own, and end with it"
        )
    return settings


def with_redis(settings: Settings, work: Callable[[RedisStore], Coroutine[Any, Any, T]]) -> T:
    async def run() -> T:
        async with _open(settings) as store:
            return await work(store)

    return asyncio.run(run())


@asynccontextmanager
async def _open(settings: Settings) -> AsyncIterator[RedisStore]:
    from ratelimit_rls.store.redis.store import RedisStore

    assert settings.redis is not None
    store = RedisStore(settings.redis, connect_timeout_s=settings.redis_timeout.total_seconds())
    await store.start()
    try:
        yield store
    finally:
        await store.close()
