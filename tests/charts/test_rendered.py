"""Rendered manifests: valid, equal to the golden files, and secure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import kubernetes_validate
import pytest
import yaml

from ratelimit_rls.identity.issuers import read_issuers
from tests.charts import golden, helm
from tests.charts.helm import CHART, Manifest, limiter, manifests, one, pods
from tests.charts.pod_security import offences

KUBERNETES = ("1.29", kubernetes_validate.latest_version())
"""The oldest version that supports every case, and the newest with available schemas."""

_TEXT, _NUMBER, _TEXTS = (
    {"type": "string"},
    {"type": "integer"},
    {"type": "object", "additionalProperties": {"type": "string"}},
)


def closed(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def listed(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": item}


# Schemas of the kinds of the Prometheus operator: only the fields that the chart uses.
_RELABELING = closed(
    sourceLabels=listed(_TEXT), targetLabel=_TEXT, action=_TEXT, regex=_TEXT, replacement=_TEXT, separator=_TEXT
)
_SECRET_KEY = closed(("name", "key"), name=_TEXT, key=_TEXT)

OPERATOR = {
    "ServiceMonitor": closed(
        ("selector", "endpoints"),
        selector=closed(matchLabels=_TEXTS),
        namespaceSelector=closed(matchNames=listed(_TEXT)),
        sampleLimit=_NUMBER,
        endpoints=listed(
            closed(
                ("port",),
                port=_TEXT,
                path=_TEXT,
                scheme={"enum": ["http", "https"]},
                tlsConfig=closed(
                    ca=closed(secret=_SECRET_KEY), serverName=_TEXT, insecureSkipVerify={"type": "boolean"}
                ),
                authorization=closed(type=_TEXT, credentials=_SECRET_KEY),
                interval=_TEXT,
                scrapeTimeout=_TEXT,
                relabelings=listed(_RELABELING),
                metricRelabelings=listed(_RELABELING),
            )
        ),
    ),
    "PrometheusRule": closed(
        ("groups",),
        groups=listed(
            closed(
                ("name", "rules"),
                name=_TEXT,
                interval=_TEXT,
                rules=listed(
                    closed(
                        ("expr",),
                        alert=_TEXT,
                        record=_TEXT,
                        expr=_TEXT,
                        keep_firing_for=_TEXT,
                        labels=_TEXTS,
                        annotations=_TEXTS,
                        **{"for": _TEXT},
                    )
                ),
            )
        ),
    ),
}


@pytest.mark.parametrize("case", helm.cases())
def test_case_matches_its_golden_file(case: str) -> None:
    path = golden.FOLDER / f"{case}.yaml"
    assert path.exists(), "a new case; `python -m tests.charts.golden` writes its file"
    assert golden.text(case) == path.read_text(), (
        "if it should: `python -m tests.charts.golden`, and read the difference"
    )


def test_every_golden_file_has_a_case() -> None:
    assert sorted(path.stem for path in golden.FOLDER.glob("*.yaml")) == helm.cases()


@pytest.mark.slow
@pytest.mark.parametrize("case", helm.cases())
def test_case_passes_helm_lint(case: str) -> None:
    done = helm.helm("lint", "--strict", CHART, "-f", CHART / "ci" / f"{case}-values.yaml")
    assert done.returncode == 0, done.stdout
    assert "[WARNING]" not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("version", KUBERNETES)
def test_manifests_are_valid_for_kubernetes(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_validate.utils, "schema_contents", cache(kubernetes_validate.utils.schema_contents))
    for case in helm.cases():
        for manifest in manifests(case):
            about = f"{case}: {manifest['kind']}/{manifest['metadata']['name']}"
            try:
                if manifest["kind"] in OPERATOR:
                    check_operator_kind(manifest)
                else:
                    kubernetes_validate.validate(manifest, version, strict=True)
            except kubernetes_validate.utils.jsonschema.ValidationError as fault:
                raise AssertionError(f"{about}: {fault.message} at {list(fault.path)}") from None


def check_operator_kind(manifest: Manifest) -> None:
    assert manifest["apiVersion"] == "monitoring.coreos.com/v1"
    kubernetes_validate.utils.jsonschema.validate(manifest["spec"], OPERATOR[manifest["kind"]])


@pytest.mark.parametrize("case", helm.cases())
def test_every_pod_meets_the_restricted_security_standard(case: str) -> None:
    for name, pod in pods(manifests(case)):
        assert offences(pod) == [], name
        assert pod["automountServiceAccountToken"] is False, name
        assert pod["enableServiceLinks"] is False, name
        for container in helm.containers(pod):
            assert container["securityContext"]["readOnlyRootFilesystem"] is True, name


def test_container_is_restricted_without_the_pod_security_context() -> None:
    _, container = limiter(manifests("sidecar"))
    assert offences({"containers": [container]}) == []


def test_pod_security_violations_are_found() -> None:
    lax = {"name": "lax", "ports": [{"hostPort": 80}], "securityContext": {"runAsUser": 0, "privileged": True}}
    pod = {"hostNetwork": True, "volumes": [{"name": "v", "hostPath": {}}], "containers": [lax]}
    assert len(offences(pod)) == 9


@pytest.mark.parametrize("case", helm.cases())
def test_pod_labels_have_no_version_and_match_selectors(case: str) -> None:
    documents = manifests(case)
    for document in documents:
        if document["kind"] == "Deployment":
            template = document["spec"]["template"]["metadata"]
            labels = template["labels"]
            assert "helm.sh/chart" not in labels
            assert not any("checksum" in name for name in template.get("annotations", {}))
            assert document["spec"]["selector"]["matchLabels"].items() <= labels.items()
        if document["kind"] == "Service":
            deployments = [d for d in documents if d["kind"] == "Deployment"]
            selector = document["spec"]["selector"].items()
            (chosen,) = (d for d in deployments if selector <= d["spec"]["template"]["metadata"]["labels"].items())
            names = {p["name"] for c in chosen["spec"]["template"]["spec"]["containers"] for p in c.get("ports", [])}
            assert {port["targetPort"] for port in document["spec"]["ports"]} <= names


@pytest.mark.parametrize("case", helm.cases())
def test_every_volume_is_mounted_and_every_mount_has_a_volume(case: str) -> None:
    for name, pod in pods(manifests(case)):
        volumes = [volume["name"] for volume in pod.get("volumes", [])]
        mounts = [mount for container in helm.containers(pod) for mount in container.get("volumeMounts", [])]
        assert sorted(set(volumes)) == sorted(volumes), name
        assert {mount["name"] for mount in mounts} == set(volumes), name
        assert not any("subPath" in mount for mount in mounts), "kubelet updates nothing that is mounted so"


def environment(case: str) -> dict[str, str]:
    _, container = limiter(manifests(case))
    return {variable["name"]: variable.get("value", "") for variable in container["env"]}


@pytest.mark.parametrize(
    ("case", "replicas", "expected"),
    [("default", 1, "1"), ("redis", 3, "3"), ("autoscaling", None, "12"), ("sidecar", 2, "2")],
)
def test_rls_replicas_is_the_maximum_number_of_pods(case: str, replicas: int | None, expected: str) -> None:
    deployment = next(d for d in manifests(case) if d["kind"] == "Deployment")
    assert deployment["spec"].get("replicas") == replicas
    assert environment(case)["RLS_REPLICAS"] == expected


@pytest.mark.parametrize(
    ("case", "budget"),
    [("default", None), ("redis", {"minAvailable": "50%"}), ("autoscaling", {"maxUnavailable": 1}), ("sidecar", None)],
)
def test_disruption_budget_only_for_several_pods(case: str, budget: dict[str, Any] | None) -> None:
    found = [d["spec"] for d in manifests(case) if d["kind"] == "PodDisruptionBudget"]
    assert bool(found) == (budget is not None)
    if budget:
        assert budget.items() <= found[0].items()


def test_probes_use_http_if_kubelet_cannot_use_grpc() -> None:
    def probed(case: str) -> list[Any]:
        _, container = limiter(manifests(case))
        found = [container[f"{name}Probe"] for name in ("startup", "readiness", "liveness")]
        return [probe["grpc"]["service"] if "grpc" in probe else probe["httpGet"]["path"] for probe in found]

    assert probed("default") == ["", "ratelimit", ""]
    assert probed("tls") == probed("sidecar") == ["/livez", "/healthcheck", "/livez"]


def test_numbers_and_lists_are_rendered_as_variables() -> None:
    variables = environment("rules") | environment("tls")
    assert variables["RLS_PLAN_CACHE_BYTES"] == "167772160"
    assert variables["NEAR_LIMIT_RATIO"] == "0.75"
    assert variables["LIMIT_RESPONSE_HEADERS_ENABLED"] == "true"
    assert variables["GRPC_CLIENT_TLS_SAN"] == "envoy.edge.svc,spiffe://prod.example/ns/edge/*"


def test_rules_can_be_a_string_or_a_mapping() -> None:
    data = one(manifests("rules"), "ConfigMap")["data"]
    assert data["edge.yaml"].startswith("# Comments stay.\n")
    assert yaml.safe_load(data["internal.yaml"])["domain"] == "internal"
    assert "demo.yaml" not in data


OF_THE_DATABASE = ("RLS_DATABASE_URL", "RLS_KEY_SECRET", "RLS_ADMIN_TOKEN")


def test_secrets_are_mounted_and_never_in_manifests() -> None:
    assert environment("redis")["REDIS_AUTH_FILE"] == "/etc/ratelimit-rls/redis-auth/auth"
    for case in helm.cases():
        _, container = limiter(manifests(case)) if case != "sidecar-templates" else ({}, {"env": []})
        secret = ("REDIS_AUTH", "REDIS_SENTINEL_AUTH", *OF_THE_DATABASE)
        assert not any(v["name"] in secret and "value" in v for v in container["env"])
        assert not any(document["kind"] == "Secret" for document in manifests(case))


@pytest.mark.parametrize(
    ("case", "keys"), [("database", ["url", "key-secret", "admin-token"]), ("sidecar-database", ["address", "secret"])]
)
def test_database_secrets_come_from_one_secret(case: str, keys: list[str]) -> None:
    _, container = limiter(manifests(case))
    found = [variable["valueFrom"]["secretKeyRef"] for variable in container["env"] if "valueFrom" in variable]
    assert found == [{"name": "limiter-database", "key": key} for key in keys]


@pytest.mark.parametrize(
    "case", [case for case in helm.cases() if case != "sidecar-templates" and "database" not in case]
)
def test_nothing_about_a_database_without_one(case: str) -> None:
    pod, container = limiter(manifests(case))
    assert not any(name.startswith("RLS_ADMIN") or name in OF_THE_DATABASE for name in environment(case))
    assert "admin" not in {port["name"] for port in container["ports"]}
    assert "ratelimit-rls-snapshot" not in {volume["name"] for volume in pod["volumes"]}
    assert not any(document["kind"] == "Job" for document in manifests(case))


def test_admin_api_has_its_own_service_or_listens_on_loopback() -> None:
    documents = manifests("database")
    (port,) = one(documents, "Service", "-admin")["spec"]["ports"]
    assert (port["port"], environment("database")["RLS_ADMIN_HOST"]) == (8082, "0.0.0.0")
    for name in ("ratelimit-rls", "-metrics"):
        assert 8082 not in {port["port"] for port in one(documents, "Service", name)["spec"]["ports"]}
    _, sidecar = limiter(manifests("sidecar-database"))
    assert environment("sidecar-database")["RLS_ADMIN_HOST"] == "127.0.0.1"
    assert {port["name"] for port in sidecar["ports"]} == {"rls-http", "rls-metrics"}


def test_migration_job_runs_first_and_needs_no_release_objects() -> None:
    documents = manifests("database")
    job, policy = one(documents, "Job"), one(documents, "NetworkPolicy", "-migrate")
    made = {d["metadata"]["name"] for d in documents if not d["metadata"].get("annotations", {}).get("helm.sh/hook")}
    pod = job["spec"]["template"]["spec"]
    for hook, weight in ((policy, -1), (job, 0)):
        annotations = hook["metadata"]["annotations"]
        assert annotations["helm.sh/hook"] == "pre-install,pre-upgrade"
        assert int(annotations.get("helm.sh/hook-weight", 0)) == weight
    assert "serviceAccountName" not in pod
    assert not made & set(re.findall(r"[\w-]+", json.dumps(pod)))
    chosen = policy["spec"]["podSelector"]["matchLabels"]
    assert chosen.items() <= job["spec"]["template"]["metadata"]["labels"].items()
    assert [port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]] == [53, 53, 5432]
    assert pod["tolerations"], "where all nodes are tainted, it would wait for ever"


@pytest.mark.slow
def test_migration_job_uses_only_an_existing_service_account() -> None:
    values = "database: {existingSecret: {name: s}}\nserviceAccount: {create: false, name: limiter}"
    job = one(given(values, "migrate.yaml"), "Job")
    assert job["spec"]["template"]["spec"]["serviceAccountName"] == "limiter"


def test_issuers_file_is_readable_by_the_service(tmp_path: Path) -> None:
    pod, container = limiter(manifests("database"))
    (volume,) = (one for one in pod["volumes"] if one["name"] == "ratelimit-rls-issuers")
    text = one(manifests("database"), "ConfigMap", volume["configMap"]["name"])["data"]["issuers.yaml"]
    (tmp_path / "issuers.yaml").write_text(text)
    (issuer,) = read_issuers(tmp_path / "issuers.yaml")
    assert (issuer.name, issuer.claims.tier) == ("accounts", "plan")
    (mount,) = (one for one in container["volumeMounts"] if one["name"] == volume["name"])
    assert environment("database")["RLS_JWT_ISSUERS"] == f"{mount['mountPath']}/issuers.yaml"


@pytest.mark.slow
def test_changed_issuers_replace_pods() -> None:
    """The service reads issuers only at start."""
    issuer = "{name: a, issuer: %s, audiences: [b], algorithms: [RS256], jwks: {file: /keys/jwks.json}}"
    values = (f"identity: {{jwtIssuers: [{issuer % name}]}}" for name in ("https://a", "https://b"))
    first, second = (limiter(given(text, "deployment.yaml"))[0] for text in values)
    assert first != second


def test_sidecar_outlives_envoy() -> None:
    native, _ = limiter(manifests("sidecar"))
    assert [c["restartPolicy"] for c in native["initContainers"]] == ["Always"]
    assert environment("sidecar")["RLS_DRAIN_DELAY"] == "0s"

    ordinary, container = limiter(manifests("sidecar-container"))
    assert "restartPolicy" not in container
    assert environment("sidecar-container")["RLS_DRAIN_DELAY"] == "40s"
    assert ordinary["terminationGracePeriodSeconds"] == 40 + 30 + 5


def test_envoy_and_sidecar_share_socket_and_user() -> None:
    pod, sidecar = limiter(manifests("sidecar-container"))
    (envoy,) = (c for c in pod["containers"] if c["name"] == "envoy")
    config = one(manifests("sidecar-container"), "ConfigMap", "sidecar-example")["data"]["envoy.yaml"]
    assert environment("sidecar-container")["GRPC_UDS"] == "/sockets/rls.sock"
    assert 'pipe: {path: "/sockets/rls.sock"}' in config
    assert envoy["securityContext"]["runAsUser"] == sidecar["securityContext"]["runAsUser"]
    assert {"/sockets"} == {
        m["mountPath"] for c in (envoy, sidecar) for m in c["volumeMounts"] if "socket" in m["name"]
    }


def test_dashboards_and_alerts_equal_the_chart_files() -> None:
    documents = manifests("monitoring")
    maps = {name: text for d in documents if d["kind"] == "ConfigMap" for name, text in d["data"].items()}
    boards = {path.name: json.loads(path.read_text()) for path in CHART.glob("dashboards/*.json")}
    rules = {path.name: yaml.safe_load(path.read_text())["groups"] for path in CHART.glob("alerts/*.yaml")}

    assert {name: json.loads(maps[name]) for name in boards} == boards
    assert {name: yaml.safe_load(maps[name])["groups"] for name in rules} == rules
    rule = next((d for d in documents if d["kind"] == "PrometheusRule"), None)
    assert (rule["spec"]["groups"] if rule else []) == [group for name in sorted(rules) for group in rules[name]]


def test_service_monitor_selects_the_metrics_service() -> None:
    documents = manifests("monitoring")
    monitor = one(documents, "ServiceMonitor")["spec"]
    service = one(documents, "Service", "-metrics")
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["endpoints"][0]["port"] in {port["name"] for port in service["spec"]["ports"]}


@cache
def given(values: str, *only: str) -> tuple[Manifest, ...]:
    """Render values that are not a case."""
    with TemporaryDirectory() as directory:
        path = Path(directory) / "values.yaml"
        path.write_text(values)
        return tuple(helm.parsed(helm.template("-f", path, *(f"--show-only=templates/{name}" for name in only))))


@pytest.mark.slow
def test_object_labels_override_common_labels() -> None:
    values = "commonLabels: {team: all, tier: all}\npodLabels: {team: pods}\nmetrics: {dashboards: {enabled: true, "
    values += "labels: {team: boards}}}"
    deployment, *boards = given(values, "deployment.yaml", "dashboards.yaml")
    assert {"team": "pods", "tier": "all"}.items() <= deployment["spec"]["template"]["metadata"]["labels"].items()
    assert {"team": "boards", "tier": "all"}.items() <= boards[0]["metadata"]["labels"].items()


@pytest.mark.slow
def test_default_policy_allows_grpc_from_all_and_http_from_namespace() -> None:
    (policy,) = given("database: {existingSecret: {name: s}}\nadmin: {enabled: true}", "networkpolicy.yaml")
    namespace: list[dict[str, Any]] = [{"podSelector": {}}]
    assert policy["spec"]["policyTypes"] == ["Ingress"]  # the egress that pods need is not fully known
    assert {rule["ports"][0]["port"]: rule.get("from") for rule in policy["spec"]["ingress"]} == {
        "grpc": None,
        "http": namespace,
        "admin": namespace,
        "metrics": None,
    }
    assert not [one for one in given("networkPolicy: {enabled: false}") if one["kind"] == "NetworkPolicy"]
    assert not [one for one in given("mode: sidecar") if one["kind"] == "NetworkPolicy"]


@pytest.mark.slow
def test_scrape_uses_https_with_tls_http() -> None:
    values = "tls: {enabled: true, http: true, existingSecret: s}\nmetrics: {serviceMonitor: {enabled: true}}"
    (monitor,) = given(values, "servicemonitor.yaml")
    (endpoint,) = monitor["spec"]["endpoints"]
    assert (endpoint["scheme"], endpoint["tlsConfig"]) == ("https", {"insecureSkipVerify": True})


@pytest.mark.slow
def test_egress_policy_allows_dns_and_every_redis() -> None:
    values = """
