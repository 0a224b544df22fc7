"""Where the rules come from, by the settings, and the loader that keeps to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ratelimit_rls.core.accounts import StoredRule
from ratelimit_rls.rules.compile import Compiled
from ratelimit_rls.rules.loader import RulesLoader, RulesSource
from ratelimit_rls.rules.snapshot import Rules
from ratelimit_rls.rules.sources.database import Merged, StoredRules, check_rule
from ratelimit_rls.rules.sources.files import RulesFiles, RuntimeTree
from ratelimit_rls.settings import Settings
from ratelimit_rls.settings.xds import XDS, grpc_metadata, node_metadata
from ratelimit_rls.telemetry.metrics import Metrics
from ratelimit_rls.transport.grpc.ads import AdsNode, AdsRules
from ratelimit_rls.transport.grpc.ads_pauses import Pauses
from ratelimit_rls.transport.grpc.ads_stream import USUAL_MESSAGE_BYTES, AdsServer
from ratelimit_rls.transport.grpc.ads_tls import AdsTlsFiles


class RulesSide(NamedTuple):
    loader: RulesLoader
    check: Callable[[Sequence[StoredRule]], Compiled] | None  # None: there is no database to store rules in


def new_rules_side(settings: Settings, rules: Rules, metrics: Metrics, stored: StoredRules | None = None) -> RulesSide:
    """`stored` are the rules of the database, where there is one."""
    over_xds = _over_xds(settings, rules) if settings.config_type == XDS else None
    if over_xds is not None:
        metrics.measure(over_xds.measured)
    others: RulesSource = over_xds or _files(settings)
    source, check = others, None
    if stored is not None:
        alone = _has_no_files(settings)
        source = stored if alone else Merged(stored, others)
        check = partial(_check, settings, None if alone else others)
    loader = RulesLoader(
        source,
        rules,
        metrics,
        explain=over_xds.explain if over_xds else None,
        **_options(settings),
    )
    return RulesSide(loader, check)


def _options(settings: Settings) -> dict[str, bool]:
    """The same wherever rules are compiled, so that they mean the same."""
    return {
        "merge_domains": settings.merge_domain_config,
        "default_admitted": settings.stop_cache_key_increment_when_overlimit,
    }


def _check(settings: Settings, others: RulesSource | None, rules: Sequence[StoredRule]) -> Compiled:
    """What these would mean in place of the stored ones, together with everything else. Raises RulesError."""
    return check_rule(rules, (others.read() or ()) if others is not None else (), **_options(settings))


def _has_no_files(settings: Settings) -> bool:
    """Nobody said where there are any, nor are they where the reference has them."""
    is_told = settings.config_type == XDS or any(map(settings.given, ("rls_rules", "runtime_root")))
    return not is_told and not Path(settings.runtime_root).exists()


def _files(settings: Settings) -> RulesFiles:
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


def _over_xds(settings: Settings, rules: Rules) -> AdsRules:
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
        most_bytes=settings.xds_client_max_msg_size_in_bytes or USUAL_MESSAGE_BYTES,
        ping_every_s=settings.rls_xds_keepalive.total_seconds(),
    )
    node = AdsNode(settings.config_grpc_xds_node_id, node_metadata(settings.config_grpc_xds_node_metadata))
    pauses = Pauses(
        settings.xds_client_backoff_initial_interval.total_seconds(),
        settings.xds_client_backoff_max_interval.total_seconds(),
        settings.xds_client_backoff_random_factor,
        jitter=settings.xds_client_backoff_jitter,
    )
    eager_s = settings.config_grpc_xds_server_connect_retry_interval.total_seconds()
    return AdsRules(server, node, rules, pauses, eager_s)
