"""What may be said to the chart: nothing it does not know, nothing that cannot be meant, and nothing without effect."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from jsonschema import Draft7Validator

from ratelimit_rls import __version__
from ratelimit_rls.settings.catalogue import VARIABLES
from tests.charts.helm import CHART, refusal, template

TEMPLATES = "\n".join(path.read_text() for path in sorted((CHART / "templates").rglob("*.*")))


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("chart_files", CHART.parent / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks it up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["values.schema.json", "README.md"])
def test_a_generated_file_is_current(generator: ModuleType, name: str) -> None:
    files = generator.files()
    assert (CHART / name).read_text() == files[CHART / name], "`python charts/generate.py` writes it anew"


def test_every_value_says_what_it_means(generator: ModuleType) -> None:
    assert [value.name for value in generator.leaves(generator.values()) if not value.meaning] == []


def test_what_is_in_values_is_in_the_templates_and_the_other_way_round(generator: ModuleType) -> None:
    used = {match.rstrip(".") for match in re.findall(r"\.Values\.([A-Za-z0-9.]+)", TEMPLATES)}
    leaves = {value.name for value in generator.leaves(generator.values())}
    sections = {name.rsplit(".", depth)[0] for name in leaves for depth in range(1, name.count(".") + 1)}

    assert leaves - used == set(), "values that no template reads"
    assert used - leaves == {"ports"}, (
        "values that templates read and values.yaml does not have, or read whole sections"
    )
    assert "ports" in sections


def test_every_setting_can_be_given_and_only_those(generator: ModuleType) -> None:
    assert list(generator.schema()["properties"]["settings"]["properties"]) == [one.name for one in VARIABLES]


def test_every_variable_the_chart_writes_is_a_setting() -> None:
    derived = re.search(r'define "ratelimit-rls.derived".*?\{\{- end -\}\}', TEMPLATES, re.DOTALL)
    has_a_value = re.search(r'define "ratelimit-rls.hasAValue" -\}\}\n(.*?)\{\{', TEMPLATES, re.DOTALL)
    assert derived is not None
    assert has_a_value is not None
    written = set(re.findall(r"^([A-Z_]+): ", derived[0], re.MULTILINE))
    refused = set(yaml.safe_load(has_a_value[1]))

    assert written
    assert written | refused <= {one.name for one in VARIABLES}
    # Without Prometheus another sink may be chosen, so this one is free then.
    assert written - refused == {"USE_STATSD"}


def test_the_chart_installs_this_version() -> None:
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == __version__


def schema_refuses(schema: object, value: object) -> str:
    return "; ".join(error.message for error in Draft7Validator(schema).iter_errors(value))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"replicas": 2}, "'replicas' was unexpected"),
        ({"image": {"tags": "1"}}, "'tags' was unexpected"),
        ({"redis": {"tls": {"secret": "s"}}}, "'secret' was unexpected"),
        ({"metrics": {"alerts": {"configMap": {"enable": True}}}}, "'enable' was unexpected"),
        ({"probes": {"liveness": {"period": 1}}}, "'period' was unexpected"),
        ({"resources": {"limit": {}}}, "'limit' was unexpected"),
        ({"settings": {"LOG_LEVLE": "info"}}, "'LOG_LEVLE' was unexpected"),
        ({"settings": {"RLS_FAILURE_MODE": "open"}}, "'open' is not one of"),
        ({"settings": {"SHADOW_MODE": 1}}, "1 is not of type"),
        ({"mode": "daemonset"}, "'daemonset' is not one of"),
        ({"ports": {"grpc": 70000}}, "70000 is greater than"),
        ({"replicaCount": 0}, "0 is less than"),
        ({"descriptors": {"inline": {"rules.txt": ""}}}, "'rules.txt' does not match"),
        ({"extraEnv": [{"nam": "A"}]}, "'name' is a required property"),
        ({"affinity": {"nodeAfinity": {}}}, "'nodeAfinity' was unexpected"),
    ],
    ids=str,
)
def test_a_typing_error_is_refused(values: object, said: str) -> None:
    assert said in schema_refuses(json.loads((CHART / "values.schema.json").read_text()), values)


def test_helm_heeds_the_schema(tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text("ports: {grcp: 1}\nsettings: {LOG_LEVLE: info}\nreplica: 2\n")
    said = refusal("-f", tmp_path / "values.yaml")
    for name in ("grcp", "LOG_LEVLE", "replica"):
        assert f"Additional property {name} is not allowed" in said


OFFENCES: dict[str, tuple[dict[str, object], list[str]]] = {
    "in deployment mode": (
        {
            "replicaCount": 2,
            "terminationGracePeriodSeconds": 20,
            "descriptors": {"inline": {"a.yaml": "domain: a"}, "existingConfigMap": "rules"},
            "settings": {"GRPC_PORT": 1, "REDIS_AUTH": "secret", "RLS_WORKERS": 4},
            "redis": {"auth": {"existingSecret": "s"}, "tls": {"existingSecret": "s", "certKey": "tls.crt"}},
            "tls": {"clientCa": {"existingSecret": "s"}, "existingSecret": "s"},
            "ports": {"http": 8081},
            "service": {"headless": True, "type": "NodePort"},
            "metrics": {"enabled": False, "serviceMonitor": {"enabled": True}},
            "extraEnv": [{"name": "GRPC_PORT"}, {"name": "LOG_FORMAT"}],
            "helmTest": {"domain": "edge"},
        },
        [
            "descriptors: inline and existingConfigMap are both given; give one of them",
            "settings.GRPC_PORT: use ports.grpc",
            "settings.REDIS_AUTH: use redis.auth.existingSecret",
            "extraEnv: GRPC_PORT is set by ports.grpc already; a variable can be given once",
            "extraEnv: LOG_FORMAT is set by settings already; a variable can be given once",
            "redis: auth and tls are for the Redis of redis.url, which is empty",
            "redis.tls.existingSecret: has no effect without redis.tls.enabled=true",
            "redis.tls: certKey and keyKey belong together; give both or neither",
            "replicaCount, autoscaling: more than one pod needs redis.url (or redis.deploy.enabled); "
            "without Redis each would admit the whole limit",
            "settings.RLS_WORKERS: more than one needs redis.url; without Redis each would admit the whole limit",
            "tls: existingSecret and clientCa have no effect without tls.enabled=true",
            "tls.clientCa.existingSecret: needs tls.clientCa.key, such as ca.crt",
            "ports: grpc and http are both 8081; every port needs a number of its own",
            "service.headless: is for type ClusterIP, not NodePort",
            "metrics.serviceMonitor.enabled: needs metrics.enabled=true",
            "terminationGracePeriodSeconds: 20 is less than drain.delaySeconds + drain.timeoutSeconds, "
            "so calls in flight could be cut off; use 35 or more",
            "helmTest: domain and descriptor belong together; give both or neither",
        ],
    ),
    "of Redis, TLS and the scaler": (
        {
            "redis": {
                "url": "redis:6379",
                "deploy": {"enabled": True},
                "tls": {"enabled": True, "certKey": "c", "keyKey": "k"},
            },
            "tls": {"enabled": True},
            "autoscaling": {"enabled": True, "minReplicas": 5, "maxReplicas": 4, "targetCPUUtilizationPercentage": 0},
            "settings": {"CONFIG_TYPE": "GRPC_XDS_SOTW"},
            "descriptors": {"existingConfigMap": "rules"},
        },
        [
            "descriptors: with settings.CONFIG_TYPE=GRPC_XDS_SOTW the rules come from the xDS server; "
            "give one or the other",
            "redis: url and deploy.enabled are both given; give one of them",
            "redis.tls.certKey: is a key of redis.tls.existingSecret, which is empty",
            "tls.enabled: needs tls.existingSecret, a Secret with certificate and key",
            "autoscaling: minReplicas is more than maxReplicas",
            "autoscaling: needs targetCPUUtilizationPercentage or metrics to go by",
        ],
    ),
    "in sidecar mode": (
        {
            "mode": "sidecar",
            "autoscaling": {"enabled": True},
            "networkPolicy": {"enabled": True},
            "metrics": {"serviceMonitor": {"enabled": True}},
            "settings": {"RLS_WORKERS": 2},
            "redis": {"url": "redis:6379"},
            "sidecar": {"socketDirectory": "/run/rls/", "native": False, "drainDelaySeconds": 10},
        },
        [
            "autoscaling.enabled: has no meaning in sidecar mode, where the pods are not this chart's",
            "metrics.serviceMonitor.enabled: has no meaning in sidecar mode, where the pods are not this chart's",
            "networkPolicy.enabled: has no meaning in sidecar mode, where the pods are not this chart's",
            "settings.RLS_WORKERS: a Unix socket cannot be shared by several processes; use 1 in sidecar mode",
            "sidecar: drainDelaySeconds is less than example.drainSeconds, so Envoy would outlast its limiter",
            "sidecar.socketDirectory: /run/rls/ is not for sockets; "
            "use a directory of its own, such as /run/ratelimit-rls",
        ],
    ),
}


@pytest.mark.parametrize("case", OFFENCES)
def test_what_cannot_be_meant_is_refused_all_at_once(case: str, tmp_path: Path) -> None:
    values, sentences = OFFENCES[case]
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
    said = re.findall(r"^  - (.*)$", refusal("-f", tmp_path / "values.yaml"), re.MULTILINE)
    assert said == sentences


@pytest.mark.slow
def test_native_sidecars_are_refused_where_there_are_none() -> None:
    said = refusal("--set", "mode=sidecar", "--kube-version", "1.28.0")
    assert "sidecar.native: needs Kubernetes 1.29 or later, this is v1.28.0; use sidecar.native=false" in said
    assert template("--set", "mode=sidecar,sidecar.native=false", "--kube-version", "1.28.0")


@pytest.mark.slow
def test_a_mode_is_checked_even_if_the_schema_is_not() -> None:
    assert 'mode: "daemonset" is neither' in refusal("--skip-schema-validation", "--set", "mode=daemonset")
