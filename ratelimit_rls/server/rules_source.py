"""Construction of the rules source (files, xDS, database) and its reloader from the settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ratelimit_rls.common.backoff import HALF, Backoff
from ratelimit_rls.rules.active_rules import ActiveRules
from ratelimit_rls.rules.compile import CompiledRules, compile_documents
from ratelimit_rls.rules.reloader import RulesReloader, RulesSource
from ratelimit_rls.rules.source_document import SourceDocument
from ratelimit_rls.rules.sources.database import MergedSource, StoredRulesSource, check_rules
from ratelimit_rls.rules.sources.files import RulesFiles, RuntimeTree
from ratelimit_rls.rules.sources.xds.client import AdsNode, AdsRulesSource
from ratelimit_rls.rules.sources.xds.stream import DEFAULT_MAX_MESSAGE_BYTES, AdsServer
from ratelimit_rls.rules.sources.xds.tls import AdsTlsFiles
from ratelimit_rls.rules.stored_rule import StoredRule
from ratelimit_rls.settings import Settings
from ratelimit_rls.settings.xds import XDS, grpc_metadata, node_metadata
from ratelimit_rls.telemetry.metrics import Metrics

XDS_MIN_DELAY_S = 0.1
"""Minimum wait between attempts to reach the management server, whatever the settings."""


class RulesComponents(NamedTuple):
    reloader: RulesReloader
    compile: Callable[[Sequence[SourceDocument]], CompiledRules]  # with the options of the reloader
    check: Callable[[Sequence[StoredRule]], CompiledRules] | None  # validates stored rules; None without a database


def new_rules_components(
    settings: Settings, rules: ActiveRules, metrics: Metrics, stored: StoredRulesSource | None = None
) -> RulesComponents:
    """Construct source and reloader. `stored` are the rules of the database; None without one."""
    over_xds = _xds_source(settings, rules) if settings.config_type == XDS else None
    if over_xds is not None:
        metrics.export_series(over_xds.measured)
    others: RulesSource = over_xds or _file_source(settings)
    source, check = others, None
    if stored is not None:
        alone = _has_no_files(settings)
        source = stored if alone else MergedSource(stored, others)
        check = partial(_check, settings, None if alone else others)
    reloader = RulesReloader(
        source,
        rules,
        metrics,
        explain=over_xds.explain if over_xds else None,
        **_options(settings),
    )
    return RulesComponents(reloader, partial(_compile, settings), check)


def _options(settings: Settings) -> dict[str, bool]:
    """Return the compiler options, which must be equal wherever rules are compiled."""
    return {
        "merge_domains": settings.merge_domain_config,
        "default_admitted": settings.stop_cache_key_increment_when_overlimit,
    }


def _compile(settings: Settings, sources: Sequence[SourceDocument]) -> CompiledRules:
    """Compile these documents alone. Raises RulesError."""
    return compile_documents(sources, **_options(settings))


def _check(settings: Settings, others: RulesSource | None, rules: Sequence[StoredRule]) -> CompiledRules:
    """Compile `rules` instead of the stored rules, together with those of other sources. Raises RulesError."""
    return check_rules(rules, (others.read() or ()) if others is not None else (), **_options(settings))


def _has_no_files(settings: Settings) -> bool:
    """Return True if no rules files are configured and the default directory of envoyproxy/ratelimit does not exist."""
    is_configured = settings.config_type == XDS or any(map(settings.given, ("rls_rules", "runtime_root")))
    return not is_configured and not Path(settings.runtime_root).exists()


def _file_source(settings: Settings) -> RulesFiles:
    if settings.rls_rules:
        return RulesFiles([Path(path) for path in settings.rls_rules])
    return RulesFiles(
        RuntimeTree(
            root=Path(settings.runtime_root),
            subdirectory=settings.runtime_subdirectory,
            app_directory=settings.runtime_appdirectory,
            watch_root=settings.runtime_watch_root,
            ignore_dot_files=settings.runtime_ignoredotfiles,
        )
    )


def _xds_source(settings: Settings, rules: ActiveRules) -> AdsRulesSource:
    tls = AdsTlsFiles(
        ca=settings.config_grpc_xds_server_tls_cacert,
        certificate=settings.config_grpc_xds_client_tls_cert,
        key=settings.config_grpc_xds_client_tls_key,
    )
    server = AdsServer(
        target=settings.config_grpc_xds_server_url,
        tls=tls if settings.config_grpc_xds_server_use_tls else None,
        name=settings.config_grpc_xds_server_tls_san,
        headers=grpc_metadata(settings.config_grpc_xds_client_additional_headers),
        max_bytes=settings.xds_client_max_msg_size_in_bytes or DEFAULT_MAX_MESSAGE_BYTES,
        keepalive_s=settings.rls_xds_keepalive.total_seconds(),
    )
    node = AdsNode(settings.config_grpc_xds_node_id, node_metadata(settings.config_grpc_xds_node_metadata))
    pauses = Backoff(
        settings.xds_client_backoff_initial_interval.total_seconds(),
        settings.xds_client_backoff_max_interval.total_seconds(),
        settings.xds_client_backoff_random_factor,
        min_s=XDS_MIN_DELAY_S,
        jitter=HALF if settings.xds_client_backoff_jitter else 0,
    )
    eager_s = settings.config_grpc_xds_server_connect_retry_interval.total_seconds()
    return AdsRulesSource(server, node, rules, pauses, eager_s)
