"""The two forms in which a cluster of Kubernetes is told: Istio's EnvoyFilter and Envoy Gateway's EnvoyPatchPolicy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ratelimit_rls.envoy_config.envoy_side import EnvoySide
from ratelimit_rls.envoy_config.written import written

_CONNECTION_MANAGER = "envoy.filters.network.http_connection_manager"
_ROUTER = "envoy.filters.http.router"
_TYPE = "type.googleapis.com/envoy.config"


class IstioTarget(NamedTuple):
    name: str
    namespace: str
    labels: Mapping[str, str]  # of the pods whose Envoy is meant
    context: str  # GATEWAY or SIDECAR_INBOUND


class GatewayTarget(NamedTuple):
    name: str
    namespace: str
    gateway: str
    listener: str  # the name of the listener in Envoy


def envoy_filter(side: EnvoySide, target: IstioTarget) -> dict[str, Any]:
    context = {"context": target.context}
    before_router = {
        **context,
        "listener": {"filterChain": {"filter": {"name": _CONNECTION_MANAGER, "subFilter": {"name": _ROUTER}}}},
    }
    patches = [
        {
            "applyTo": "HTTP_FILTER",
            "match": before_router,
            "patch": {"operation": "INSERT_BEFORE", "value": written(http_filter)},
        }
        for http_filter in side.filters
    ]
    of_host: dict[str, Any] = {}
    if side.rate_limits:
        of_host["rate_limits"] = [written(one) for one in side.rate_limits]
    if side.per_host:
        of_host["typed_per_filter_config"] = {name: written(config) for name, config in side.per_host.items()}
    if of_host:
        patches.append(
            {
                "applyTo": "VIRTUAL_HOST",
                "match": {**context, "routeConfiguration": {"vhost": {"route": {"action": "ANY"}}}},
                "patch": {"operation": "MERGE", "value": of_host},
            }
        )
    if side.cluster is not None:
        patches.append(
            {
                "applyTo": "CLUSTER",
                "match": context,
                "patch": {"operation": "ADD", "value": written(side.cluster)},
            }
        )
    return {
        "apiVersion": "networking.istio.io/v1alpha3",
        "kind": "EnvoyFilter",
        "metadata": {"name": target.name, "namespace": target.namespace},
        "spec": {"workloadSelector": {"labels": dict(target.labels)}, "configPatches": patches},
    }


def envoy_patch_policy(side: EnvoySide, target: GatewayTarget) -> dict[str, Any]:
    """The filters hold the descriptors: a virtual host is made for each host name, and no patch could name them all."""
    assert side.cluster is not None
    assert not side.rate_limits
    assert not side.per_host
    patches: list[dict[str, Any]] = [
        {
            "type": f"{_TYPE}.listener.v3.Listener",
            "name": target.listener,
            "operation": {
                "op": "add",
                # Where the router stands, in every filter chain: what is added there comes before it.
                "jsonPath": f"..http_filters[?(@.name=='{_ROUTER}')]",
                "value": written(http_filter),
            },
        }
        for http_filter in side.filters
    ]
    patches.append(
        {
            "type": f"{_TYPE}.cluster.v3.Cluster",
            "name": side.cluster.name,
            "operation": {"op": "add", "path": "", "value": written(side.cluster)},
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
