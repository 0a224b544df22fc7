"""Kubernetes resources: Istio's EnvoyFilter and Envoy Gateway's EnvoyPatchPolicy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ratelimit_rls.envoy_config.bootstrap import common_http_protocol_options
from ratelimit_rls.envoy_config.resources import EnvoyResources
from ratelimit_rls.envoy_config.serialize import to_json_dict

_CONNECTION_MANAGER = "envoy.filters.network.http_connection_manager"
_CONNECTION_MANAGER_TYPE = (
    "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
)
_ROUTER = "envoy.filters.http.router"
_TYPE = "type.googleapis.com/envoy.config"


class IstioTarget(NamedTuple):
    name: str
    namespace: str
    labels: Mapping[str, str]  # of the pods whose Envoy is configured
    context: str  # GATEWAY or SIDECAR_INBOUND


class GatewayTarget(NamedTuple):
    name: str
    namespace: str
    gateway: str
    listener: str  # name of the listener in Envoy


def envoy_filter(resources: EnvoyResources, target: IstioTarget) -> dict[str, Any]:
    context = {"context": target.context}
    before_router = {
        **context,
        "listener": {"filterChain": {"filter": {"name": _CONNECTION_MANAGER, "subFilter": {"name": _ROUTER}}}},
    }
    manager = {
        "@type": _CONNECTION_MANAGER_TYPE,
        "common_http_protocol_options": to_json_dict(common_http_protocol_options()),
    }
    patches = [
        {
            "applyTo": "HTTP_FILTER",
            "match": before_router,
            "patch": {"operation": "INSERT_BEFORE", "value": to_json_dict(http_filter)},
        }
        for http_filter in resources.filters
    ]
    patches.append(
        {
            "applyTo": "NETWORK_FILTER",
            "match": {**context, "listener": {"filterChain": {"filter": {"name": _CONNECTION_MANAGER}}}},
            "patch": {"operation": "MERGE", "value": {"typed_config": manager}},
        }
    )
    virtual_host: dict[str, Any] = {}
    if resources.rate_limits:
        virtual_host["rate_limits"] = [to_json_dict(one) for one in resources.rate_limits]
    if resources.per_host:
        virtual_host["typed_per_filter_config"] = {
            name: to_json_dict(config) for name, config in resources.per_host.items()
        }
    if virtual_host:
        patches.append(
            {
                "applyTo": "VIRTUAL_HOST",
                "match": {**context, "routeConfiguration": {"vhost": {"route": {"action": "ANY"}}}},
                "patch": {"operation": "MERGE", "value": virtual_host},
            }
        )
    if resources.cluster is not None:
        patches.append(
            {
                "applyTo": "CLUSTER",
                "match": context,
                "patch": {"operation": "ADD", "value": to_json_dict(resources.cluster)},
            }
        )
    return {
        "apiVersion": "networking.istio.io/v1alpha3",
        "kind": "EnvoyFilter",
        "metadata": {"name": target.name, "namespace": target.namespace},
        "spec": {"workloadSelector": {"labels": dict(target.labels)}, "configPatches": patches},
    }


def envoy_patch_policy(resources: EnvoyResources, target: GatewayTarget) -> dict[str, Any]:
    """Return an EnvoyPatchPolicy whose filters contain the descriptors.

    There is a virtual host per host name, and a patch cannot name them all. Envoy Gateway rejects requests with
    underscores in headers by default, so no patch is needed for that.
    """
    assert resources.cluster is not None
    assert not resources.rate_limits
    assert not resources.per_host
    patches: list[dict[str, Any]] = [
        {
            "type": f"{_TYPE}.listener.v3.Listener",
            "name": target.listener,
            "operation": {
                "op": "add",
                # The position of the router, in every filter chain: the new filter is inserted before it.
                "jsonPath": f"..http_filters[?(@.name=='{_ROUTER}')]",
                "value": to_json_dict(http_filter),
            },
        }
        for http_filter in resources.filters
    ]
    patches.append(
        {
            "type": f"{_TYPE}.cluster.v3.Cluster",
            "name": resources.cluster.name,
            "operation": {"op": "add", "path": "", "value": to_json_dict(resources.cluster)},
        }
    )
    return {
        "apiVersion": "gateway.envoyproxy.io/v1alpha1",
        "kind": "EnvoyPatchPolicy",
        "metadata": {"name": target.name, "namespace": target.namespace},
        "spec": {
            "targetRef": {"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": target.gateway},
            "type": "JSONPatch",
            "jsonPatches": patches,
        },
    }
