"""A complete configuration for `envoy -c`: a listener, an example upstream, and the service's cluster."""

from __future__ import annotations

from datetime import timedelta

from ratelimit_rls.envoy_config.api import (
    Admin,
    Any,
    Bootstrap,
    BootstrapStaticResources,
    Cluster,
    ClusterDiscoveryType,
    CommonHttpProtocolOptions,
    Filter,
    FilterChain,
    HttpConnectionManager,
    HttpFilter,
    HttpProtocolOptionsHeadersWithUnderscoresAction,
    Listener,
    Route,
    RouteAction,
    RouteConfiguration,
    RouteMatch,
    Router,
    VirtualHost,
)
from ratelimit_rls.envoy_config.cluster import assignment, socket_address
from ratelimit_rls.envoy_config.options import ADMIN_PORT, is_ip
from ratelimit_rls.envoy_config.resources import EnvoyResources

HostPortPair = tuple[str, int]

ADMIN: HostPortPair = ("127.0.0.1", ADMIN_PORT)
UPSTREAM = "upstream"


def bootstrap(resources: EnvoyResources, listen: HostPortPair, upstream: HostPortPair) -> Bootstrap:
    host = VirtualHost(
        name=UPSTREAM,
        domains=["*"],
        rate_limits=list(resources.rate_limits),
        typed_per_filter_config=dict(resources.per_host),
        routes=[Route(match=RouteMatch(prefix="/"), route=RouteAction(cluster=UPSTREAM))],
    )
    router = HttpFilter(name="envoy.filters.http.router", typed_config=Any.pack(Router()))
    manager = HttpConnectionManager(
        stat_prefix="ingress",
        # An edge proxy: the client is the peer of the connection, and X-Forwarded-For is not trusted.
        use_remote_address=True,
        # Normalise paths and hosts that an upstream treats as equal before they are counted.
        normalize_path=True,
        merge_slashes=True,
        strip_any_host_port=True,
        strip_trailing_host_dot=True,
        common_http_protocol_options=common_http_protocol_options(),
        route_config=RouteConfiguration(virtual_hosts=[host]),
        http_filters=[*resources.filters, router],
    )
    chain = FilterChain(
        filters=[Filter(name="envoy.filters.network.http_connection_manager", typed_config=Any.pack(manager))]
    )
    example = Cluster(
        name=UPSTREAM,
        type=ClusterDiscoveryType.STATIC if is_ip(upstream[0]) else ClusterDiscoveryType.STRICT_DNS,
        connect_timeout=timedelta(seconds=1),
        load_assignment=assignment(UPSTREAM, socket_address(*upstream)),
    )
    return Bootstrap(
        admin=Admin(address=socket_address(*ADMIN)),
        static_resources=BootstrapStaticResources(
            listeners=[Listener(name="ingress", address=socket_address(*listen), filter_chains=[chain])],
            clusters=[example, resources.cluster] if resources.cluster else [example],
        ),
    )


def common_http_protocol_options() -> CommonHttpProtocolOptions:
    """Return options that reject requests with an underscore in a header name with 400.

    Servers that follow CGI (WSGI, PHP, Rack) take `x_ratelimit_user` for `x-ratelimit-user`, and `x_user` for the
    `x-user` that a descriptor is built from: a client could claim an identity, or avoid being counted.
    """
    return CommonHttpProtocolOptions(
        headers_with_underscores_action=HttpProtocolOptionsHeadersWithUnderscoresAction.REJECT_REQUEST
    )