redis: {deploy: {enabled: true}}
settings: {REDIS_PERSECOND: true, REDIS_PERSECOND_URL: "seconds:6380"}
networkPolicy: {restrictEgress: true, dnsPorts: [5353], redisPorts: [6380]}
"""
    (policy,) = given(values, "networkpolicy.yaml")
    assert [[port["port"] for port in rule["ports"]] for rule in policy["spec"]["egress"]] == [
        [5353, 5353],
        [6379],
        [6380],
    ]


def test_headless_service_is_additional() -> None:
    service, headless = (one(manifests("tls"), "Service", ending)["spec"] for ending in ("ratelimit-rls", "-headless"))
    assert "clusterIP" not in service
    assert headless["clusterIP"] == "None"
    assert (headless["selector"], headless["ports"]) == (service["selector"], service["ports"])


@pytest.mark.slow
def test_redis_address_can_come_from_a_secret() -> None:
    values = "replicaCount: 2\nredis: {existingSecret: {name: redis, key: address}}"
    _, container = limiter(given(values, "deployment.yaml"))
    (url,) = (variable for variable in container["env"] if variable["name"] == "REDIS_URL")
    assert url["valueFrom"] == {"secretKeyRef": {"name": "redis", "key": "address"}}


@pytest.mark.slow
def test_probe_can_be_disabled() -> None:
    _, container = limiter(given("probes: {liveness: null}", "deployment.yaml"))
    assert [name for name in container if name.endswith("Probe")] == ["startupProbe", "readinessProbe"]


@pytest.mark.slow
def test_runbook_urls_have_the_docs_url() -> None:
    values = "metrics: {alerts: {docsUrl: https://git.example/main/, prometheusRule: {enabled: true}, configMap: "
    values += "{enabled: true}}}"
    rule, files = given(values, "prometheusrule.yaml", "configmap-alerts.yaml")
    of_files = [group for text in files["data"].values() for group in yaml.safe_load(text)["groups"]]
    for groups in (rule["spec"]["groups"], of_files):
        urls = [alert["annotations"]["runbook_url"] for group in groups for alert in group["rules"]]
        assert urls
        assert all(url.startswith("https://git.example/main/docs/operations.md#") for url in urls)


@pytest.mark.slow
def test_large_numbers_are_written_in_full() -> None:
    values = """
