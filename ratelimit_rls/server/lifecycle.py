"""Lifecycle of one process, in the order of execution.

    start   connect to Redis ─► read accounts ─► load rules ─► open ports ─► health SERVING
    stop    health NOT_SERVING ─► drain delay ─► finish calls in flight and delayed ─► close ports ─► close store

Starting waits for Redis only if configured so. The drain delay gives load balancers time to notice NOT_SERVING; until
they have, calls keep coming and are served.
"""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

import structlog

from ratelimit_rls import __version__
from ratelimit_rls.common.backoff import HALF, Backoff
from ratelimit_rls.errors import SettingsError, StoreError
from ratelimit_rls.server.components import REDIS, Components, build
from ratelimit_rls.server.file_descriptors import fit_connections, raise_limit
from ratelimit_rls.server.memory import freeze_gc, tune_gc, tune_malloc
from ratelimit_rls.settings import Settings
from ratelimit_rls.store.embedded import EmbeddedStore
from ratelimit_rls.store.redis.factory import AnyRedisStore
from ratelimit_rls.store.redis.reconnecting import MIN_PAUSE_S
from ratelimit_rls.transport.sockets import host_port

_log = structlog.get_logger()


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

FOLLOW_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class ShutdownSignals:
    """Events set by signals: stop, stop without the drain delay, and reload the rules."""

    stop: asyncio.Event = field(default_factory=asyncio.Event)
    skip_drain_delay: asyncio.Event = field(default_factory=asyncio.Event)  # stop without the drain delay
    reload: asyncio.Event = field(default_factory=asyncio.Event)


async def serve_until_signal(settings: Settings, shared_directory: Path | None = None) -> int:
    """Serve until a signal and return the exit code.

    SIGTERM and SIGINT stop gracefully; a second one stops at once. SIGHUP reloads the rules.
    """
    signals = ShutdownSignals()
    loop = asyncio.get_running_loop()
    serving = asyncio.current_task()
    assert serving is not None

    def on_stop_signal(skip_drain_delay: bool) -> None:
        if signals.stop.is_set():
            serving.cancel()
        if skip_drain_delay:
            signals.skip_drain_delay.set()
        signals.stop.set()

    loop.add_signal_handler(signal.SIGTERM, on_stop_signal, False)
    # SIGINT is interactive: skip the drain delay.
    loop.add_signal_handler(signal.SIGINT, on_stop_signal, True)
    loop.add_signal_handler(signal.SIGHUP, signals.reload.set)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # workers are started with these signals blocked
    try:
        await serve(settings, signals, shared_directory)
    except asyncio.CancelledError:
        return 1
    return 0


