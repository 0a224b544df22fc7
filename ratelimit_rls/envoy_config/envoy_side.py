"""What Envoy has to be told, whatever the form it is told in: filters, descriptors of the virtual host, the cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ratelimit_rls.core.attributes import AttributeMapping
from ratelimit_rls.envoy_config.actions import rate_limits
from ratelimit_rls.envoy_config.api import Any, Cluster, HttpFilter, RateLimit
from ratelimit_rls.envoy_config.cluster import service_cluster
from ratelimit_rls.envoy_config.descriptors import Plan
from ratelimit_rls.envoy_config.filters import domain_for_ext_authz, ext_authz_filter, rate_limit_filter
from ratelimit_rls.envoy_config.host import host_filter
from ratelimit_rls.envoy_config.options import Options
from ratelimit_rls.envoy_config.source import Host

MOST_STAGES = 11
"""Envoy numbers them from 0 to 10; each domain on a virtual host takes one."""


@dataclass(frozen=True, slots=True)
class EnvoySide:
    filters: Sequence[HttpFilter]
    rate_limits: Sequence[RateLimit]  # of the virtual host; none where the filters have them
    per_host: Mapping[str, Any]  # `typed_per_filter_config` of the virtual host
    cluster: Cluster | None  # None: one that Envoy knows already


def of_rate_limits(
    plans: Sequence[Plan],
    options: Options,
    *,
    on_filter: bool,
    own_cluster: bool = True,
    name: str = "envoy.filters.http.ratelimit",
) -> EnvoySide:
    """One rate limit filter for each domain, after the one that finds out the host if a descriptor has it."""
    names = _names(name, [plan.domain for plan in plans])
    with_host = any(isinstance(entry.source, Host) for plan in plans for made in plan.descriptors for entry in made)
    filters, of_host = [host_filter()] if with_host else [], []
    for number, (plan, filter_name) in enumerate(zip(plans, names, strict=True)):
        stage = 0 if on_filter else number
        filters.append(rate_limit_filter(plan, options, filter_name, stage=stage, holds=on_filter))
        of_host += [] if on_filter else rate_limits(plan, stage)
    return EnvoySide(filters, of_host, {}, service_cluster(options) if own_cluster else None)


def of_ext_authz(
    mappings: Mapping[str, AttributeMapping],
    waits_us: Mapping[str, int],
    options: Options,
    *,
    tell_domain: bool,
    own_cluster: bool = True,
    name: str = "envoy.filters.http.ext_authz",
) -> EnvoySide:
    """One ext_authz filter for each domain; `tell_domain` where the service could not know which one is meant."""
    names = _names(name, list(mappings))
    filters = [
        ext_authz_filter(mapping, waits_us[domain], options, filter_name)
        for (domain, mapping), filter_name in zip(mappings.items(), names, strict=True)
    ]
    told = {filter_name: domain_for_ext_authz(domain) for domain, filter_name in zip(mappings, names, strict=True)}
    return EnvoySide(filters, [], told if tell_domain else {}, service_cluster(options) if own_cluster else None)


def _names(filter_name: str, domains: list[str]) -> list[str]:
    return [filter_name] if len(domains) == 1 else [f"{filter_name}.{domain}" for domain in domains]
