"""The composition root: every part of a process, made from its settings and given to those that need it.

The only place that constructs things, so the only one to read for who knows whom.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ratelimit_rls.core.model import Charge, OnStoreFailure, Purpose
from ratelimit_rls.core.plan import Policy
from ratelimit_rls.failure import Fallback
from ratelimit_rls.rules.loader import RulesLoader
from ratelimit_rls.rules.snapshot import Rules
from ratelimit_rls.server.exports import Exports
from ratelimit_rls.server.identity import new_callers
from ratelimit_rls.server.rules_source import RulesSide, new_rules_side
from ratelimit_rls.server.siblings import Siblings
from ratelimit_rls.server.stores import Stores, new_stores
from ratelimit_rls.server.tracing import new_traces
from ratelimit_rls.service import RateLimiter
from ratelimit_rls.settings import Settings
from ratelimit_rls.store.embedded import EmbeddedStore
from ratelimit_rls.telemetry import logs
from ratelimit_rls.telemetry.hot_keys import HotKeys
from ratelimit_rls.telemetry.metrics import Metrics
from ratelimit_rls.telemetry.refusals import RefusalLog
from ratelimit_rls.telemetry.traces import Traces
from ratelimit_rls.transport.answers import AnswerOptions
from ratelimit_rls.transport.grpc.cache import Budget
from ratelimit_rls.transport.grpc.certificates import TlsFiles
from ratelimit_rls.transport.grpc.door import Door
from ratelimit_rls.transport.grpc.ext_authz import ExtAuthzDoor
from ratelimit_rls.transport.grpc.limiter_api import CheckRateLimitDoor, RemainingQuotaDoor
from ratelimit_rls.transport.grpc.limiter_read import Reader
from ratelimit_rls.transport.grpc.limiter_reset import ResetLimit
from ratelimit_rls.transport.grpc.messages import (
    CHECK,
    CHECK_RATE_LIMIT,
    GET_REMAINING_QUOTA,
    KUADRANT_CHECK,
    KUADRANT_REPORT,
    SHOULD_RATE_LIMIT,
)
from ratelimit_rls.transport.grpc.rls import RlsDoor
from ratelimit_rls.transport.grpc.server import GrpcOptions, GrpcServer
from ratelimit_rls.transport.grpc.waiting import WaitingRoom
from ratelimit_rls.transport.health import Health
from ratelimit_rls.transport.http.json import json_app
from ratelimit_rls.transport.http.ops import ops_app
from ratelimit_rls.transport.http.server import HttpServer
from ratelimit_rls.transport.listen import host_port

if TYPE_CHECKING:  # a process without a database does without its libraries
    from ratelimit_rls.identity.verifier import Callers
    from ratelimit_rls.server.administrators import Administrators
    from ratelimit_rls.server.records import Records

REDIS = "redis"
CONFIG = "config"
"""Health components, named as in the reference."""


@dataclass(frozen=True, slots=True)
class Parts:
    settings: Settings
    health: Health
    stores: Stores
    rules: Rules
    loader: RulesLoader
    room: WaitingRoom
    grpc: GrpcServer
    http: HttpServer
    debug: HttpServer
    siblings: Siblings
    exports: Exports
    traces: Traces | None
    callers: Callers | None
    records: Records | None
    admin: HttpServer | None


def build(settings: Settings, shared_directory: Path | None = None) -> Parts:
    """`shared_directory` is where the workers of one port meet; a process on its own needs none."""
    metrics = Metrics(settings.near_limit_ratio)
    rules = Rules()
    health = _health(settings, rules)
    stores = new_stores(settings, metrics, partial(_tell_of_redis, settings, health))
    rules.on_swap = stores.rules_changed
    hot_keys = HotKeys(settings.rls_hot_key_rate if settings.redis else 0)  # a lease is for counters that are elsewhere
    metrics.watch(hot_keys.gauges)
    fallback = Fallback(metrics, settings.rls_replicas * settings.rls_workers)
    if settings.redis:
        fallback.get_ready()
    records = _records(settings, metrics, stores)
    callers = new_callers(
        settings, metrics, records.api_keys if records else None, records.directory if records else None
    )
    limiter = RateLimiter(
        rules,
        stores.store,
        metrics,
        _policy(settings),
        fallback,
        most_in_flight=settings.rls_max_in_flight,
        hot_keys=hot_keys,
        standings=records.directory if records else None,
        ledger=records.ledger if records else None,
    )
    metrics.watch(limiter.gauges)
    room = WaitingRoom(settings.rls_max_held_calls, settings.rls_deadline_margin.total_seconds())
    metrics.watch(room.gauges)
    doors = _doors(settings, limiter, metrics, room, callers)
    rules_side = new_rules_side(settings, rules, metrics, records.stored_rules if records else None)
    siblings = Siblings(metrics, hot_keys, shared_directory)
    exports = Exports(settings, metrics, siblings)
    traces = new_traces(settings) if settings.tracing_enabled else None
    reset = ResetLimit(
        limiter,
        stores.counters,
        Reader(settings.rls_limiter_domain, callers),
        _administrators(settings, records, stores) if records else None,
    )
    grpc = GrpcServer(_grpc(settings), doors.by_method, room, health, metrics, traces, [reset])
    metrics.measure(rules.measured)
    metrics.measure(grpc.measured)
    return Parts(
        settings=settings,
        health=health,
        stores=stores,
        rules=rules,
        loader=rules_side.loader,
        room=room,
        grpc=grpc,
        http=HttpServer(json_app(doors.should_rate_limit, room, health)),
        debug=HttpServer(ops_app(rules, siblings.stats, siblings.hot, exports.scrape)),
        siblings=siblings,
        exports=exports,
        traces=traces,
        callers=callers,
        records=records,
        admin=_admin(settings, records, rules, limiter, stores, rules_side, callers) if records else None,
    )


def _records(settings: Settings, metrics: Metrics, stores: Stores) -> Records | None:
    if not settings.rls_database_url.get_secret_value():
        return None
    from ratelimit_rls.server.records import Records

    return Records(settings, metrics, None if isinstance(stores.counters, EmbeddedStore) else stores.counters)


def _administrators(settings: Settings, records: Records, stores: Stores) -> Administrators:
    from ratelimit_rls.server.administrators import Administrators

    return Administrators(settings, records, stores.store)


def _admin(
    settings: Settings,
    records: Records,
    rules: Rules,
    limiter: RateLimiter,
    stores: Stores,
    rules_side: RulesSide,
    callers: Callers | None,
) -> HttpServer:
    from ratelimit_rls.server.admin import new_admin_app

    return HttpServer(new_admin_app(settings, records, rules, limiter, _policy(settings), stores, rules_side, callers))


@dataclass(frozen=True, slots=True)
class _Doors:
    should_rate_limit: RlsDoor
    others: Mapping[str, Door]

    @property
    def by_method(self) -> Mapping[str, Door]:
        return {SHOULD_RATE_LIMIT: self.should_rate_limit, **self.others}


def _doors(
    settings: Settings, limiter: RateLimiter, metrics: Metrics, room: WaitingRoom, callers: Callers | None
) -> _Doors:
    """Each with a cache of its own, since the same bytes mean something else to another, on one budget."""
    budget = Budget(settings.rls_plan_cache_bytes)
    answers = _answers(settings)
    refusal_log = RefusalLog(settings.rls_log_denials if logs.shows_info(settings.log_level) else 0)
    new_rls_door = partial(
        RlsDoor,
        limiter,
        metrics,
        answers,
        room=room,
        request_id_entry=settings.rls_request_id_entry,
        refusal_log=refusal_log,
        verifier=callers,
        budget=budget,
    )
    limiter_domain = settings.rls_limiter_domain
    check_rate_limit = CheckRateLimitDoor(
        limiter,
        metrics,
        room=room,
        default_domain=limiter_domain,
        verifier=callers,
        budget=budget,
        refusal_log=refusal_log,
    )
    metrics.watch(check_rate_limit.gauges)
    return _Doors(
        should_rate_limit=new_rls_door(),
        others={
            CHECK: ExtAuthzDoor(
                limiter,
                metrics,
                answers,
                room=room,
                default_domain=settings.rls_ext_authz_domain,
                budget=budget,
                refusal_log=refusal_log,
                verifier=callers,
            ),
            KUADRANT_CHECK: new_rls_door(purpose=Purpose.LOOK),
            KUADRANT_REPORT: new_rls_door(purpose=Purpose.REPORT),
            CHECK_RATE_LIMIT: check_rate_limit,
            GET_REMAINING_QUOTA: RemainingQuotaDoor(
                limiter, metrics, room=room, default_domain=limiter_domain, verifier=callers, budget=budget
            ),
        },
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


def _health(settings: Settings, rules: Rules) -> Health:
    waited_for = [REDIS] if settings.redis else []
    waited_for += [CONFIG] if settings.healthy_with_at_least_one_config_loaded else []
    health = Health(waited_for)

    def tell(rules: Rules) -> None:
        """A refused update leaves health as it is, but is there to be read."""
        refused = f"{rules.failures} update(s) refused: {rules.last_error}" if rules.last_error else ""
        if settings.healthy_with_at_least_one_config_loaded:
            has_rules = rules.current is not None and bool(rules.current.tree.domains)
            health.set(CONFIG, has_rules, refused or ("" if has_rules else "no domain has rules"))
        else:
            health.set(CONFIG, True, refused)

    rules.on_change = tell
    return health


def _tell_of_redis(settings: Settings, health: Health, connected: bool) -> None:
    if connected:
        health.set(REDIS, True)
    elif settings.redis_health_check_active_connection:
        health.set(REDIS, False, "no connection")


def _answers(settings: Settings) -> AnswerOptions:
    return AnswerOptions(
        headers_enabled=settings.limit_response_headers_enabled,
        limit_header=settings.limit_limit_header,
        remaining_header=settings.limit_remaining_header,
        reset_header=settings.limit_reset_header,
        dynamic_metadata=settings.response_dynamic_metadata,
    )


def _grpc(settings: Settings) -> GrpcOptions:
    tls = TlsFiles(
        certificate=settings.grpc_server_tls_cert,
        key=settings.grpc_server_tls_key,
        client_ca=settings.client_ca,
        client_names=settings.grpc_client_tls_san,
    )
    return GrpcOptions(
        target=f"unix:{settings.grpc_uds}" if settings.grpc_uds else host_port(settings.grpc_host, settings.grpc_port),
        socket_mode=int(settings.rls_grpc_uds_mode, 8) if settings.rls_grpc_uds_mode else None,
        transport=settings.rls_transport,
        tls=tls if settings.grpc_server_use_tls else None,
        runtime_dir=settings.rls_runtime_dir,
        request_id_metadata=settings.rls_request_id_metadata,
        reuse_port=settings.rls_workers > 1,
        max_concurrent_streams=settings.rls_max_concurrent_streams,
        max_connection_age_s=settings.grpc_max_connection_age.total_seconds(),
        max_connection_age_grace_s=settings.grpc_max_connection_age_grace.total_seconds(),
    )
