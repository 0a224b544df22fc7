"""Another chart takes the sidecar from this one by its named templates."""

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
    """As its owner would have it: the dependency packed into charts/ by helm, without a network."""
    home = tmp_path_factory.mktemp("umbrella") / "edge"
    shutil.copytree(UMBRELLA, home)
    chart = (home / "Chart.yaml").read_text()
    (home / "Chart.yaml").write_text(chart.replace("file://../../../charts/ratelimit-rls", f"file://{helm.CHART}"))
    done = helm.helm("dependency", "update", home)
    assert done.returncode == 0, done.stderr
    return home


def test_its_pod_has_the_sidecar_with_the_values_under_its_name(umbrella: Path) -> None:
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


def test_the_rules_come_with_it_and_no_other_pod_of_its_own(umbrella: Path) -> None:
    documents = helm.parsed(helm.template(chart=umbrella))
    pod, _ = helm.limiter(documents)
    (rules,) = (volume for volume in pod["volumes"] if volume["name"] == "ratelimit-rls-rules")

    assert "edge.yaml" in helm.one(documents, "ConfigMap", rules["configMap"]["name"])["data"]
    assert sorted(document["kind"] for document in documents) == ["ConfigMap", "Deployment", "Pod"]


def test_a_typing_error_is_refused_there_too(umbrella: Path) -> None:
    done = helm.helm("template", umbrella, "--set", "ratelimit-rls.redis.ulr=x")
    assert done.returncode != 0
    assert "Additional property ulr is not allowed" in done.stderr
