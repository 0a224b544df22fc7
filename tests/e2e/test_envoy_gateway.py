"""The service as the rate limit service of Envoy Gateway: its environment, certificates and descriptors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from ratelimit_rls.core.model import Code
from tests.support.certificates import Authority
from tests.support.grpc_client import Http, ask, get, rate_limit_request
from tests.support.ports import free_port
from tests.support.servers import EnvoyServer, RedisServer, Upstream
from tests.support.service_process import ServiceProcess
from tests.support.xds_server import AdsServer, config

pytestmark = pytest.mark.e2e

XDS_NAME, SERVICE_NAME, PROXY_NAME = "localhost", "envoy-ratelimit", "envoy"

DOMAIN = "default/eg/http"
ROUTE = "httproute/default/shop/rule/0/match/0/shop_example"

HTTP_CONNECTION_MANAGER = (
    "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
)

MAPPING = """\
mappings:
  - match: "ratelimit.service.rate_limit.*.*.*.total_hits"
    name: "ratelimit_service_rate_limit_total_hits"
    labels: {domain: "$1", key1: "$2", key2: "$3"}
"""


class Certificates:
    """Certificates of one CA in mounted files: the service's pair at /certs, and the proxy's elsewhere."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.mounted = directory / "certs"
        self.mounted.mkdir()
        self._generation = 0
        self.rotate()

    def rotate(self) -> None:
        """Replace all certificates, including the CA."""
        self._generation += 1
        self.authority = Authority(self.directory / f"generation-{self._generation}", f"CA {self._generation}")
        chain, key = self.authority.issue(SERVICE_NAME)
        for name, source in (("ca.crt", self.authority.ca_path), ("tls.crt", chain), ("tls.key", key)):
            (self.mounted / "new").write_bytes(source.read_bytes())
            (self.mounted / "new").rename(self.mounted / name)
        self.proxy = self.authority.issue(PROXY_NAME)

    @property
    def of_xds(self) -> tuple[bytes, bytes, bytes]:
        chain, key = self.authority.issue(XDS_NAME)
        return key.read_bytes(), chain.read_bytes(), self.authority.ca_path.read_bytes()

    def of_client(self, *, with_certificate: bool = True) -> grpc.ChannelCredentials:
        chain, key = (path.read_bytes() for path in self.proxy)
        ca = self.authority.ca_path.read_bytes()
        return grpc.ssl_channel_credentials(ca, key, chain) if with_certificate else grpc.ssl_channel_credentials(ca)


class GatewayService(ServiceProcess):
    """The service as Envoy Gateway deploys it, except for ports, paths and drain times."""

    def __init__(self, certs: Path, xds: AdsServer, redis: RedisServer, mapper: Path) -> None:
        self.metrics_port = free_port()
        super().__init__(
            {
                "RUNTIME_ROOT": "/data",
                "RUNTIME_SUBDIRECTORY": "ratelimit",
                "RUNTIME_IGNOREDOTFILES": "true",
                "RUNTIME_WATCH_ROOT": "false",
                "LOG_LEVEL": "info",
                "USE_STATSD": "false",
                "CONFIG_TYPE": "GRPC_XDS_SOTW",
                "CONFIG_GRPC_XDS_SERVER_URL": f"{XDS_NAME}:{xds.port}",
                "CONFIG_GRPC_XDS_NODE_ID": "envoy-ratelimit",
                "GRPC_SERVER_USE_TLS": "true",
                "GRPC_SERVER_TLS_CERT": certs / "tls.crt",
                "GRPC_SERVER_TLS_KEY": certs / "tls.key",
                "GRPC_SERVER_TLS_CA_CERT": certs / "ca.crt",
                "CONFIG_GRPC_XDS_SERVER_USE_TLS": "true",
                "CONFIG_GRPC_XDS_CLIENT_TLS_CERT": certs / "tls.crt",
                "CONFIG_GRPC_XDS_CLIENT_TLS_KEY": certs / "tls.key",
                "CONFIG_GRPC_XDS_SERVER_TLS_CACERT": certs / "ca.crt",
                "FORCE_START_WITHOUT_INITIAL_CONFIG": "true",
                "REDIS_SOCKET_TYPE": "tcp",
                "REDIS_URL": redis.address,
                "USE_PROMETHEUS": "true",
                "PROMETHEUS_ADDR": f":{self.metrics_port}",
                "PROMETHEUS_MAPPER_YAML": mapper,
                "TRACING_ENABLED": "true",
                "TRACING_SERVICE_NAME": "envoy-ratelimit",
                "TRACING_SERVICE_NAMESPACE": "envoy-gateway-system",
                "TRACING_SERVICE_INSTANCE_ID": "envoy-ratelimit-0",
                "TRACING_SAMPLING_RATE": "0.5",
                "TRACING_EXPORTER_PROTOCOL": "grpc",
                "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1",
            }
        )

    def check(self, certificates: grpc.ChannelCredentials) -> int:
        """Send one call like a proxy, and return the overall code."""
        request = rate_limit_request(DOMAIN, {ROUTE: ROUTE, "rule-9-match-9": "unlimited"})
        options = (("grpc.ssl_target_name_override", SERVICE_NAME),)
        return int(ask(self.grpc_address, request, certificates, options).overall_code)


