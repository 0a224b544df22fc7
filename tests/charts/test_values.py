"""Values of the chart: unknown, invalid and ineffective ones are rejected."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft7Validator

from ratelimit_rls import __version__
from ratelimit_rls.settings.catalogue import VARIABLES
from tests.charts.helm import CHART, rejection, template
from tools import chart_schema

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
TEMPLATES = "\n".join(path.read_text() for path in sorted((CHART / "templates").rglob("*.*")))


@pytest.mark.parametrize("name", ["values.schema.json", "README.md"])
def test_generated_file_is_current(name: str) -> None:
    files = chart_schema.files()
    assert (CHART / name).read_text() == files[CHART / name], "run `make docs`"


def test_every_value_has_a_description() -> None:
    assert [value.name for value in chart_schema.leaves(chart_schema.values()) if not value.meaning] == []


def test_values_and_templates_agree() -> None:
    used = {match.rstrip(".") for match in re.findall(r"\.Values\.([A-Za-z0-9.]+)", TEMPLATES)}
    leaves = {value.name for value in chart_schema.leaves(chart_schema.values())}
    sections = {name.rsplit(".", depth)[0] for name in leaves for depth in range(1, name.count(".") + 1)}

    assert leaves - used == set(), "values that no template reads"
    assert used - leaves == {"ports"}, (
        "values that templates read and values.yaml does not have, or read whole sections"
    )
    assert "ports" in sections


def test_exactly_the_settings_of_the_service_are_accepted() -> None:
    assert list(chart_schema.schema()["properties"]["settings"]["properties"]) == [one.name for one in VARIABLES]


def test_every_rendered_variable_is_a_setting() -> None:
    derived = re.search(r'define "ratelimit-rls.derived".*?\{\{- end -\}\}', TEMPLATES, re.DOTALL)
    has_a_value = re.search(r'define "ratelimit-rls.settingsWithValue" -\}\}\n(.*?)\{\{', TEMPLATES, re.DOTALL)
    assert derived is not None
    assert has_a_value is not None
    written = set(re.findall(r"^([A-Z_]+): ", derived[0], re.MULTILINE))
    rejected = set(yaml.safe_load(has_a_value[1]))

    assert written
    assert written | rejected <= {one.name for one in VARIABLES}
    # Without Prometheus another sink may be configured, so these are free then.
    # The chart adds its hosts to those in settings.
    assert written - rejected == {"USE_STATSD", "RLS_HTTP_ALLOWED_HOSTS"}


def test_the_chart_installs_this_version() -> None:
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == __version__


def schema_rejects(schema: object, value: object) -> str:
    return "; ".join(error.message for error in Draft7Validator(schema).iter_errors(value))


@pytest.mark.parametrize(
    ("values", "complaint"),
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
        ({"settings": {"SHADOW_MODE": "yes"}}, "'yes' does not match"),
        ({"settings": {"RLS_WORKERS": 1.5}}, "1.5 is not of type"),
        ({"settings": {"RLS_WORKERS": 0}}, "0 is less than"),
        ({"settings": {"RLS_WORKERS": "two"}}, "'two' does not match"),
        ({"settings": {"TRACING_SAMPLING_RATE": 2}}, "2 is greater than"),
        ({"settings": {"RLS_STORE_TIMEOUT": "100"}}, "'100' does not match"),
        ({"settings": {"LOG_LEVEL": "loud"}}, "'loud' does not match"),
        ({"settings": {"REDIS_TYPE": "ring"}}, "'ring' does not match"),
        ({"settings": {"GRPC_CLIENT_TLS_SAN": [1]}}, "1 is not of type"),
        ({"securityContext": {"runAsUsr": 1}}, "'runAsUsr' was unexpected"),
        ({"securityContext": {"capabilities": {"dorp": []}}}, "'dorp' was unexpected"),
        ({"podSecurityContext": {"fsgroup": 1}}, "'fsgroup' was unexpected"),
        ({"updateStrategy": {"rollingUpdate": {"maxSurges": 1}}}, "'maxSurges' was unexpected"),
        ({"mode": "daemonset"}, "'daemonset' is not one of"),
        ({"ports": {"grpc": 70000}}, "70000 is greater than"),
        ({"replicaCount": 0}, "0 is less than"),
        ({"descriptors": {"inline": {"rules.txt": ""}}}, "'rules.txt' does not match"),
        ({"database": {"existingSecret": "s"}}, "'s' is not of type 'object'"),
        ({"identity": {"jwtIssuers": [{"name": "a"}]}}, "'issuer' is a required property"),
        ({"identity": {"jwtIssuers": [{"algorithms": ["none"]}]}}, "'none' is not one of"),
        ({"extraEnv": [{"nam": "A"}]}, "'name' is a required property"),
        ({"affinity": {"nodeAfinity": {}}}, "'nodeAfinity' was unexpected"),
    ],
    ids=str,
)
def test_typing_error_is_rejected(values: object, complaint: str) -> None:
    assert complaint in schema_rejects(SCHEMA, values)


def test_default_of_every_setting_is_accepted() -> None:
    defaults = {variable.name: variable.default for variable in VARIABLES if variable.default}
    assert schema_rejects(SCHEMA, {"settings": defaults}) == ""


@pytest.mark.parametrize(
    "settings",
    [
        {"RLS_STORE_TIMEOUT": "1h30m", "RLS_AUDIT_RETENTION": "90d", "RLS_USAGE_RETENTION": "4w"},
        {"REDIS_STARTUP_MAX_ELAPSED_TIME": "0"},
        {"LOG_LEVEL": "Info", "REDIS_TYPE": "sentinel"},
        {"RLS_WORKERS": "0x10", "NEAR_LIMIT_RATIO": 1, "SHADOW_MODE": "T"},
    ],
    ids=str,
)
def test_values_the_service_accepts_are_accepted(settings: dict[str, object]) -> None:
    assert schema_rejects(SCHEMA, {"settings": settings}) == ""


def test_helm_enforces_the_schema(tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text("ports: {grcp: 1}\nsettings: {LOG_LEVLE: info}\nreplica: 2\n")
    complaint = rejection("-f", tmp_path / "values.yaml")
    for name in ("grcp", "LOG_LEVLE", "replica"):
        assert f"Additional property {name} is not allowed" in complaint


OFFENCES: dict[str, tuple[dict[str, object], list[str]]] = {
    "in deployment mode": (
        {
            "replicaCount": 2,
            "terminationGracePeriodSeconds": 20,
            "descriptors": {"inline": {"a.yaml": "domain: a"}, "existingConfigMap": "rules"},
            "settings": {"GRPC_PORT": 1, "REDIS_AUTH": "secret", "RLS_WORKERS": 4},
            "redis": {"auth": {"existingSecret": "s"}, "tls": {"existingSecret": "s", "certKey": "tls.crt"}},
            "tls": {"clientCa": {"existingSecret": "s"}, "existingSecret": "s", "crl": {"existingSecret": "s"}},
            "ports": {"http": 8081},
            "metrics": {"enabled": False, "serviceMonitor": {"enabled": True}},
            "extraEnv": [{"name": "GRPC_PORT"}, {"name": "LOG_FORMAT"}],
            "helmTest": {"domain": "edge"},
        },
        [
            "descriptors: inline and existingConfigMap exclude each other; set one of them",
            "settings.GRPC_PORT: use ports.grpc",
            "settings.REDIS_AUTH: use redis.auth.existingSecret",
            "extraEnv: GRPC_PORT is set by ports.grpc already; a variable can be given once",
            "extraEnv: LOG_FORMAT is set by settings already; a variable can be given once",
            "redis: auth and tls need redis.url or redis.existingSecret",
            "redis.tls.existingSecret: has no effect without redis.tls.enabled=true",
            "redis.tls: certKey and keyKey must be set together",
            "replicaCount, autoscaling: more than one pod needs redis.url "
            "(or redis.existingSecret or redis.deploy.enabled); "
            "without Redis each would admit the whole limit",
            "settings.RLS_WORKERS: more than one needs redis.url; without Redis each would admit the whole limit",
            "tls: existingSecret and clientCa have no effect without tls.enabled=true",
            "tls.clientCa.existingSecret: needs tls.clientCa.key, such as ca.crt",
            "tls.crl.existingSecret: needs tls.crl.key, such as crl.pem",
            "ports: grpc and http are both 8081; every port must be different",
            "metrics.serviceMonitor.enabled: needs metrics.enabled=true",
            "terminationGracePeriodSeconds: 20 is less than drain.delaySeconds + drain.timeoutSeconds, "
            "so calls in flight could be cut off; use 35 or more",
            "helmTest: domain and descriptor must be set together",
        ],
    ),
    "of Redis, TLS and the scaler": (
        {
            "redis": {
                "url": "redis:6379",
                "deploy": {"enabled": True},
                "tls": {"enabled": True, "certKey": "c", "keyKey": "k"},
            },
            "tls": {"enabled": True, "crl": {"key": "crl.pem"}},
            "autoscaling": {"enabled": True, "minReplicas": 5, "maxReplicas": 4, "targetCPUUtilizationPercentage": 0},
            "settings": {"CONFIG_TYPE": "GRPC_XDS_SOTW"},
            "descriptors": {"existingConfigMap": "rules"},
        },
        [
            "descriptors: with settings.CONFIG_TYPE=GRPC_XDS_SOTW the rules come from the xDS server; "
            "set one or the other",
            "redis: url, existingSecret and deploy.enabled exclude each other; set one of them",
            "redis.tls.certKey: needs redis.tls.existingSecret",
            "tls.enabled: needs tls.existingSecret, a Secret with certificate and key",
            "tls.crl.key: needs tls.clientCa.key, the CA whose certificates the lists revoke",
            "autoscaling: minReplicas must be ≤ maxReplicas",
            "autoscaling: needs targetCPUUtilizationPercentage or metrics",
        ],
    ),
    "of labels": (
        {
            "commonLabels": {"app.kubernetes.io/name": "x", "team": "edge"},
            "podLabels": {"app.kubernetes.io/component": "x", "app.kubernetes.io/instance": "x"},
            "metrics": {
                "serviceMonitor": {"labels": {"app.kubernetes.io/version": "x"}},
                "alerts": {
                    "prometheusRule": {"labels": {"app.kubernetes.io/managed-by": "x"}},
                    "configMap": {"labels": {"helm.sh/chart": "x"}},
                },
                "dashboards": {"labels": {"app.kubernetes.io/name": "x"}},
            },
        },
        [
            f"{value}: {key} is set by the chart and used by its selectors; use another key"
            for value, key in [
                ("commonLabels", "app.kubernetes.io/name"),
                ("metrics.alerts.configMap.labels", "helm.sh/chart"),
                ("metrics.alerts.prometheusRule.labels", "app.kubernetes.io/managed-by"),
                ("metrics.dashboards.labels", "app.kubernetes.io/name"),
                ("metrics.serviceMonitor.labels", "app.kubernetes.io/version"),
                ("podLabels", "app.kubernetes.io/component"),
                ("podLabels", "app.kubernetes.io/instance"),
            ]
        ],
    ),
    "of the network policy": (
        {
            "networkPolicy": {"restrictEgress": True, "redisPorts": [7000], "databasePorts": []},
            "redis": {"url": "redis-0:6380,redis-1:6381,redis-2:7000"},
            "metrics": {"enabled": False},
            "settings": {
                "REDIS_PERSECOND_URL": "rediss://limiter@seconds/0",
                "CONFIG_TYPE": "GRPC_XDS_SOTW",
                "RLS_OTLP_METRICS": "grpc",
                "TRACING_ENABLED": "T",
                "USE_DOG_STATSD": True,
                "RLS_ARCHIVE": "s3://bucket/records",
            },
            "database": {"existingSecret": {"name": "s"}},
            "identity": {
                "jwtIssuers": [
                    {
                        "name": "accounts",
                        "issuer": "https://accounts",
                        "audiences": ["a"],
                        "algorithms": ["RS256"],
                        "jwks": {"url": "https://accounts/jwks.json"},
                    }
                ]
            },
        },
        [
            "networkPolicy.redisPorts: lacks 6380, which redis.url names, so Redis would be unreachable; add it",
            "networkPolicy.redisPorts: lacks 6381, which redis.url names, so Redis would be unreachable; add it",
            "networkPolicy.redisPorts: lacks 6379, which settings.REDIS_PERSECOND_URL names, "
            "so Redis would be unreachable; add it",
            "networkPolicy.databasePorts: is empty, so the database would be unreachable",
            *(
                f"networkPolicy.extraEgress: {name} needs egress, "
                "but only DNS, Redis and the database are allowed; add a rule"
                for name in (
                    "identity.jwtIssuers[0].jwks.url",
                    "settings.CONFIG_TYPE=GRPC_XDS_SOTW",
                    "settings.RLS_ARCHIVE",
                    "settings.RLS_OTLP_METRICS",
                    "settings.TRACING_ENABLED",
                    "settings.USE_DOG_STATSD",
                )
            ),
        ],
    ),
    "of what needs a database": (
        {
            "admin": {"enabled": True},
            "database": {"existingSecret": {"adminTokenKey": "token"}, "tls": {"existingSecret": "ca"}},
            "settings": {"RLS_DATABASE_URL": "sqlite:///x", "RLS_ADMIN_HOST": "0.0.0.0", "RLS_ADMIN_AUTH": "none"},
            "extraEnv": [
                {"name": "PGSSLMODE", "value": "require"},
                {"name": "RLS_ARCHIVE", "value": "s3://a"},
                {"name": "RLS_KEY_SECRET", "valueFrom": {}},
            ],
            "identity": {
                "jwtIssuers": [
                    {
                        "name": name,
                        "issuer": f"https://{name}",
                        "audiences": ["a"],
                        "algorithms": ["HS256"],
                        "jwks": {"file": file},
                        "secret_file": file,
                    }
                    for name, file in (("a", "/keys/a"), ("b", "keys/b"))
                ]
            },
        },
        [
            "settings.RLS_ADMIN_HOST: use admin.enabled",
            "settings.RLS_DATABASE_URL: use database.existingSecret",
            "extraEnv: PGSSLMODE: use database.tls.existingSecret",
            "extraEnv: RLS_ARCHIVE: use settings.RLS_ARCHIVE, which the chart reads",
            "extraEnv: RLS_KEY_SECRET: use database.existingSecret",
            *(
                f"{name}: has no effect without a database; set database.existingSecret.name"
                for name in ("admin.enabled", "database.existingSecret.adminTokenKey", "database.tls.existingSecret")
            ),
            "settings.RLS_ADMIN_AUTH: none is only allowed on loopback, which admin.enabled leaves; "
            "remove it to use tokens",
            *(
                f"identity.jwtIssuers[1].{name}: keys/b is a relative path; "
                "mount the file with extraVolumes, and use its absolute path"
                for name in ("jwks.file", "secret_file")
            ),
        ],
    ),
    "of rules whose texts YAML has read as something else": (
        {
            "descriptors": {
                "inline": {
                    "a.yaml": {
                        "domain": 5,
                        "descriptors": [
                            {"key": "id", "value": 7},
                            {"key": True, "descriptors": [{"key": "v", "value": 1.1, "rate_limit": {"name": 1000000}}]},
                            {"key": "v", "match": {"prefix": 10}, "rate_limit": {"replaces": [{"name": False}]}},
                        ],
                    },
                }
            }
        },
        [
            f"descriptors.inline.a.yaml.{what} after YAML parsing; quote it, or pass the file as a string"
            for what in (
                "descriptors[0].value is not text but 7",
                "descriptors[1].descriptors[0].rate_limit.name is not text but 1000000",
                "descriptors[1].descriptors[0].value is not text but 1.1",
                "descriptors[1].key is not text but true",
                "descriptors[2].match.prefix is not text but 10",
                "descriptors[2].rate_limit.replaces[0].name is not text but false",
                "domain is not text but 5",
            )
        ],
    ),
    "of other variables, sinks and budgets": (
        {
            "replicaCount": 3,
            "settings": {"USE_STATSD": True, "USE_DOG_STATSD": "1"},
            "redis": {"url": "redis:6379", "existingSecret": {"name": "redis"}},
            "podDisruptionBudget": {"minAvailable": 3},
            "extraEnv": [
                {"name": "REDIS_AUTH", "valueFrom": {}},
                {"name": "RLS_RULES", "value": "/rules"},
                {"name": "RLS_WORKERS", "value": "4"},
                {"name": "REDIS_PERSECOND_URL", "value": "redis:6380"},
                {"name": "REDIS_SENTINEL_AUTH", "valueFrom": {}},
                {"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": "a"},
                {"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": "b"},
            ],
        },
        [
            "extraEnv: REDIS_AUTH: use redis.auth.existingSecret",
            "extraEnv: RLS_RULES is set by descriptors already; a variable can be given once",
            "extraEnv: RLS_WORKERS: use settings.RLS_WORKERS, which the chart reads",
            "extraEnv: REDIS_PERSECOND_URL: use settings.REDIS_PERSECOND_URL, which the chart reads",
            "extraEnv: OTEL_EXPORTER_OTLP_ENDPOINT is set twice",
            "settings.USE_STATSD: only one sink is possible, and metrics.enabled=true selects Prometheus; "
            "set metrics.enabled=false to use this one",
            "settings.USE_DOG_STATSD: only one sink is possible, and metrics.enabled=true selects Prometheus; "
            "set metrics.enabled=false to use this one",
            "redis: url, existingSecret and deploy.enabled exclude each other; set one of them",
            "podDisruptionBudget.minAvailable: with 3 of 3 pods no node could ever be drained; use 2 or less",
        ],
    ),
    "of a budget without bounds": (
        {
            "autoscaling": {"enabled": True},
            "redis": {"existingSecret": {"name": "redis"}},
            "podDisruptionBudget": {"maxUnavailable": "", "minAvailable": ""},
        },
        ["podDisruptionBudget: needs maxUnavailable or minAvailable, or enabled=false"],
    ),
    "in sidecar mode": (
        {
            "mode": "sidecar",
            "tls": {"enabled": True, "existingSecret": "s"},
            "autoscaling": {"enabled": True},
            "networkPolicy": {"restrictEgress": True},
            "metrics": {"serviceMonitor": {"enabled": True}},
            "settings": {"RLS_WORKERS": 2, "RLS_ADMIN_AUTH": "none"},
            "redis": {"url": "redis:6379"},
            "database": {"existingSecret": {"name": "s"}},
            "admin": {"enabled": True},
            "ports": {"grpc": 8080, "admin": 6070},
            "sidecar": {"socketDirectory": "/run/rls/", "native": False, "drainDelaySeconds": 10},
        },
        [
            "settings.RLS_ADMIN_AUTH: none is only allowed on loopback, which all containers of a sidecar's pod share; "
            "remove it to use tokens",
            "ports: admin and debug are both 6070; every port must be different",
            "admin.enabled: has no effect in sidecar mode, whose pods belong to another chart",
            "autoscaling.enabled: has no effect in sidecar mode, whose pods belong to another chart",
            "metrics.serviceMonitor.enabled: has no effect in sidecar mode, whose pods belong to another chart",
            "networkPolicy.restrictEgress: has no effect in sidecar mode, whose pods belong to another chart",
            "tls.enabled: TLS is not supported on a Unix socket; remove it in sidecar mode",
            "settings.RLS_WORKERS: a Unix socket cannot be shared by several processes; use 1 in sidecar mode",
            "sidecar: drainDelaySeconds is less than example.drainSeconds, so Envoy would outlive its limiter",
            "sidecar.socketDirectory: /run/rls/ is not suitable; use a separate directory, e.g. /run/ratelimit-rls",
        ],
    ),
}


@pytest.mark.parametrize("case", OFFENCES)
def test_all_invalid_combinations_are_reported_at_once(case: str, tmp_path: Path) -> None:
    values, sentences = OFFENCES[case]
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
    complaint = re.findall(r"^  - (.*)$", rejection("-f", tmp_path / "values.yaml"), re.MULTILINE)
    assert complaint == sentences


@pytest.mark.slow
def test_native_sidecar_is_rejected_on_old_kubernetes() -> None:
    complaint = rejection("--set", "mode=sidecar", "--kube-version", "1.28.0")
    assert "sidecar.native: needs Kubernetes 1.29 or later, this is v1.28.0; use sidecar.native=false" in complaint
    assert template("--set", "mode=sidecar,sidecar.native=false", "--kube-version", "1.28.0")


@pytest.mark.slow
def test_mode_is_checked_without_the_schema() -> None:
    assert 'mode: "daemonset" must be deployment or sidecar' in rejection(
        "--skip-schema-validation", "--set", "mode=daemonset"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("url", "ports"),
    [
        ("redis:6380", "[6380]"),
        ("[fd00::1]:6380", "[6380]"),
        ("name,sentinel-0:26379,sentinel-1:26379", "[26379]"),
        ("redis://user:1234@redis:6380/0?db=1", "[6380]"),
        ("rediss://user:1234@redis", "[6379]"),
        ("unix:///run/redis:1.sock", "[1]"),
    ],
)
def test_policy_with_the_redis_ports_is_accepted(url: str, ports: str, tmp_path: Path) -> None:
    values = {"redis": {"url": url}, "networkPolicy": {"restrictEgress": True, "redisPorts": yaml.safe_load(ports)}}
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
    assert template("-f", tmp_path / "values.yaml", "-s", "templates/networkpolicy.yaml")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["commonLabels", "podLabels", "settings", "metrics.dashboards.labels", "securityContext", "resources", "extraEnv"],
)
def test_null_means_unset(name: str) -> None:
    assert template("--set", f"{name}=null,metrics.dashboards.enabled=true")
