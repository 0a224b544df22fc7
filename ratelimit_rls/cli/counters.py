"""The counters in Redis: where they are, by the server's own settings, and how a verb gets at them."""

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
    from ratelimit_rls.store.redis.new import InRedis

T = TypeVar("T")

Paths = tuple[Path, ...]

Where = str | bool | None
"""A flag of `where_options`; None: not given, so that the variable counts."""

_FLAGS = (
    ("--redis-url", "URL", "Where the counters are: an address, node,node,… or name,sentinel,…."),
    ("--redis-type", "TYPE", "SINGLE, CLUSTER or SENTINEL, where the URL does not say."),
    ("--redis-auth-file", "FILE", "With password or user:password."),
    ("--redis-tls-cacert", "FILE", "CA of Redis's certificate (PEM)."),
    ("--redis-tls-client-cert", "FILE", "Certificate to show to Redis (PEM)."),
    ("--redis-tls-client-key", "FILE", "Its private key (PEM)."),
    ("--cache-key-prefix", "TEXT", "What the server puts before every key."),
)


def where_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The flags that say where the counters are; for each, and for all that have none here, the variable counts."""
    tls = click.option("--redis-tls", is_flag=True, default=None, help="TLS, as with rediss://. [REDIS_TLS]")
    command = tls(command)
    for flag, metavar, meaning in reversed(_FLAGS):
        variable = flag[2:].replace("-", "_").upper()
        command = click.option(flag, metavar=metavar, help=f"{meaning} [{variable}]")(command)
    return command


def settings_with(where: dict[str, Where]) -> Settings:
    """The server's settings, as far as they say where a counter is."""
    from ratelimit_rls.cli.serve import settings_of

    settings = settings_of(where)
    if settings.redis is None:
        raise click.UsageError(
            "no --redis-url and no REDIS_URL: the counters of a server without Redis are its own, and end with it"
        )
    return settings


def with_redis(settings: Settings, work: Callable[[InRedis], Coroutine[Any, Any, T]]) -> T:
    """Raises StoreError if Redis cannot be had, or is lost on the way."""
    from ratelimit_rls.store.redis.new import new_redis_store

    async def run() -> T:
        store = new_redis_store(settings, must_write=False)
        try:
            await store.start()
            return await work(store)
        finally:
            await store.close()

    with _without_logs():
        return asyncio.run(run())


@contextmanager
def _without_logs() -> Iterator[None]:
    """A store tells the log how its connections fare; here what matters is raised, and stdout is for answers."""
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
