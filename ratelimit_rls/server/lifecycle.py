"""One process, from start to stop, top to bottom.

    start   store answers, if waited for ─► accounts read ─► rules loaded ─► ports open ─► health says SERVING
    stop    health says NOT_SERVING ─► drain delay ─► nothing in flight or held ─► ports closed ─► store closed

The delay is for those who choose where to send calls: until they have seen NOT_SERVING, calls keep coming and are
answered.
"""

from __future__ import annotations

import asyncio
import gc
import random
import signal
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from ratelimit_rls import __version__
from ratelimit_rls.errors import SettingsError, StoreError
from ratelimit_rls.server.parts import REDIS, Parts, build
from ratelimit_rls.settings import Settings
from ratelimit_rls.store.embedded import EmbeddedStore
from ratelimit_rls.store.redis.line import SHORTEST_PAUSE_S
from ratelimit_rls.store.redis.new import InRedis
from ratelimit_rls.transport.listen import host_port

log = structlog.get_logger()


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

FOLLOW_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class Orders:
    """What signals have asked for so far."""

    stop: asyncio.Event = field(default_factory=asyncio.Event)
    hurry: asyncio.Event = field(default_factory=asyncio.Event)  # stop without the delay
    reload: asyncio.Event = field(default_factory=asyncio.Event)


async def serve_until_signal(settings: Settings, shared_directory: Path | None = None) -> int:
    """SIGTERM and SIGINT stop in good order, a second one at once; SIGHUP reads the rules again."""
    orders = Orders()
    loop = asyncio.get_running_loop()
    serving = asyncio.current_task()
    assert serving is not None

    def told_to_stop(hurry: bool) -> None:
        if orders.stop.is_set():
            serving.cancel()
        if hurry:
            orders.hurry.set()
        orders.stop.set()

    loop.add_signal_handler(signal.SIGTERM, told_to_stop, False)
    # Somebody at a terminal wants it gone, not drained.
    loop.add_signal_handler(signal.SIGINT, told_to_stop, True)
    loop.add_signal_handler(signal.SIGHUP, orders.reload.set)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # a worker is started with them held back
    try:
        await serve(settings, orders, shared_directory)
    except asyncio.CancelledError:
        return 1
    return 0