def gateway_config(per_user: dict[str, Any], per_address: int) -> Any:
    """Limits of one route: by user if the request names one, and by address within a network."""
    by_user = {"key": "rule-0-match-0", "rate_limit": per_user}
    address = {"key": "remote_address", "rate_limit": {"unit": "YEAR", "requests_per_unit": per_address}}
    network = {"key": "masked_remote_address", "value": "127.0.0.0/8", "descriptors": [address]}
    route = {"key": ROUTE, "value": ROUTE, "descriptors": [by_user, network]}
    return config("{}", name=DOMAIN, domain=DOMAIN, descriptors=[route])


def per_year(number: int) -> dict[str, Any]:
    return {"unit": "YEAR", "requests_per_unit": number}


def envoy_config(path: Path, certificates: Certificates) -> Path:
    """Listener and cluster as Envoy Gateway generates them."""
    chain, key = certificates.proxy
    path.write_text(f"""
admin: {{address: {{socket_address: {{address: 127.0.0.1, port_value: 9901}}}}}}
static_resources:
  listeners:
    - name: {DOMAIN}
      address: {{socket_address: {{address: 127.0.0.1, port_value: 10000}}}}
      filter_chains:
        - filters:
            - name: envoy.filters.network.http_connection_manager
              typed_config:
                "@type": {HTTP_CONNECTION_MANAGER}
                stat_prefix: http
                use_remote_address: true
                route_config:
                  virtual_hosts:
                    - name: shop
                      domains: ["*"]
                      routes:
                        - match: {{prefix: /}}
                          route: {{cluster: upstream}}
                          typed_per_filter_config:
                            envoy.filters.http.ratelimit:
                              "@type": type.googleapis.com/envoy.extensions.filters.http.ratelimit.v3.RateLimitPerRoute
                              rate_limits:
                                - actions:
                                    - generic_key: {{descriptor_key: "{ROUTE}", descriptor_value: "{ROUTE}"}}
                                    - request_headers: {{header_name: x-user, descriptor_key: rule-0-match-0}}
                                - actions:
                                    - generic_key: {{descriptor_key: "{ROUTE}", descriptor_value: "{ROUTE}"}}
                                    - masked_remote_address: {{v4_prefix_mask_len: 8}}
                                    - remote_address: {{}}
                http_filters:
                  - name: envoy.filters.http.ratelimit
                    typed_config:
                      "@type": type.googleapis.com/envoy.extensions.filters.http.ratelimit.v3.RateLimit
                      domain: {DOMAIN}
                      enable_x_ratelimit_headers: DRAFT_VERSION_03
                      failure_mode_deny: true
                      timeout: 2s
                      rate_limit_service:
                        transport_api_version: V3
                        grpc_service: {{envoy_grpc: {{cluster_name: ratelimit_cluster}}}}
                  - name: envoy.filters.http.router
                    typed_config:
                      "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router
  clusters:
    - name: upstream
      load_assignment:
        cluster_name: upstream
        endpoints:
          - lb_endpoints: [{{endpoint: {{address: {{socket_address: {{address: 127.0.0.1, port_value: 8000}}}}}}}}]
    - name: ratelimit_cluster
      connect_timeout: 10s
      typed_extension_protocol_options:
        envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
          "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
          explicit_http_config: {{http2_protocol_options: {{}}}}
      transport_socket:
        name: envoy.transport_sockets.tls
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext
          sni: {SERVICE_NAME}
          common_tls_context:
            tls_certificates: [{{certificate_chain: {{filename: {chain}}}, private_key: {{filename: {key}}}}}]
            validation_context:
              trusted_ca: {{filename: {certificates.authority.ca_path}}}
              match_typed_subject_alt_names: [{{san_type: DNS, matcher: {{exact: {SERVICE_NAME}}}}}]
      load_assignment:
        cluster_name: ratelimit_cluster
        endpoints:
          - lb_endpoints: [{{endpoint: {{address: {{socket_address: {{address: 127.0.0.1, port_value: 8081}}}}}}}}]
""")
    return path


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)


@pytest.fixture
def xds(certificates: Certificates) -> Iterator[AdsServer]:
    with AdsServer(certificates.of_xds) as server:
        yield server


def statuses(proxy: EnvoyServer, times: int, **headers: str) -> list[int]:
    with Http(proxy.url) as client:
        return [client.get("/", **headers).status for _ in range(times)]


