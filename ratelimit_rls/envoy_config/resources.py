"""Envoy resources independent of the output format: filters, descriptors of the virtual host, the cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ratelimit_rls.core.attributes import AttributeMapping
from ratelimit_rls.core.identity import IdentityConfig
from ratelimit_rls.envoy_config.actions import rate_limits
from ratelimit_rls.envoy_config.api import Any, Cluster, HttpFilter, RateLimit
from ratelimit_rls.envoy_config.cluster import service_cluster
from ratelimit_rls.envoy_config.descriptors import DomainDescriptors
from ratelimit_rls.envoy_config.filters import domain_for_ext_authz, ext_authz_filter, rate_limit_filter
from ratelimit_rls.envoy_config.host_normalization import host_filter
from ratelimit_rls.envoy_config.options import EnvoyConfigOptions
from ratelimit_rls.envoy_config.value_sources import HostAction

MAX_STAGES = 11
"""Envoy's stages are 0 to 10; each domain on a virtual host needs one."""


@dataclass(frozen=True, slots=True)
class EnvoyResources:
    filters: Sequence[HttpFilter]
    rate_limits: Sequence[RateLimit]  # of the virtual host; empty if the filters contain them
    per_host: Mapping[str, Any]  # `typed_per_filter_config` of the virtual host
    cluster: Cluster | None  # None: Envoy already has it


def rate_limit_resources(
    plans: Sequence[DomainDescriptors],
    options: EnvoyConfigOptions,
    *,
    on_filter: bool,
    with_cluster: bool = True,
    name: str = "envoy.filters.http.ratelimit",
) -> EnvoyResources:
    """Return one rate limit filter per domain, after the host filter if a descriptor needs the host."""
    names = _filter_names(name, [plan.domain for plan in plans])
    with_host = any(
        isinstance(entry.source, HostAction)
        for plan in plans
        for descriptor in plan.descriptors
        for entry in descriptor
    )
    filters, host_limits = [host_filter()] if with_host else [], []
    for number, (plan, filter_name) in enumerate(zip(plans, names, strict=True)):
        stage = 0 if on_filter else number
        filters.append(rate_limit_filter(plan, options, filter_name, stage=stage, holds=on_filter))
        host_limits += [] if on_filter else rate_limits(plan, stage)
    return EnvoyResources(filters, host_limits, {}, service_cluster(options) if with_cluster else None)


def ext_authz_resources(
    mappings: Mapping[str, AttributeMapping],
    identities: Mapping[str, IdentityConfig],
    waits_us: Mapping[str, int],
    options: EnvoyConfigOptions,
    *,
    send_domain: bool,
    with_cluster: bool = True,
    name: str = "envoy.filters.http.ext_authz",
) -> EnvoyResources:
    """Return one ext_authz filter per domain. `send_domain`: the service cannot infer the domain, so Envoy sends it."""
    names = _filter_names(name, list(mappings))
    filters = [
        ext_authz_filter(mapping, identities.get(domain), waits_us[domain], options, filter_name)
        for (domain, mapping), filter_name in zip(mappings.items(), names, strict=True)
    ]
    per_host = {filter_name: domain_for_ext_authz(domain) for domain, filter_name in zip(mappings, names, strict=True)}
    return EnvoyResources(
        filters, [], per_host if send_domain else {}, service_cluster(options) if with_cluster else None
    )


def _filter_names(filter_name: str, domains: list[str]) -> list[str]:
    return [filter_name] if len(domains) == 1 else [f"{filter_name}.{domain}" for domain in domains]