async def serve(settings: Settings, signals: ShutdownSignals, shared_directory: Path | None = None) -> None:
    """Serve until the stop event is set. Raises SettingsError or StoreError if starting fails."""
    tune_gc()
    tune_malloc()
    for warning in settings.warnings():
        _log.warning("settings_warning", detail=warning)
    settings = fit_connections(settings, raise_limit())
    components = build(settings, shared_directory)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(components.stores.close)
        if components.traces is not None:
            stack.push_async_callback(components.traces.close)
        stopped = asyncio.create_task(signals.stop.wait())
        starting = asyncio.create_task(_start(components, stack, signals.reload))
        await asyncio.wait([starting, stopped], return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            with suppress(asyncio.CancelledError):
                await starting
            return
        await starting
        _log_startup(components)
        if components.warm_up is not None:
            await asyncio.to_thread(components.warm_up)  # a fifth of a second, shared with calls in slices of 5 ms
        freeze_gc()
        await stopped
        await _drain(components, signals.skip_drain_delay)
    _log.info("stopped")


async def _start(components: Components, stack: AsyncExitStack, reload: asyncio.Event) -> None:
    settings = components.settings
    # Started first and closed last: metrics are available while starting, and include the last calls.
    stack.push_async_callback(components.worker_stats.close)
    await components.worker_stats.start()
    stack.push_async_callback(components.exporters.close)
    await components.exporters.start()
    if not isinstance(components.stores.counters, EmbeddedStore):
        await _connect(components.stores.counters, components)
    if components.stores.invalidation_listener is not None:
        components.stores.invalidation_listener.start()
    if components.stores.server_sampler is not None:
        components.stores.server_sampler.start()
    if components.database_services is not None:
        await components.database_services.start(stack)
    if components.verifier is not None:
        stack.push_async_callback(components.verifier.close)
        await components.verifier.start()
    try:
        await components.reloader.start()
    except SettingsError as error:
        if not settings.force_start_without_initial_config:
            raise
        _log.warning("starting_without_rules", error=str(error))
    watching = asyncio.create_task(_follow_rules(components, reload))
    stack.push_async_callback(_cancel, watching)
    # Files have been read by now; an xDS management server may not have sent rules yet.
    if not (components.reloader.first_attempt_done.is_set() or settings.force_start_without_initial_config):
        _log.warning("waiting_for_rules")
        await components.reloader.first_attempt_done.wait()
    stack.push_async_callback(components.throttle_queue.close)
    stack.callback(components.deadlines.close)
    stack.push_async_callback(components.grpc.close)
    await components.grpc.start()
    reuse_port = settings.rls_workers > 1
    stack.push_async_callback(components.http.stop)
    await components.http.start(
        settings.host,
        settings.port,
        unix_socket=settings.rls_http_uds,
        socket_mode=settings.socket_mode,
        reuse_port=reuse_port,
    )
    try:
        await components.debug.start(
            settings.debug_host,
            settings.debug_port,
            unix_socket=settings.rls_debug_uds,
            socket_mode=settings.socket_mode,
            reuse_port=reuse_port,
        )
        stack.push_async_callback(components.debug.stop)
    except SettingsError as error:  # envoyproxy/ratelimit also keeps serving without it
        _log.error("debug_port_unavailable", error=str(error))
    if components.admin is not None:
        stack.push_async_callback(components.admin.stop)
        await components.admin.start(settings.rls_admin_host, settings.rls_admin_port, reuse_port=reuse_port)
    components.health.listening()


async def _connect(store: AnyRedisStore, components: Components) -> None:
    """Wait for Redis, or connect in the background; until connected, `on_store_failure` of the rules decides."""
    settings = components.settings
    if settings.rls_wait_for_redis:
        await _wait_for_redis(store, settings)
        return
    if not settings.redis_health_check_active_connection:
        components.health.set(REDIS, True, "not connected yet")
    store.start_in_background()


async def _wait_for_redis(store: AnyRedisStore, settings: Settings) -> None:
    """Retry with exponential back-off until Redis responds; forever unless a maximum time is set."""
    loop = asyncio.get_running_loop()
    begun = loop.time()
    first_s = settings.redis_startup_initial_interval.total_seconds()
    max_s = settings.redis_startup_max_interval.total_seconds()
    backoff = Backoff(first_s, max_s, min_s=MIN_PAUSE_S, jitter=HALF)
    give_up_s = settings.redis_startup_max_elapsed_time.total_seconds()
    while True:
        try:
            return await store.start()
        except StoreError as error:
            elapsed_s = loop.time() - begun
            if give_up_s and elapsed_s >= give_up_s:
                message = f"timed out waiting for Redis connection to {settings.redis} after {elapsed_s:.0f}s: {error}"
                raise type(error)(message) from error
            left_s = give_up_s - elapsed_s if give_up_s else inf
            _log.warning("waiting_for_redis", error=str(error), next_attempt_s=round(min(backoff.delay_s, left_s), 2))
        await asyncio.sleep(backoff.next_s(left_s))


async def _follow_rules(components: Components, reload: asyncio.Event) -> None:
    """Reload the rules when their source changes and on SIGHUP.

    Every failure is logged and retried: a process must not serve outdated rules silently.
    """

    async def on_demand() -> None:
        while True:
            await reload.wait()
            reload.clear()
            await components.reloader.reload(requested=True)

    while True:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(on_demand())
                group.create_task(components.reloader.watch())
        except* Exception as failures:
            _log.error("rules_follow_failed", error=str(failures.exceptions[0]))
        await asyncio.sleep(FOLLOW_RETRY_S)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _log_startup(components: Components) -> None:
    settings = components.settings
    loaded = components.rules.current
    _log.info(
        "serving",
        version=__version__,
        grpc=components.grpc.options.target
        if settings.grpc_uds
        else host_port(settings.grpc_host, components.grpc.port),
        tls=settings.grpc_server_use_tls,
        http=components.http.target,
        debug=components.debug.target or "none",
        admin=components.admin.target if components.admin is not None else "none",
        metrics=settings.stats_sink or "none",
        store=str(settings.redis or "embedded"),
        rules=loaded.rules if loaded else 0,
        digest=loaded.digest[:12] if loaded else "none",
    )


async def _drain(components: Components, skip_drain_delay: asyncio.Event) -> None:
    settings = components.settings
    components.health.stopping()
    _log.info("stopping", drain_delay_s=settings.rls_drain_delay.total_seconds(), in_flight=components.grpc.in_flight)
    delay_s = settings.rls_drain_delay.total_seconds()
    with suppress(TimeoutError):
        await asyncio.wait_for(skip_drain_delay.wait(), delay_s)
    timeout_s = settings.rls_drain_timeout.total_seconds()
    await asyncio.gather(components.grpc.drain(timeout_s), components.throttle_queue.drain(timeout_s))
