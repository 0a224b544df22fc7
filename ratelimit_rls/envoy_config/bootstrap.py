"""A whole configuration that `envoy -c` runs as it stands: a listener, an example upstream, and us."""

from __future__ import annotations

from datetime import timedelta

from ratelimit_rls.envoy_config.api import (
    Admin,
    Any,
    Bootstrap,
    BootstrapStaticResources,
    Cluster,
    ClusterDiscoveryType,
    Filter,
    FilterChain,
    HttpConnectionManager,
    HttpFilter,
    Listener,
    Route,
    RouteAction,
    RouteConfiguration,
    RouteMatch,
    Router,
    VirtualHost,
)
from ratelimit_rls.envoy_config.cluster import assignment, socket_address
from ratelimit_rls.envoy_config.envoy_side import EnvoySide
from ratelimit_rls.envoy_config.options import ADMIN_PORT, is_ip

HostPort = tuple[str, int]

ADMIN: HostPort = ("127.0.0.1", ADMIN_PORT)
UPSTREAM = "upstream"


def bootstrap(side: EnvoySide, listen: HostPort, upstream: HostPort) -> Bootstrap:
    host = VirtualHost(
        name=UPSTREAM,
        domains=["*"],
        rate_limits=list(side.rate_limits),
        typed_per_filter_config=dict(side.per_host),
        routes=[Route(match=RouteMatch(prefix="/"), route=RouteAction(cluster=UPSTREAM))],
    )
    router = HttpFilter(name="envoy.filters.http.router", typed_config=Any.pack(Router()))
    manager = HttpConnectionManager(
        stat_prefix="ingress",
        # An edge: the client is whoever connects, and X-Forwarded-For is hearsay.
        use_remote_address=True,
        # What an upstream takes for the same path or host is made the same before it is counted.
        normalize_path=True,
        merge_slashes=True,
        strip_any_host_port=True,
        route_config=RouteConfiguration(virtual_hosts=[host]),
        http_filters=[*side.filters, router],
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
            clusters=[example, side.cluster] if side.cluster else [example],
        ),
    )
