"""The manifests of envoy/gateways: up to date, with known fields only, and with valid rules.

Their fields were compared with the CRDs of each project; the table below pins them.
"""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from ratelimit_rls.cli import main
from ratelimit_rls.rules.compile import compile_documents

GATEWAYS = Path(__file__).parents[3] / "envoy" / "gateways"
CHART = GATEWAYS.parents[1] / "charts" / "ratelimit-rls"
HELM = Path(sys.executable).with_name("helm")

SERVER = "ratelimit-rls.ratelimit.svc.cluster.local:8081"

# By apiVersion and kind: the path of every field in use. Lists are transparent; `*` is any key or a whole message.
KNOWN = {
    ("networking.istio.io/v1alpha3", "EnvoyFilter"): """
        spec.workloadSelector.labels.*
        spec.configPatches.applyTo
        spec.configPatches.match.context
        spec.configPatches.match.listener.filterChain.filter.name
        spec.configPatches.match.listener.filterChain.filter.subFilter.name
        spec.configPatches.match.routeConfiguration.vhost.route.action
        spec.configPatches.patch.operation
        spec.configPatches.patch.value.*
    """,
    ("gateway.envoyproxy.io/v1alpha1", "EnvoyPatchPolicy"): """
        spec.targetRef.group spec.targetRef.kind spec.targetRef.name
        spec.type
        spec.jsonPatches.type spec.jsonPatches.name
        spec.jsonPatches.operation.op spec.jsonPatches.operation.path spec.jsonPatches.operation.jsonPath
        spec.jsonPatches.operation.value.*
    """,
    ("gateway.envoyproxy.io/v1alpha1", "BackendTrafficPolicy"): """
        spec.targetRefs.group spec.targetRefs.kind spec.targetRefs.name
        spec.rateLimit.global.rules.clientSelectors.headers.name
        spec.rateLimit.global.rules.clientSelectors.headers.type
        spec.rateLimit.global.rules.clientSelectors.sourceCIDR.type
        spec.rateLimit.global.rules.clientSelectors.sourceCIDR.value
        spec.rateLimit.global.rules.limit.requests
        spec.rateLimit.global.rules.limit.unit
        spec.rateLimit.global.rules.shadowMode
    """,
    ("aigateway.envoyproxy.io/v1alpha1", "QuotaPolicy"): """
        spec.targetRefs.group spec.targetRefs.kind spec.targetRefs.name
        spec.perModelQuotas.modelName
        spec.perModelQuotas.quota.mode
        spec.perModelQuotas.quota.defaultBucket.limit
        spec.perModelQuotas.quota.defaultBucket.duration
        spec.perModelQuotas.quota.bucketRules.clientSelectors.headers.name
        spec.perModelQuotas.quota.bucketRules.clientSelectors.headers.type
        spec.perModelQuotas.quota.bucketRules.quota.limit
        spec.perModelQuotas.quota.bucketRules.quota.duration
    """,
    ("projectcontour.io/v1alpha1", "ExtensionService"): """
        spec.protocol spec.services.name spec.services.port spec.timeoutPolicy.response
    """,
    ("projectcontour.io/v1", "HTTPProxy"): """
        spec.virtualhost.fqdn
        spec.virtualhost.rateLimitPolicy.global.descriptors.entries.remoteAddress
        spec.virtualhost.rateLimitPolicy.global.descriptors.entries.requestHeader.headerName
        spec.virtualhost.rateLimitPolicy.global.descriptors.entries.requestHeader.descriptorKey
        spec.routes.conditions.prefix
        spec.routes.services.name spec.routes.services.port
        spec.routes.rateLimitPolicy.global.descriptors.entries.remoteAddress
        spec.routes.rateLimitPolicy.global.descriptors.entries.genericKey.value
    """,
    ("getambassador.io/v3alpha1", "RateLimitService"): """
        spec.service spec.protocol_version spec.domain spec.timeout_ms spec.failure_mode_deny
    """,
    ("getambassador.io/v3alpha1", "Mapping"): """
        spec.hostname spec.prefix spec.rewrite spec.service spec.labels.*
    """,
    ("gateway.kgateway.dev/v1alpha1", "GatewayExtension"): """
        spec.type
        spec.rateLimit.grpcService.backendRef.name spec.rateLimit.grpcService.backendRef.port
        spec.rateLimit.domain spec.rateLimit.timeout spec.rateLimit.failOpen spec.rateLimit.xRateLimitHeaders
    """,
    ("gateway.kgateway.dev/v1alpha1", "TrafficPolicy"): """
        spec.targetRefs.group spec.targetRefs.kind spec.targetRefs.name
        spec.rateLimit.global.extensionRef.name spec.rateLimit.global.extensionRef.namespace
        spec.rateLimit.global.descriptors.entries.type spec.rateLimit.global.descriptors.entries.header
    """,
}


