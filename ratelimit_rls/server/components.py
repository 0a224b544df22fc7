"""Composition root: constructs every component of a process from its settings and passes it to its users.

It delegates the store, the database, the rules source, identity and the admin API to the modules of those names beside
it. Components are constructed nowhere else, so `build` shows the dependencies between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratelimit_rls.api.ext_authz.codec import ExtAuthzCodec
from ratelimit_rls.api.limiter.codec import CheckRateLimitCodec, RemainingQuotaCodec
from ratelimit_rls.api.limiter.decode import LimiterDecoder
from ratelimit_rls.api.responses import ResponseOptions
from ratelimit_rls.api.rls.codec import RlsCodec
from ratelimit_rls.core.model import Charge, OnStoreFailure, Purpose
from ratelimit_rls.core.plan import Policy
from ratelimit_rls.h2.config import Timeouts
from ratelimit_rls.pipeline.codec import Codec
from ratelimit_rls.pipeline.deadlines import Deadlines
from ratelimit_rls.pipeline.fallback import Fallback
from ratelimit_rls.pipeline.limiter import RateLimiter
from ratelimit_rls.pipeline.message_bounds import MessageBounds
from ratelimit_rls.pipeline.observer import Observer
from ratelimit_rls.pipeline.pipeline import Pipeline
from ratelimit_rls.pipeline.request_cache import CacheBudget
from ratelimit_rls.pipeline.throttle_queue import ThrottleQueue
from ratelimit_rls.protos.messages import (
    CHECK,
    CHECK_RATE_LIMIT,
    GET_REMAINING_QUOTA,
    KUADRANT_CHECK,
    KUADRANT_REPORT,
    SHOULD_RATE_LIMIT,
)
from ratelimit_rls.rules.active_rules import ActiveRules
from ratelimit_rls.rules.reloader import RulesReloader
from ratelimit_rls.server.exporters import MetricsExporters
from ratelimit_rls.server.http_ports import HttpPorts
from ratelimit_rls.server.identity import new_credential_verifier
from ratelimit_rls.server.rules_source import RulesComponents, new_rules_components
from ratelimit_rls.server.stores import Stores, new_stores
from ratelimit_rls.server.tracing import new_traces
from ratelimit_rls.server.worker_stats import WorkerStats
from ratelimit_rls.settings import Settings
from ratelimit_rls.store.embedded import EmbeddedStore
from ratelimit_rls.telemetry import logs
from ratelimit_rls.telemetry.abuse import AbuseLog
from ratelimit_rls.telemetry.denial_log import DenialLog
from ratelimit_rls.telemetry.hot_keys import HotKeys
from ratelimit_rls.telemetry.masking import Mask
from ratelimit_rls.telemetry.metrics import Metrics
from ratelimit_rls.telemetry.traces import Traces
from ratelimit_rls.tls.certificates import TlsFiles
from ratelimit_rls.transport.call_budget import CallBudget
from ratelimit_rls.transport.grpc.options import GrpcOptions, ServerLimits
from ratelimit_rls.transport.grpc.reset_limit import ResetLimit
from ratelimit_rls.transport.grpc.server import GrpcServer
from ratelimit_rls.transport.health import Health
from ratelimit_rls.transport.http.debug import debug_app
from ratelimit_rls.transport.http.json_api import json_app
from ratelimit_rls.transport.http.server import HttpServer
from ratelimit_rls.transport.sockets import host_port

if TYPE_CHECKING:  # a process without a database does not import its libraries
    from fastapi import FastAPI

    from ratelimit_rls.admin.counters import ResetAdministration
    from ratelimit_rls.identity.verifier import CredentialVerifier
    from ratelimit_rls.server.database import DatabaseServices

REDIS = "redis"
CONFIG = "config"
DATABASE = "database"
"""Names of health components; the first two are those of envoyproxy/ratelimit."""


@dataclass(frozen=True, slots=True)
class Components:
    settings: Settings
    health: Health
    stores: Stores
    rules: ActiveRules
    reloader: RulesReloader
    throttle_queue: ThrottleQueue
    deadlines: Deadlines
    grpc: GrpcServer
    http: HttpServer
    debug: HttpServer
    worker_stats: WorkerStats
    exporters: MetricsExporters
    traces: Traces | None
    verifier: CredentialVerifier | None
    database_services: DatabaseServices | None
    admin: HttpServer | None
    warm_up: Callable[[], object] | None  # work that would delay all calls if the first administrator caused it


def build(settings: Settings, shared_directory: Path | None = None) -> Components:
    """Construct all components. `shared_directory` is shared by the workers of one port; None for a single process."""
    metrics = Metrics(settings.near_limit_ratio)
    abuse = AbuseLog()
    metrics.export_series(abuse.measured)
    call_budget = CallBudget(settings.rls_max_calls_per_second, settings.rls_max_calls_per_second_per_peer)
    rules = ActiveRules()
    health = _build_health(settings, rules)
    stores = new_stores(
        settings,
        metrics,
        on_connection=partial(_report_redis_health, settings, health),
        on_unusable=partial(_report_unusable_redis, settings, health),
    )
    rules.on_swap = stores.rules_changed
    hot_keys = HotKeys(
        settings.rls_hot_key_rate if settings.redis else 0,  # leases make sense only for remote counters
        decode_key=stores.store.decode_key,
    )
    metrics.export_values(hot_keys.gauges)
    fallback = Fallback(metrics, settings.rls_replicas * settings.rls_workers)
    if settings.redis:
        fallback.warm_up()
    database_services = _build_database_services(settings, metrics, stores)
    if database_services is not None:
        database_services.database.write_health.on_change = partial(_report_write_health, database_services, health)
    verifier = new_credential_verifier(
        settings,
        metrics,
        database_services.api_keys if database_services else None,
        database_services.directory if database_services else None,
    )
    limiter = RateLimiter(
        rules,
        stores.store,
        metrics,
        _policy(settings),
        fallback,
        max_in_flight=settings.rls_max_in_flight,
        hot_keys=hot_keys,
        entitlements=database_services.directory if database_services else None,
        usage_recorder=database_services.usage_recorder if database_services else None,
    )
    metrics.export_values(limiter.gauges)
    throttle_queue = ThrottleQueue(settings.rls_max_held_calls, settings.rls_deadline_margin.total_seconds())
    metrics.export_values(throttle_queue.gauges)
    deadlines = Deadlines()
    traces = new_traces(settings) if settings.tracing_enabled else None
    codecs = _build_codecs(settings, limiter, metrics, verifier)
    pipelines = _build_pipelines(settings, codecs, limiter, metrics, throttle_queue, deadlines, traces)
    rules_components = new_rules_components(
        settings, rules, metrics, database_services.stored_rules if database_services else None
    )
    worker_stats = WorkerStats(metrics, hot_keys, shared_directory)
    ports = HttpPorts(settings, _tls_files(settings), abuse)
    exporters = MetricsExporters(settings, metrics, worker_stats, ports)
    reset = ResetLimit(
        limiter,
        LimiterDecoder(settings.rls_limiter_domain, verifier),
        _build_administration(settings, database_services, stores) if database_services else None,
    )
    grpc = GrpcServer(_grpc_options(settings, call_budget), pipelines.by_method, throttle_queue, health, abuse, [reset])
    metrics.export_series(rules.measured)
    metrics.export_series(grpc.measured)
    admin_app = (
        _build_admin_app(settings, database_services, rules, limiter, stores, rules_components, verifier, abuse)
        if database_services
        else None
    )
    return Components(
        settings=settings,
        health=health,
        stores=stores,
        rules=rules,
        reloader=rules_components.reloader,
        throttle_queue=throttle_queue,
        deadlines=deadlines,
        grpc=grpc,
        http=ports.json(
            json_app(
                pipelines.json,
                throttle_queue,
                health,
                max_body_bytes=settings.rls_max_json_bytes,
                abuse=abuse,
                call_budget=call_budget,
            )
        ),
        debug=ports.debug(
            debug_app(
                rules,
                worker_stats.stats,
                worker_stats.hot,
                exporters.scrape,
                mask=None if settings.rls_hot_key_values else Mask(shared_directory),
                nodes=stores.server_sampler.report_json if stores.server_sampler is not None else None,
            )
        ),
        worker_stats=worker_stats,
        exporters=exporters,
        traces=traces,
        verifier=verifier,
        database_services=database_services,
        admin=ports.admin(admin_app) if admin_app is not None else None,
        warm_up=admin_app.openapi if admin_app is not None else None,
    )


def _build_database_services(settings: Settings, metrics: Metrics, stores: Stores) -> DatabaseServices | None:
    if not settings.rls_database_url.get_secret_value():
        return None
    from ratelimit_rls.server.database import DatabaseServices

    return DatabaseServices(settings, metrics, None if isinstance(stores.counters, EmbeddedStore) else stores.counters)


def _build_administration(
    settings: Settings, database_services: DatabaseServices, stores: Stores
) -> ResetAdministration:
    from ratelimit_rls.server.reset_administration import new_reset_administration

    return new_reset_administration(settings, database_services, stores)


def _build_admin_app(
    settings: Settings,
    database_services: DatabaseServices,
    rules: ActiveRules,
    limiter: RateLimiter,
    stores: Stores,
    rules_components: RulesComponents,
    verifier: CredentialVerifier | None,
    abuse: AbuseLog,
) -> FastAPI:
    from ratelimit_rls.server.admin import new_admin_app

    policy = _policy(settings)
    return new_admin_app(settings, database_services, rules, limiter, policy, stores, rules_components, verifier, abuse)


@dataclass(frozen=True, slots=True)
class _Pipelines:
    by_method: Mapping[str, Pipeline[Any]]  # full names of gRPC methods
    json: Pipeline[Any]


def _build_pipelines(
    settings: Settings,
    codecs: Mapping[str, Codec[Any]],
    limiter: RateLimiter,
    metrics: Metrics,
    throttle_queue: ThrottleQueue,
    deadlines: Deadlines,
    traces: Traces | None,
) -> _Pipelines:
    logs_denials = settings.rls_log_denials and logs.shows_info(settings.log_level)
    denial_log = DenialLog(settings.rls_log_denials) if logs_denials else None

    def pipeline(codec: Codec[Any], method: str | None, traces: Traces | None) -> Pipeline[Any]:
        # Asking for the remaining quota is never denied, so there is nothing to log.
        log = None if method == GET_REMAINING_QUOTA else denial_log
        observer = Observer(method, metrics, limiter.recorder, log, traces)
        return Pipeline(codec, metrics, throttle_queue, deadlines, observer)

    return _Pipelines(
        by_method={method: pipeline(codec, method, traces) for method, codec in codecs.items()},
        json=pipeline(codecs[SHOULD_RATE_LIMIT], None, None),
    )


def _build_codecs(
    settings: Settings, limiter: RateLimiter, metrics: Metrics, verifier: CredentialVerifier | None
) -> Mapping[str, Codec[Any]]:
    """Construct the codecs of the gRPC methods.

    Each has its own cache, since the same bytes mean different requests; all share one budget.
    """
    budget = CacheBudget(settings.rls_plan_cache_bytes)
    bounds = _message_bounds(settings)
    response_options = _response_options(settings)
    new_rls_codec = partial(
        RlsCodec,
        limiter,
        response_options,
        request_id_entry=settings.rls_request_id_entry,
        verifier=verifier,
        budget=budget,
        bounds=bounds,
    )
    limiter_domain = settings.rls_limiter_domain
    check_rate_limit = CheckRateLimitCodec(
        limiter, default_domain=limiter_domain, verifier=verifier, budget=budget, bounds=bounds
    )
    metrics.export_values(check_rate_limit.gauges)
    return {
        SHOULD_RATE_LIMIT: new_rls_codec(),
        CHECK: ExtAuthzCodec(
            limiter,
            response_options,
            default_domain=settings.rls_ext_authz_domain,
            budget=budget,
            verifier=verifier,
            bounds=bounds,
        ),
        KUADRANT_CHECK: new_rls_codec(purpose=Purpose.LOOK),
        KUADRANT_REPORT: new_rls_codec(purpose=Purpose.REPORT),
        CHECK_RATE_LIMIT: check_rate_limit,
        GET_REMAINING_QUOTA: RemainingQuotaCodec(
            limiter, default_domain=limiter_domain, verifier=verifier, budget=budget, bounds=bounds
        ),
    }


def _message_bounds(settings: Settings) -> MessageBounds:
    return MessageBounds(
        descriptors=settings.rls_max_descriptors,
        entries=settings.rls_max_entries,
        entry_bytes=settings.rls_max_entry_bytes,
        message_bytes=settings.rls_max_message_bytes,
        check_fields=settings.rls_max_check_fields,
    )


def _policy(settings: Settings) -> Policy:
    admitted = settings.stop_cache_key_increment_when_overlimit
    return Policy(
        key_prefix=settings.cache_key_prefix,
        quota_mode=settings.quota_mode,
        shadow_mode=settings.shadow_mode,
        override_charge=Charge.ADMITTED if admitted else Charge.ALWAYS,
        on_store_failure=OnStoreFailure(settings.rls_failure_mode),
    )


def _build_health(settings: Settings, rules: ActiveRules) -> Health:
    waited_for = [REDIS] if settings.redis else []
    waited_for += [CONFIG] if settings.healthy_with_at_least_one_config_loaded else []
    health = Health(waited_for)

    def report(rules: ActiveRules) -> None:
        """Report the state of the rules. A rejected update does not affect health, but its error is visible there."""
        rejection = f"{rules.failures} update(s) rejected: {rules.last_error}" if rules.last_error else ""
        if settings.healthy_with_at_least_one_config_loaded:
            has_rules = rules.current is not None and bool(rules.current.tree.domains)
            health.set(CONFIG, has_rules, rejection or ("" if has_rules else "no domain has rules"))
        else:
            health.set(CONFIG, True, rejection)

    rules.on_change = report
    return health


def _report_redis_health(settings: Settings, health: Health, connected: bool) -> None:
    if connected:
        health.set(REDIS, True)
    elif settings.redis_health_check_active_connection:
        health.set(REDIS, False, "no connection")


def _report_unusable_redis(settings: Settings, health: Health, reason: str) -> None:
    """Report why Redis cannot be used. As calls are decided without it, that is a remark by default."""
    health.set(REDIS, not settings.redis_health_check_active_connection, reason or "no connection")


def _report_write_health(database_services: DatabaseServices, health: Health) -> None:
    """Report failing writes as a remark: health stays good, since no call waits for the database.

    The error itself is only in the log and in /sources, since health is public.
    """
    health.set(DATABASE, True, "" if database_services.database.write_health.writes_succeed else "writes fail")


def _response_options(settings: Settings) -> ResponseOptions:
    return ResponseOptions(
        headers_enabled=settings.limit_response_headers_enabled,
        limit_header=settings.limit_limit_header,
        remaining_header=settings.limit_remaining_header,
        reset_header=settings.limit_reset_header,
        dynamic_metadata=settings.response_dynamic_metadata,
    )


def _tls_files(settings: Settings) -> TlsFiles:
    return TlsFiles(
        certificate=settings.grpc_server_tls_cert,
        key=settings.grpc_server_tls_key,
        client_ca=settings.client_ca,
        client_names=settings.grpc_client_tls_san,
        crl=settings.grpc_server_tls_crl,
    )


def _grpc_options(settings: Settings, call_budget: CallBudget) -> GrpcOptions:
    return GrpcOptions(
        target=f"unix:{settings.grpc_uds}" if settings.grpc_uds else host_port(settings.grpc_host, settings.grpc_port),
        socket_mode=settings.socket_mode,
        tls=_tls_files(settings) if settings.grpc_server_use_tls else None,
        runtime_dir=settings.rls_runtime_dir,
        request_id_metadata=settings.rls_request_id_metadata,
        reuse_port=settings.rls_workers > 1,
        max_concurrent_streams=settings.rls_max_concurrent_streams,
        max_connection_age_s=settings.grpc_max_connection_age.total_seconds(),
        max_connection_age_grace_s=settings.grpc_max_connection_age_grace.total_seconds(),
        call_budget=call_budget,
        batch_window_s=settings.rls_batch_window.total_seconds(),
        limits=ServerLimits(
            max_connections=settings.rls_grpc_max_connections,
            max_connections_per_peer=settings.rls_grpc_max_connections_per_peer,
            max_streams=settings.rls_grpc_max_streams,
            max_unfinished_bytes=settings.rls_grpc_max_unfinished_bytes,
            timeouts=Timeouts(
                message_s=settings.rls_grpc_message_timeout.total_seconds(),
                keepalive_s=settings.rls_grpc_keepalive_time.total_seconds(),
                keepalive_timeout_s=settings.rls_grpc_keepalive_timeout.total_seconds(),
            ),
        ),
    )