replicaCount: 1000000
redis: {url: "redis:6379"}
drain: {delaySeconds: 1000000, timeoutSeconds: 1000000}
terminationGracePeriodSeconds: 2000000
settings: {RLS_MAX_HELD_CALLS: 1000000}
metrics: {serviceMonitor: {enabled: true, sampleLimit: 1000000}}
"""
    (deployment, monitor) = given(values, "deployment.yaml", "servicemonitor.yaml")
    variables = {one["name"]: one["value"] for one in limiter([deployment])[1]["env"]}
    assert deployment["spec"]["replicas"] == 1_000_000
    assert deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 2_000_000
    assert monitor["spec"]["sampleLimit"] == 1_000_000
    assert [variables[name] for name in ("RLS_REPLICAS", "RLS_MAX_HELD_CALLS")] == ["1000000"] * 2
    assert [variables[name] for name in ("RLS_DRAIN_DELAY", "RLS_DRAIN_TIMEOUT")] == ["1000000s"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("end", ["\u2028", "\u2029", "\x85", "\r\n"], ids=ascii)
def test_line_endings_of_strings_are_kept(end: str) -> None:
    text = f"domain: a\n# one{end}# two\n"
    (config,) = given(json.dumps({"descriptors": {"inline": {"a.yaml": text}}}), "configmap-descriptors.yaml")
    assert config["data"]["a.yaml"] == text


def helm_test_arguments(documents: Iterable[Manifest]) -> str:
    """Return the arguments of the test pod from the domain on."""
    command = " ".join(one(documents, "Pod", "-ask")["spec"]["containers"][0]["command"])
    return command.partition(" --domain ")[2]


QUESTIONS = {
    "text": ("domain: a\ndescriptors: [{key: user, rate_limit: {unit: day, requests_per_unit: 9}}]", "user=helm-test"),
    "a value": ("domain: a\ndescriptors: [{key: plan, value: 'a,b', limits: [{unit: day}]}]", "plan=a,b"),
    "below": (
        "domain: a\ndescriptors: [{key: plan, value: free, descriptors: [{key: user, rate_limit: {unit: day}}]}]",
        "plan=free --entry user=helm-test",
    ),
    "not what has no limit": (
        """
