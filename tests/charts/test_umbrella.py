"""Another chart includes the sidecar with the named templates of this one."""

from __future__ import annotations

import shutil
from pathlib import Path

import kubernetes_validate
import pytest

from tests.charts import helm
from tests.charts.pod_security import offences

UMBRELLA = Path(__file__).parent / "umbrella"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def umbrella(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An umbrella chart with the dependency packaged into charts/ by helm, without network."""
    home = tmp_path_factory.mktemp("umbrella") / "edge"
    shutil.copytree(UMBRELLA, home)
    chart = (home / "Chart.yaml").read_text()
    (home / "Chart.yaml").write_text(chart.replace("file://../../../charts/ratelimit-rls", f"file://{helm.CHART}"))
    done = helm.helm("dependency", "update", home)
    assert done.returncode == 0, done.stderr
    return home


def test_pod_contains_the_sidecar_with_its_values(umbrella: Path) -> None:
    documents = helm.parsed(helm.template(chart=umbrella))
    for document in documents:
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    pod, sidecar = helm.limiter(documents)
    variables = {one["name"]: one.get("value") for one in sidecar["env"]}

    assert offences(pod) == []
    assert sidecar["restartPolicy"] == "Always"
    assert sidecar["securityContext"]["runAsUser"] == 101
    assert variables["REDIS_URL"] == "redis.databases.svc:6379"
    assert variables["RLS_REPLICAS"] == "3"
    assert pod["containers"][0]["args"][-1] == f"limiter at {variables['GRPC_UDS']}"
    mounted = {mount["name"] for container in helm.containers(pod) for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_rules_are_rendered_without_other_pods(umbrella: Path) -> None:
    documents = helm.parsed(helm.template(chart=umbrella))
    pod, _ = helm.limiter(documents)
    (rules,) = (volume for volume in pod["volumes"] if volume["name"] == "ratelimit-rls-rules")

    assert "edge.yaml" in helm.one(documents, "ConfigMap", rules["configMap"]["name"])["data"]
    assert sorted(document["kind"] for document in documents) == ["ConfigMap", "Deployment", "Pod"]


def test_unknown_value_is_rejected_in_a_subchart(umbrella: Path) -> None:
    done = helm.helm("template", umbrella, "--set", "ratelimit-rls.redis.ulr=x")
    assert done.returncode != 0
    assert "Additional property ulr is not allowed" in done.stderr