async def serve(settings: Settings, orders: Orders, shared_directory: Path | None = None) -> None:
    """Serve until ordered to stop. Raises SettingsError or StoreError if it cannot start."""
    _calm_the_collector()
    for warning in settings.warnings():
        log.warning(warning)
    parts = build(settings, shared_directory)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(parts.stores.close)
        if parts.traces is not None:
            stack.push_async_callback(parts.traces.close)
        stopped = asyncio.create_task(orders.stop.wait())
        starting = asyncio.create_task(_start(parts, stack, orders.reload))
        await asyncio.wait([starting, stopped], return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            with suppress(asyncio.CancelledError):
                await starting
            return
        await starting
        _announce(parts)
        _keep_for_good()
        await stopped
        await _drain(parts, orders.hurry)


async def _start(parts: Parts, stack: AsyncExitStack, reload: asyncio.Event) -> None:
    settings = parts.settings
    # First and, at the end, last: what is waited for below can be seen, and the last calls are counted.
    stack.push_async_callback(parts.siblings.close)
    await parts.siblings.start()
    stack.push_async_callback(parts.exports.close)
    await parts.exports.start()
    if not isinstance(parts.stores.counters, EmbeddedStore):
        await _connect(parts.stores.counters, parts)
    if parts.stores.news is not None:
        parts.stores.news.start()
    if parts.records is not None:
        await parts.records.start(stack)
    if parts.callers is not None:
        stack.push_async_callback(parts.callers.close)
        await parts.callers.start()
    try:
        await parts.loader.start()
    except SettingsError as error:
        if not settings.force_start_without_initial_config:
            raise
        log.warning("starting without rules", error=str(error))
    watching = asyncio.create_task(_follow(parts, reload))
    stack.push_async_callback(_cancel, watching)
    # Files were read by now; a management server may not have sent any rules yet.
    if not (parts.loader.has_tried.is_set() or settings.force_start_without_initial_config):
        log.warning("waiting for the first rules; nothing is served before")
        await parts.loader.has_tried.wait()
    stack.push_async_callback(parts.room.close)
    stack.push_async_callback(parts.grpc.close)
    await parts.grpc.start()
    reuse_port = settings.rls_workers > 1
    stack.push_async_callback(parts.http.stop)
    await parts.http.start(settings.host, settings.port, reuse_port=reuse_port)
    try:
        await parts.debug.start(settings.debug_host, settings.debug_port, reuse_port=reuse_port)
        stack.push_async_callback(parts.debug.stop)
    except SettingsError as error:  # the reference serves on without it, too
        log.warning("no debug port", error=str(error))
    if parts.admin is not None:
        stack.push_async_callback(parts.admin.stop)
        await parts.admin.start(settings.rls_admin_host, settings.rls_admin_port, reuse_port=reuse_port)
    parts.health.listening()


async def _connect(store: InRedis, parts: Parts) -> None:
    """Wait for Redis, or begin without it: until it is there, calls are answered as the rules say of its absence."""
    settings = parts.settings
    if settings.rls_wait_for_redis:
        await _wait_for_redis(store, settings)
        return
    if not settings.redis_health_check_active_connection:
        parts.health.set(REDIS, True, "not connected yet")
    store.start_in_background()


async def _wait_for_redis(store: InRedis, settings: Settings) -> None:
    """Until Redis answers, longer and longer waits between attempts; for ever unless a bound is set."""
    loop = asyncio.get_running_loop()
    begun = loop.time()
    pause_s = settings.redis_startup_initial_interval.total_seconds()
    longest_s = settings.redis_startup_max_interval.total_seconds()
    give_up_s = settings.redis_startup_max_elapsed_time.total_seconds()
    while True:
        try:
            return await store.start()
        except StoreError as error:
            elapsed_s = loop.time() - begun
            if give_up_s and elapsed_s >= give_up_s:
                message = f"timed out waiting for Redis connection to {settings.redis} after {elapsed_s:.0f}s: {error}"
                raise type(error)(message) from error
            if give_up_s:
                pause_s = min(pause_s, give_up_s - elapsed_s)
            log.warning("waiting for redis", error=str(error), next_attempt_s=round(pause_s, 2))
        await asyncio.sleep(max(SHORTEST_PAUSE_S, pause_s * random.uniform(0.5, 1)))
        pause_s = min(2 * pause_s, longest_s)


async def _follow(parts: Parts, reload: asyncio.Event) -> None:
    """Keep the rules as their source has them, by watching and by SIGHUP.

    Whatever goes wrong with that is told and tried again: a process that serves old rules for ever must not be silent.
    """

    async def on_demand() -> None:
        while True:
            await reload.wait()
            reload.clear()
            await parts.loader.reload()

    while True:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(on_demand())
                group.create_task(parts.loader.watch())
        except* Exception as faults:
            log.error("cannot follow the rules, those in force stay", error=str(faults.exceptions[0]))
        await asyncio.sleep(FOLLOW_AGAIN_S)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _calm_the_collector() -> None:
    """Let it look at young objects only.

    Nothing on a call's way makes cycles, but a hundred thousand remembered requests are a hundred thousand objects to
    walk over: full collections took up to 0.4 s with every call waiting. What does not die young is freed by counting
    references, or with the process.
    """
    gc.set_threshold(10_000, 10, 1_000_000)


def _keep_for_good() -> None:
    """What is there when calls begin to come stays, and need never be looked at again."""
    gc.collect()
    gc.freeze()


def _announce(parts: Parts) -> None:
    """The one line that says it is up. A warning, as in the reference: it must be seen at the default level."""
    settings = parts.settings
    loaded = parts.rules.current
    log.warning(
        "serving",
        version=__version__,
        grpc=parts.grpc.options.target if settings.grpc_uds else host_port(settings.grpc_host, parts.grpc.port),
        transport=settings.rls_transport,
        tls=settings.grpc_server_use_tls,
        http=host_port(settings.host, parts.http.port),
        debug=host_port(settings.debug_host, parts.debug.port) if parts.debug.port else "none",
        admin=host_port(settings.rls_admin_host, parts.admin.port) if parts.admin is not None else "none",
        metrics=settings.stats_sink or "none",
        store=str(settings.redis or "embedded"),
        rules=loaded.rules if loaded else 0,
        digest=loaded.digest[:12] if loaded else "none",
    )


async def _drain(parts: Parts, hurry: asyncio.Event) -> None:
    settings = parts.settings
    parts.health.stopping()
    log.warning("stopping", drain_delay_s=settings.rls_drain_delay.total_seconds(), in_flight=parts.grpc.in_flight)
    delay_s = settings.rls_drain_delay.total_seconds()
    with suppress(TimeoutError):
        await asyncio.wait_for(hurry.wait(), delay_s)
    timeout_s = settings.rls_drain_timeout.total_seconds()
    await asyncio.gather(parts.grpc.drain(timeout_s), parts.room.drain(timeout_s))
