"""The two filters that ask the service: for rate_limit Envoy makes the descriptors, for ext_authz the rules do."""

from __future__ import annotations

from datetime import timedelta

from ratelimit_rls.core.attributes import AttributeMapping, Client, Header
from ratelimit_rls.envoy_config.actions import rate_limits
from ratelimit_rls.envoy_config.api import (
    Any,
    ApiVersion,
    CheckSettings,
    ExtAuthz,
    ExtAuthzPerRoute,
    GrpcService,
    GrpcServiceEnvoyGrpc,
    HttpFilter,
    ListStringMatcher,
    RateLimitFilter,
    RateLimitServiceConfig,
    RateLimitXRateLimitHeadersRfcVersion,
    StringMatcher,
)
from ratelimit_rls.envoy_config.descriptors import Plan
from ratelimit_rls.envoy_config.options import DEFAULT_TIMEOUT_US, Options

ALWAYS_SENT = ("content-type", "x-request-id")
"""Headers that an answer by ext_authz depends on, whatever the rules read."""


def rate_limit_filter(plan: Plan, options: Options, name: str, *, stage: int = 0, holds: bool = False) -> HttpFilter:
    """`holds`: the descriptors are the filter's own, and routes have no say in them."""
    headers = RateLimitXRateLimitHeadersRfcVersion
    config = RateLimitFilter(
        domain=plan.domain,
        stage=stage,
        timeout=_timeout(options, plan.longest_wait_us),
        failure_mode_deny=options.deny_on_failure,
        rate_limit_service=RateLimitServiceConfig(
            grpc_service=_grpc_service(options), transport_api_version=ApiVersion.V3
        ),
        enable_x_ratelimit_headers=headers.DRAFT_VERSION_03 if options.x_ratelimit_headers else headers.OFF,
        rate_limits=rate_limits(plan) if holds else [],
    )
    return HttpFilter(name=name, typed_config=Any.pack(config))


def ext_authz_filter(mapping: AttributeMapping, longest_wait_us: int, options: Options, name: str) -> HttpFilter:
    """Sends what the mapping reads and no more: neither cookies nor tokens, unless the rules are made of them."""
    config = ExtAuthz(
        grpc_service=_grpc_service(options, _timeout(options, longest_wait_us)),
        transport_api_version=ApiVersion.V3,
        failure_mode_allow=not options.deny_on_failure,
        allowed_headers=ListStringMatcher(patterns=[StringMatcher(exact=header) for header in headers_read(mapping)]),
        metadata_context_namespaces=sorted({namespace for namespace, *_ in mapping.metadata}),
    )
    return HttpFilter(name=name, typed_config=Any.pack(config))


def headers_read(mapping: AttributeMapping) -> list[str]:
    """`:path`, `:method` and the like arrive beside the headers, and need not be allowed."""
    names = set(ALWAYS_SENT)
    for descriptor in mapping.descriptors:
        for entry in descriptor.entries:
            if isinstance(entry.source, Header):
                names.add(entry.source.name)
            elif isinstance(entry.source, Client) and entry.source.client_ip.trusted_proxies:
                names.add("x-forwarded-for")
    return sorted(names)


def domain_for_ext_authz(domain: str) -> Any:
    """What a virtual host says so that the service knows which domain decides."""
    settings = CheckSettings(context_extensions={"ratelimit_domain": domain})
    return Any.pack(ExtAuthzPerRoute(check_settings=settings))


def _timeout(options: Options, longest_wait_us: int) -> timedelta:
    us = options.timeout_us if options.timeout_us is not None else DEFAULT_TIMEOUT_US + longest_wait_us
    return timedelta(microseconds=us)


def _grpc_service(options: Options, timeout: timedelta | None = None) -> GrpcService:
    envoy_grpc = GrpcServiceEnvoyGrpc(cluster_name=options.cluster, authority=options.authority)
    return GrpcService(envoy_grpc=envoy_grpc, timeout=timeout)