domain: a
descriptors:
  - {key: a, match: {prefix: x}, rate_limit: {unit: day}}
  - {key: b, value: x, rate_limit: {unlimited: true}}
  - {key: b, value: y, action: allow, rate_limit: {unit: day}}
  - {key: b, value: z, enabled: false, rate_limit: {unit: day}}
  - {key: b, rate_limit: {unit: day}}
  - {key: c, value: x}
  - {key: d, value: x, rate_limit: {unit: day}}
""",
        "d=x",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", QUESTIONS)
@pytest.mark.parametrize("as_mapping", [False, True], ids=["text", "mapping"])
def test_test_pod_uses_the_first_limit_of_the_rules(case: str, as_mapping: bool) -> None:
    text, entries = QUESTIONS[case]
    rules = {"first.yaml": "", "rules.yaml": yaml.safe_load(text) if as_mapping else text}
    documents = given(json.dumps({"descriptors": {"inline": rules}}), "tests/ask.yaml")
    assert helm_test_arguments(documents) == f"a --entry {entries} --fail-no-limit"


def test_test_pod_expects_no_limit_for_rules_outside_the_chart() -> None:
    assert (
        helm_test_arguments(manifests("existing-configmap"))
        == helm_test_arguments(manifests("xds"))
        == "helm-test --descriptor helm=test"
    )
