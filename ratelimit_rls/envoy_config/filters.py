"""The two HTTP filters that call the service.

With rate_limit Envoy builds the descriptors, with ext_authz the rules do.
"""

from __future__ import annotations

from datetime import timedelta

from ratelimit_rls.core.attributes import (
    AnonymousIpSource,
    AttributeMapping,
    CallerIdSource,
    ClientIpSource,
    HeaderSource,
)
from ratelimit_rls.core.identity import IdentityConfig
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
from ratelimit_rls.envoy_config.descriptors import DomainDescriptors
from ratelimit_rls.envoy_config.options import DEFAULT_TIMEOUT_US, EnvoyConfigOptions

ALWAYS_SENT = ("content-type", "x-request-id")
"""Headers that ext_authz responses depend on, whichever headers the rules read."""


def rate_limit_filter(
    plan: DomainDescriptors, options: EnvoyConfigOptions, name: str, *, stage: int = 0, holds: bool = False
) -> HttpFilter:
    """Return a rate limit filter. `holds`: the filter contains the descriptors, and routes cannot change them."""
    headers = RateLimitXRateLimitHeadersRfcVersion
    config = RateLimitFilter(
        domain=plan.domain,
        stage=stage,
        timeout=_timeout(options, plan.max_wait_us),
        failure_mode_deny=options.deny_on_failure,
        rate_limit_service=RateLimitServiceConfig(
            grpc_service=_grpc_service(options), transport_api_version=ApiVersion.V3
        ),
        enable_x_ratelimit_headers=headers.DRAFT_VERSION_03 if options.x_ratelimit_headers else headers.OFF,
        rate_limits=rate_limits(plan) if holds else [],
    )
    return HttpFilter(name=name, typed_config=Any.pack(config))


def ext_authz_filter(
    mapping: AttributeMapping, identity: IdentityConfig | None, max_wait_us: int, options: EnvoyConfigOptions, name: str
) -> HttpFilter:
    """Return an ext_authz filter that sends only what the mapping reads.

    It sends no cookies or tokens unless the rules use them.
    """
    headers = headers_read(mapping, identity)
    config = ExtAuthz(
        grpc_service=_grpc_service(options, _timeout(options, max_wait_us)),
        transport_api_version=ApiVersion.V3,
        failure_mode_allow=not options.deny_on_failure,
        allowed_headers=ListStringMatcher(patterns=[StringMatcher(exact=header) for header in headers]),
        metadata_context_namespaces=sorted({namespace for namespace, *_ in mapping.metadata}),
    )
    return HttpFilter(name=name, typed_config=Any.pack(config))


def headers_read(mapping: AttributeMapping, identity: IdentityConfig | None = None) -> list[str]:
    """Return the headers that the service reads.

    `:path`, `:method` and the like are sent separately and need not be allowed.
    """
    names = set(ALWAYS_SENT)
    if identity is not None:
        names.update(place.header for place in identity.locations if place.header)
    sources = [entry.source for descriptor in mapping.descriptors for entry in descriptor.entries]
    names.update(source.name for source in sources if isinstance(source, HeaderSource))
    # With `identity` the upstream receives the client's address, whatever the descriptors contain.
    needs_address = identity is not None or any(
        isinstance(one, ClientIpSource | CallerIdSource | AnonymousIpSource) for one in sources
    )
    if needs_address and mapping.client_ip.is_behind_proxies:
        names.add("x-forwarded-for")
    return sorted(names)


def domain_for_ext_authz(domain: str) -> Any:
    """Return the per-route configuration that tells the service which domain applies."""
    settings = CheckSettings(context_extensions={"ratelimit_domain": domain})
    return Any.pack(ExtAuthzPerRoute(check_settings=settings))


def _timeout(options: EnvoyConfigOptions, max_wait_us: int) -> timedelta:
    us = options.timeout_us if options.timeout_us is not None else DEFAULT_TIMEOUT_US + max_wait_us
    return timedelta(microseconds=us)


def _grpc_service(options: EnvoyConfigOptions, timeout: timedelta | None = None) -> GrpcService:
    envoy_grpc = GrpcServiceEnvoyGrpc(cluster_name=options.cluster, authority=options.authority)
    return GrpcService(envoy_grpc=envoy_grpc, timeout=timeout)
