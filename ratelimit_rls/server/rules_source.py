"""Where the rules come from, by the settings, and the loader that keeps to it."""

from __future__ import annotations

from pathlib import Path

from ratelimit_rls.rules.loader import RulesLoader
from ratelimit_rls.rules.snapshot import Rules
from ratelimit_rls.rules.sources.files import RulesFiles, RuntimeTree
from ratelimit_rls.settings import Settings
from ratelimit_rls.settings.xds import XDS, grpc_metadata, node_metadata
from ratelimit_rls.telemetry.metrics import Metrics
from ratelimit_rls.transport.grpc.ads import AdsNode, AdsRules
from ratelimit_rls.transport.grpc.ads_pauses import Pauses
from ratelimit_rls.transport.grpc.ads_stream import USUAL_MESSAGE_BYTES, AdsServer
from ratelimit_rls.transport.grpc.ads_tls import AdsTlsFiles


def new_loader(settings: Settings, rules: Rules, metrics: Metrics) -> RulesLoader:
    over_xds = _over_xds(settings, rules) if settings.config_type == XDS else None
    if over_xds is not None:
        metrics.measure(over_xds.measured)
    return RulesLoader(
        over_xds or _files(settings),
        rules,
        metrics,
        merge_domains=settings.merge_domain_config,
        default_admitted=settings.stop_cache_key_increment_when_overlimit,
        explain=over_xds.explain if over_xds else None,
    )


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
