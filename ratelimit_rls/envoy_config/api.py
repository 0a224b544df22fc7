"""Classes of Envoy's API, imported in one place because the import takes half a second."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    # The package declares its validators in a way that pydantic warns about.
    warnings.simplefilter("ignore")
    from envoy_data_plane.envoy.config.bootstrap.v3 import Admin, Bootstrap, BootstrapStaticResources
    from envoy_data_plane.envoy.config.cluster.v3 import Cluster, ClusterDiscoveryType
    from envoy_data_plane.envoy.config.core.v3 import (
        Address,
        ApiVersion,
        DataSource,
        GrpcService,
        GrpcServiceEnvoyGrpc,
        HealthCheck,
        HealthCheckGrpcHealthCheck,
        Http2ProtocolOptions,
        HttpProtocolOptionsHeadersWithUnderscoresAction,
        Pipe,
        SocketAddress,
        TransportSocket,
        TypedExtensionConfig,
    )
    from envoy_data_plane.envoy.config.core.v3 import HttpProtocolOptions as CommonHttpProtocolOptions
    from envoy_data_plane.envoy.config.endpoint.v3 import (
        ClusterLoadAssignment,
        Endpoint,
        LbEndpoint,
        LocalityLbEndpoints,
    )
    from envoy_data_plane.envoy.config.listener.v3 import Filter, FilterChain, Listener
    from envoy_data_plane.envoy.config.ratelimit.v3 import RateLimitServiceConfig
    from envoy_data_plane.envoy.config.route.v3 import (
        HeaderMatcher,
        RateLimit,
        RateLimitAction,
        RateLimitActionDestinationCluster,
        RateLimitActionGenericKey,
        RateLimitActionHeaderValueMatch,
        RateLimitActionMaskedRemoteAddress,
        RateLimitActionMetaData,
        RateLimitActionQueryParameters,
        RateLimitActionRemoteAddress,
        RateLimitActionRequestHeaders,
        RateLimitActionSourceCluster,
        Route,
        RouteAction,
        RouteConfiguration,
        RouteMatch,
        VirtualHost,
    )
    from envoy_data_plane.envoy.extensions.filters.http.ext_authz.v3 import CheckSettings, ExtAuthz, ExtAuthzPerRoute
    from envoy_data_plane.envoy.extensions.filters.http.lua.v3 import Lua
    from envoy_data_plane.envoy.extensions.filters.http.ratelimit.v3 import RateLimit as RateLimitFilter
    from envoy_data_plane.envoy.extensions.filters.http.ratelimit.v3 import RateLimitXRateLimitHeadersRfcVersion
    from envoy_data_plane.envoy.extensions.filters.http.router.v3 import Router
    from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import (
        HttpConnectionManager,
        HttpFilter,
    )
    from envoy_data_plane.envoy.extensions.rate_limit_descriptors.expr.v3 import Descriptor
    from envoy_data_plane.envoy.extensions.transport_sockets.tls.v3 import (
        CertificateValidationContext,
        CommonTlsContext,
        SubjectAltNameMatcher,
        SubjectAltNameMatcherSanType,
        TlsCertificate,
        UpstreamTlsContext,
    )
    from envoy_data_plane.envoy.extensions.upstreams.http.v3 import (
        HttpProtocolOptions,
        HttpProtocolOptionsExplicitHttpConfig,
    )
    from envoy_data_plane.envoy.type.matcher.v3 import ListStringMatcher, RegexMatcher, StringMatcher
    from envoy_data_plane.envoy.type.metadata.v3 import MetadataKey, MetadataKeyPathSegment
    from envoy_data_plane.google.protobuf import Any

__all__ = [
    "Address",
    "Admin",
    "Any",
    "ApiVersion",
    "Bootstrap",
    "BootstrapStaticResources",
    "CertificateValidationContext",
    "CheckSettings",
    "Cluster",
    "ClusterDiscoveryType",
    "ClusterLoadAssignment",
    "CommonHttpProtocolOptions",
    "CommonTlsContext",
    "DataSource",
    "Descriptor",
    "Endpoint",
    "ExtAuthz",
    "ExtAuthzPerRoute",
    "Filter",
    "FilterChain",
    "GrpcService",
    "GrpcServiceEnvoyGrpc",
    "HeaderMatcher",
    "HealthCheck",
    "HealthCheckGrpcHealthCheck",
    "Http2ProtocolOptions",
    "HttpConnectionManager",
    "HttpFilter",
    "HttpProtocolOptions",
    "HttpProtocolOptionsExplicitHttpConfig",
    "HttpProtocolOptionsHeadersWithUnderscoresAction",
    "LbEndpoint",
    "ListStringMatcher",
    "Listener",
    "LocalityLbEndpoints",
    "Lua",
    "MetadataKey",
    "MetadataKeyPathSegment",
    "Pipe",
    "RateLimit",
    "RateLimitAction",
    "RateLimitActionDestinationCluster",
    "RateLimitActionGenericKey",
    "RateLimitActionHeaderValueMatch",
    "RateLimitActionMaskedRemoteAddress",
    "RateLimitActionMetaData",
    "RateLimitActionQueryParameters",
    "RateLimitActionRemoteAddress",
    "RateLimitActionRequestHeaders",
    "RateLimitActionSourceCluster",
    "RateLimitFilter",
    "RateLimitServiceConfig",
    "RateLimitXRateLimitHeadersRfcVersion",
    "RegexMatcher",
    "Route",
    "RouteAction",
    "RouteConfiguration",
    "RouteMatch",
    "Router",
    "SocketAddress",
    "StringMatcher",
    "SubjectAltNameMatcher",
    "SubjectAltNameMatcherSanType",
    "TlsCertificate",
    "TransportSocket",
    "TypedExtensionConfig",
    "UpstreamTlsContext",
    "VirtualHost",
]
