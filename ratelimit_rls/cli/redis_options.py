"""Options and connection of verbs that access the counters in Redis, configured like the server."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from ratelimit_rls.settings import Settings
    from ratelimit_rls.store.redis.factory import AnyRedisStore

T = TypeVar("T")

Paths = tuple[Path, ...]

OptionValue = str | bool | None
"""Value of a Redis option. None: the option was not given, and the environment variable applies."""

_FLAGS = (
    ("--redis-url", "URL", "Address of Redis: host:port, node,node,… (cluster) or name,sentinel,… (sentinel)."),
    ("--redis-type", "TYPE", "SINGLE, CLUSTER or SENTINEL; needed only if it cannot be derived from the URL."),
    ("--redis-auth-file", "FILE", "File that contains password or user:password."),
    ("--redis-tls-cacert", "FILE", "CA of the certificate of Redis (PEM)."),
    ("--redis-tls-client-cert", "FILE", "Client certificate for Redis (PEM)."),
    ("--redis-tls-client-key", "FILE", "Private key of the client certificate (PEM)."),
    ("--cache-key-prefix", "TEXT", "Prefix that the server puts before every key."),
)


def redis_connection_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of the Redis connection to a command. The environment variables apply to all others."""
    tls = click.option("--redis-tls", is_flag=True, default=None, help="Use TLS, as with rediss://. [REDIS_TLS]")
    command = tls(command)
    for flag, metavar, meaning in reversed(_FLAGS):
        variable = flag[2:].replace("-", "_").upper()
        command = click.option(flag, metavar=metavar, help=f"{meaning} [{variable}]")(command)
    return command


def settings_from_options(options: dict[str, OptionValue]) -> Settings:
    """Return the server's settings with the options applied. Raises UsageError if no Redis is configured."""
    from ratelimit_rls.cli.serve import settings_from_flags

    settings = settings_from_flags(options)
    if settings.redis is None:
        raise click.UsageError(
            "neither --redis-url nor REDIS_URL is set; without Redis the counters exist only inside the server process"
        )
    return settings


def with_redis(settings: Settings, work: Callable[[AnyRedisStore], Coroutine[Any, Any, T]]) -> T:
    """Run `work` with a connected store. Raises StoreError if Redis is unavailable or the connection is lost."""
    from ratelimit_rls.store.redis.factory import new_redis_store

    async def run() -> T:
        store = new_redis_store(settings, must_write=False)
        try:
            await store.start()
            return await work(store)
        finally:
            await store.close()

    with _logs_disabled():
        return asyncio.run(run())


@contextmanager
def _logs_disabled() -> Iterator[None]:
    """Suppress log messages below error: the store logs connection changes, but here failures are raised."""
    import structlog

    before = structlog.get_config()
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    try:
        yield
    finally:
        structlog.configure(**before)
