"""Commands in docs/kubernetes.md and both READMEs work, as far as possible without a cluster."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from tests.charts import helm

PAGE = (helm.ROOT / "docs" / "kubernetes.md").read_text()
READMES = [(folder / "README.md").read_text() for folder in (helm.CHART, helm.ROOT)]
RULES_OUTSIDE_THE_CHART = {"existing-configmap", "xds"}
UMBRELLA = Path(__file__).parent / "umbrella"


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def commands(text: str) -> list[str]:
    joined = "\n".join(blocks(text, "sh")).replace("\\\n", " ")
    return [" ".join(line.split("  #")[0].split()) for line in joined.splitlines()]


INSTALLS = [line for page in (PAGE, *READMES) for line in commands(page) if re.match("helm (install|upgrade)", line)]


@pytest.mark.slow
@pytest.mark.parametrize("line", INSTALLS)
def test_documented_install_commands_render(line: str, tmp_path: Path) -> None:
    (rules,) = (block for block in blocks(PAGE, "yaml") if block.startswith("# edge.yaml"))
    (tmp_path / "edge.yaml").write_text(rules)
    words = shlex.split(line)[2:]
    only_with_a_cluster = {"--install", "--wait", "--reset-then-reuse-values"}
    arguments = [
        str(tmp_path / word) if word == "edge.yaml" else word for word in words if word not in only_with_a_cluster
    ]

    done = helm.helm("template", *arguments)

    assert done.returncode == 0, done.stderr
    assert helm.parsed(done.stdout)


@pytest.mark.slow
def test_documented_upgrades_keep_earlier_values(tmp_path: Path) -> None:
    (rules,) = (block for block in blocks(PAGE, "yaml") if block.startswith("# edge.yaml"))
    (tmp_path / "edge.yaml").write_text(rules)
    upgrades = [shlex.split(line) for line in commands(PAGE) if line.startswith("helm upgrade")]
    given: list[str] = []
    for words in upgrades:
        assert "--reset-then-reuse-values" in words
        for option, value in pairwise(words):
            if option in ("--set", "--values"):
                given += [option, value.replace("edge.yaml", str(tmp_path / "edge.yaml"))]
        rendered = helm.template(*given)
    kinds = {document["kind"] for document in helm.parsed(rendered)}
    assert {"NetworkPolicy", "HorizontalPodAutoscaler", "ServiceMonitor"} <= kinds
    for kept in ("redis-credentials", "limiter-certificate", "domain: edge"):
        assert kept in rendered


def test_page_contains_install_commands() -> None:
    assert len(INSTALLS) >= 10


def test_documented_exec_commands_name_existing_objects() -> None:
    made = {
        f"deploy/{document['metadata']['name']}"
        for case in ("default", "sidecar")
        for document in helm.manifests(case)
        if document["kind"] == "Deployment"
    }
    assert set(re.findall(r"exec (deploy/\S+)", PAGE)) == made
    uds = {v["value"] for v in helm.limiter(helm.manifests("sidecar"))[1]["env"] if v["name"] == "GRPC_UDS"}
    assert set(re.findall(r"--server unix:(\S+)", PAGE)) == uds


def test_documented_templates_match_the_tested_umbrella_chart() -> None:
    (quoted,) = (block for block in blocks(PAGE, "yaml") if "Subcharts" in block)
    tested = (UMBRELLA / "templates" / "deployment.yaml").read_text()
    for part in quoted.split("…\n"):
        assert part in tested
    (values,) = (block for block in blocks(PAGE, "yaml") if block.startswith("# values.yaml"))
    documented = yaml.safe_load(values)["ratelimit-rls"]
    assert documented.keys() <= yaml.safe_load((UMBRELLA / "values.yaml").read_text())["ratelimit-rls"].keys()


def test_every_documented_template_exists() -> None:
    offered = set(re.findall(r"`(ratelimit-rls\.\w+)`", PAGE))
    defined = {
        name
        for path in helm.CHART.glob("templates/*.tpl")
        for name in re.findall(r'define "([^"]+)"', path.read_text())
    }
    assert offered
    assert offered <= defined


def test_every_documented_value_exists() -> None:
    values = yaml.safe_load((helm.CHART / "values.yaml").read_text())
    sections = "|".join(name for name, value in values.items() if isinstance(value, dict) and name != "settings")
    files_of_secrets = {"tls.crt", "tls.key"}
    named = set(re.findall(rf"`((?:{sections})\.[\w.]+)", PAGE)) - files_of_secrets
    assert named
    for path in named:
        found = values
        for name in path.split("."):
            assert name in found, path
            found = found[name]


@pytest.fixture
def chart(tmp_path: Path) -> Path:
    """A chart that renders its notes as a manifest. Helm prints notes only with a cluster."""
    chart = shutil.copytree(helm.CHART, tmp_path / "ratelimit-rls")
    (chart / "templates" / "notes.yaml").write_text(
        'kind: Notes\nmetadata: {name: notes}\ntext: {{ include (print .Template.BasePath "/NOTES.txt") . | toJson }}\n'
    )
    return chart


@pytest.mark.slow
def test_notes_list_what_the_network_policy_allows(chart: Path) -> None:
    def notes(**values: object) -> str:
        given = {"networkPolicy": {"enabled": True}, **values}
        rendered = helm.template(
            *(f"--set-json={name}={json.dumps(value)}" for name, value in given.items()), chart=chart
        )
        text: str = helm.one(helm.parsed(rendered), "Notes")["text"]
        return text

    assert "admin requests" not in notes()
    assert notes().count("and nothing else.") == 1
    database = {"database": {"existingSecret": {"name": "s"}}, "admin": {"enabled": True}}
    assert "admin requests from networkPolicy.adminFrom (by default this namespace), and nothing else." in notes(
        **database
    )
    extra = {"enabled": True, "extraIngress": [{"ports": [{"port": 1}]}]}
    assert "and what networkPolicy.extraIngress adds." in notes(networkPolicy=extra)


@pytest.mark.slow
def test_notes_end_with_a_command(chart: Path) -> None:
    for case in helm.cases():
        rendered = helm.template("-f", helm.CHART / "ci" / f"{case}-values.yaml", chart=chart)
        notes = helm.one(helm.parsed(rendered), "Notes")["text"]
        last = notes.strip().splitlines()[-1]
        assert re.match(r"  (kubectl|helm) \S", last), f"{case}: {last}"
        assert ("`helm test` proves only that" in notes) == (case in RULES_OUTSIDE_THE_CHART), case
