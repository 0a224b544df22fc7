"""The cluster through which Envoy reaches the service."""

from __future__ import annotations

from datetime import timedelta

from ratelimit_rls.envoy_config.api import (
    Address,
    Any,
    CertificateValidationContext,
    Cluster,
    ClusterDiscoveryType,
    ClusterLoadAssignment,
    CommonTlsContext,
    DataSource,
    Endpoint,
    HealthCheck,
    HealthCheckGrpcHealthCheck,
    Http2ProtocolOptions,
    HttpProtocolOptions,
    HttpProtocolOptionsExplicitHttpConfig,
    LbEndpoint,
    LocalityLbEndpoints,
    Pipe,
    SocketAddress,
    StringMatcher,
    SubjectAltNameMatcher,
    SubjectAltNameMatcherSanType,
    TlsCertificate,
    TransportSocket,
    UpstreamTlsContext,
)
from ratelimit_rls.envoy_config.options import EnvoyConfigOptions, ServiceAddress, UpstreamTls

HEALTH_SERVICE = "ratelimit"


def service_cluster(options: EnvoyConfigOptions) -> Cluster:
    server = options.server
    where = Pipe(path=server.unix_socket) if server.unix_socket else None
    address = Address(pipe=where) if where else socket_address(server.host, server.port)
    http2 = HttpProtocolOptionsExplicitHttpConfig(http2_protocol_options=Http2ProtocolOptions())
    protocol = HttpProtocolOptions(explicit_http_config=http2)  # gRPC is HTTP/2 only
    return Cluster(
        name=options.cluster,
        type=ClusterDiscoveryType.STATIC if where or server.is_ip else ClusterDiscoveryType.STRICT_DNS,
        connect_timeout=timedelta(seconds=1),
        typed_extension_protocol_options={"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": Any.pack(protocol)},
        transport_socket=_tls(server, server.tls) if server.tls else None,
        health_checks=[_health_check()] if server.health_check else [],
        load_assignment=assignment(options.cluster, address),
    )


def socket_address(host: str, port: int) -> Address:
    return Address(socket_address=SocketAddress(address=host, port_value=port))


def assignment(cluster: str, address: Address) -> ClusterLoadAssignment:
    endpoint = LbEndpoint(endpoint=Endpoint(address=address))
    return ClusterLoadAssignment(cluster_name=cluster, endpoints=[LocalityLbEndpoints(lb_endpoints=[endpoint])])


def _tls(server: ServiceAddress, tls: UpstreamTls) -> TransportSocket:
    """Return a TLS transport socket that verifies CA and name: by default Envoy would accept any certificate."""
    kinds = SubjectAltNameMatcherSanType
    name = tls.server_name or server.host
    by_ip = server.is_ip and not tls.server_name
    san = SubjectAltNameMatcher(san_type=kinds.IP_ADDRESS if by_ip else kinds.DNS, matcher=StringMatcher(exact=name))
    certificates = [
        TlsCertificate(certificate_chain=DataSource(filename=tls.cert), private_key=DataSource(filename=tls.key))
    ]
    context = UpstreamTlsContext(
        sni="" if by_ip else name,
        common_tls_context=CommonTlsContext(
            tls_certificates=certificates if tls.cert else [],
            validation_context=CertificateValidationContext(
                trusted_ca=DataSource(filename=tls.cacert), match_typed_subject_alt_names=[san]
            ),
        ),
    )
    return TransportSocket(name="envoy.transport_sockets.tls", typed_config=Any.pack(context))


def _health_check() -> HealthCheck:
    """Return a gRPC health check. A draining replica reports NOT_SERVING at once, so one failed check is enough."""
    return HealthCheck(
        timeout=timedelta(seconds=1),
        interval=timedelta(seconds=2),
        unhealthy_threshold=1,
        healthy_threshold=1,
        grpc_health_check=HealthCheckGrpcHealthCheck(service_name=HEALTH_SERVICE),
    )