def resources() -> Iterator[Any]:
    for path in sorted(GATEWAYS.glob("*/*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            if "kind" in document:
                yield pytest.param(document, id=f"{path.parent.name}-{document['kind']}-{document['metadata']['name']}")


def fields(node: Any, path: str) -> Iterator[str]:
    if isinstance(node, list):
        for item in node:
            yield from fields(item, path)
    elif isinstance(node, dict) and node:
        for key, value in node.items():
            yield from fields(value, f"{path}.{key}")
    else:
        yield path


@pytest.mark.parametrize("resource", list(resources()))
def test_gateway_resource_uses_only_known_fields(resource: dict[str, Any]) -> None:
    kind = resource["apiVersion"], resource["kind"]
    if kind == ("v1", "ConfigMap"):
        kubernetes_validate.validate(resource, "1.37", strict=True)
        return
    known = KNOWN[kind].split()
    prefixes = tuple(path.removesuffix("*") for path in known if path.endswith("*"))
    assert set(resource) == {"apiVersion", "kind", "metadata", "spec"}
    assert set(resource["metadata"]) == {"name", "namespace"}
    for path in fields(resource["spec"], "spec"):
        assert path in known or path.startswith(prefixes or ("-",)), f"{path} is no field of {kind}"


@pytest.mark.parametrize("rules", sorted(GATEWAYS.glob("*/rules.yaml")), ids=lambda path: path.parent.name)
def test_gateway_rules_load(rules: Path) -> None:
    assert compile_documents({rules.name: rules.read_bytes()}).warnings == ()


def generated(*arguments: str | Path) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["envoy-config", *map(str, arguments), "--strict"]) == 0
    return out.getvalue()


def test_gateway_manifests_equal_the_command_output() -> None:
    istio, gateway = GATEWAYS / "istio", GATEWAYS / "envoy-gateway"
    written = generated(istio / "rules.yaml", "--from", "path=path", "--format", "istio", "--server", SERVER)
    assert (istio / "envoyfilter.yaml").read_text() == written
    mapped = ("--from", "user=header:x-user", "--format", "envoy-gateway", "--server", SERVER)
    assert (gateway / "patch.yaml").read_text() == generated(gateway / "rules.yaml", *mapped)


@pytest.mark.slow
@pytest.mark.parametrize("gateway", ["kgateway", "ai-gateway"])
def test_chart_renders_with_the_documented_names(gateway: str) -> None:
    """The chart renders the names that the manifests refer to; the other gateways differ only in their rules."""
    name, namespace = "ratelimit-rls", "ratelimit"
    flags: list[str | Path] = ["--set-file", f"descriptors.inline.rules\\.yaml={GATEWAYS / gateway / 'rules.yaml'}"]
    if gateway == "ai-gateway":
        name, namespace = "envoy-ai-gateway-ratelimit", "envoy-gateway-system"
        flags = ["-f", GATEWAYS / gateway / "values.yaml"]
    command = [HELM, "template", name, CHART, "-n", namespace, *flags]
    rendered = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True).stdout
    found = {}
    for resource in yaml.safe_load_all(rendered):
        kubernetes_validate.validate(resource, "1.37", strict=True)
        found[resource["kind"], resource["metadata"]["name"]] = resource
    service = found["Service", name]
    assert service["metadata"]["namespace"] == namespace
    (grpc,) = (port for port in service["spec"]["ports"] if port["name"] == "grpc")
    assert (grpc["port"], grpc["appProtocol"]) == (8081, "kubernetes.io/h2c")