def test_envoy_gateway_deployment_with_reload_and_certificate_rotation(
    certificates: Certificates, xds: AdsServer, any_redis: RedisServer, upstream: Upstream, tmp_path: Path
) -> None:
    mapper = tmp_path / "conf.yaml"
    mapper.write_text(MAPPING)
    service = GatewayService(certificates.mounted, xds, any_redis, mapper)
    where = {8000: upstream.port, 8081: service.grpc_port}
    proxied = EnvoyServer(envoy_config(tmp_path / "envoy.yaml", certificates), where)
    with service, proxied as proxy:
        # Serves at once, with the error of envoyproxy/ratelimit until there are rules.
        with pytest.raises(grpc.RpcError) as raised:
            service.check(certificates.of_client())
        assert raised.value.details() == "no rate limit configuration loaded"
        assert service.healthcheck().status == 200

        ack = xds.answer_to(xds.send("1", gateway_config(per_year(2), 1000)))
        assert (ack.version_info, ack.error_detail) == ("1", None)
        assert ack.node is not None
        assert ack.node.id == "envoy-ratelimit"
        assert statuses(proxy, 3, x_user="ann") == [200, 200, 429]
        assert statuses(proxy, 1, x_user="bob") == [200]

        # Reloaded.
        assert xds.answer_to(xds.send("2", gateway_config(per_year(3), 6))).error_detail is None
        assert statuses(proxy, 2, x_user="bob") == [200, 200]
        assert statuses(proxy, 1) == [429]  # the seventh request of this address
        assert xds.answer_to(xds.send("3", gateway_config(per_year(1000), 1000))).error_detail is None

        # Invalid rules change nothing.
        nack = xds.answer_to(xds.send("4", gateway_config({"requests_per_unit": 1}, 1)))
        assert nack.error_detail is not None
        assert "invalid rate limit unit 'UNKNOWN'" in nack.error_detail.message
        assert f"(in {DOMAIN}.{ROUTE}_{ROUTE}.rule-0-match-0)" in nack.error_detail.message
        assert nack.version_info == "3"
        assert statuses(proxy, 2, x_user="ann") == [200, 200]

        # envoyproxy/ratelimit admits these clients.
        with pytest.raises(grpc.RpcError) as raised:
            service.check(certificates.of_client(with_certificate=False))
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE

        # Replace every certificate, including the CA.
        old = certificates.of_client()
        assert service.check(old) == Code.OK
        certificates.rotate()
        xds.stop()
        xds.certificates = certificates.of_xds
        xds.start()
        ack = xds.answer_to(xds.send("5", gateway_config(per_year(1001), 1001)))
        assert (ack.version_info, ack.error_detail) == ("5", None)
        service.wait_for_log("tls_reloaded")
        assert service.check(certificates.of_client()) == Code.OK
        with pytest.raises(grpc.RpcError):
            service.check(old)
        assert statuses(proxy, 2, x_user="ann") == [200, 200]  # on its existing connection
        assert service.healthcheck().status == 200

        metrics = get(f"http://127.0.0.1:{service.metrics_port}", "/metrics")
        assert metrics.status == 200
        assert "ratelimit_service" in metrics.body
        assert "Traceback" not in service.log()


def test_ai_gateway_quotas_over_a_plaintext_stream(any_redis: RedisServer) -> None:
    """A call is allowed while any of its quotas has something remaining."""
    quota = config(
        """
        name: ai-gateway-quota
        domain: ai-gateway-quota
        descriptors:
          - key: backend_name
            value: openai
            descriptors:
              - key: model_name_override
                value: small
                quota_mode: true
                rate_limit: {unit: YEAR, requests_per_unit: 1}
              - key: model_name_override
                value: large
                quota_mode: true
                rate_limit: {unit: YEAR, requests_per_unit: 2}
        """
    )
    both = [{"backend_name": "openai", "model_name_override": model} for model in ("small", "large")]
    with AdsServer() as server:
        server.send("1", quota)
        environment = {
            "CONFIG_TYPE": "GRPC_XDS_SOTW",
            "CONFIG_GRPC_XDS_SERVER_URL": server.address,
            "CONFIG_GRPC_XDS_NODE_ID": "envoy-ai-gateway-ratelimit",
            "USE_STATSD": "false",
            "REDIS_SOCKET_TYPE": "tcp",
            "REDIS_URL": any_redis.address,
        }
        with ServiceProcess(environment) as service:
            call = rate_limit_request("ai-gateway-quota", *both)
            codes = [int(ask(service.grpc_address, call).overall_code) for _ in range(3)]
            assert codes == [Code.OK, Code.OK, Code.OVER_LIMIT]
            (request, *_) = server.requests
            assert request.node is not None
            assert request.node.id == "envoy-ai-gateway-ratelimit"
