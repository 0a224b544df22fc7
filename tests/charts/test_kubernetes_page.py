"""The commands of docs/kubernetes.md and both READMEs work as written, as far as that takes no cluster."""

from __future__ import annotations

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
NOBODY_KNOWS_THE_RULES = {"existing-configmap", "xds"}
UMBRELLA = Path(__file__).parent / "umbrella"


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def commands(text: str) -> list[str]:
    joined = "\n".join(blocks(text, "sh")).replace("\\\n", " ")
    return [" ".join(line.split("  #")[0].split()) for line in joined.splitlines()]


INSTALLS = [line for page in (PAGE, *READMES) for line in commands(page) if re.match("helm (install|upgrade)", line)]


@pytest.mark.slow
@pytest.mark.parametrize("line", INSTALLS)
def test_what_is_installed_can_be_rendered(line: str, tmp_path: Path) -> None:
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
def test_who_follows_the_page_keeps_what_was_set_before(tmp_path: Path) -> None:
    (rules,) = (block for block in blocks(PAGE, "yaml") if block.startswith("# edge.yaml"))
    (tmp_path / "edge.yaml").write_text(rules)
    upgrades = [shlex.split(line) for line in commands(PAGE) if line.startswith("helm upgrade")]
    given: list[str] = []
    for words in upgrades:
        assert "--reset-then-reuse-values" in words
        for option, value in pairwise(words):
            if option in ("--set", "--values"):
                given += [option, value.replace("edge.yaml", str(tmp_path / "edge.yaml"))]
        shown = helm.template(*given)
    kinds = {document["kind"] for document in helm.parsed(shown)}
    assert {"NetworkPolicy", "HorizontalPodAutoscaler", "ServiceMonitor"} <= kinds
    for kept in ("redis-credentials", "limiter-certificate", "domain: edge"):
        assert kept in shown


def test_there_are_such_commands() -> None:
    assert len(INSTALLS) >= 10


def test_what_is_executed_in_a_pod_names_what_the_chart_makes() -> None:
    made = {
        f"deploy/{document['metadata']['name']}"
        for case in ("default", "sidecar")
        for document in helm.manifests(case)
        if document["kind"] == "Deployment"
    }
    assert set(re.findall(r"exec (deploy/\S+)", PAGE)) == made
    uds = {v["value"] for v in helm.limiter(helm.manifests("sidecar"))[1]["env"] if v["name"] == "GRPC_UDS"}
    assert set(re.findall(r"--server unix:(\S+)", PAGE)) == uds


def test_the_templates_for_other_charts_are_used_as_one_that_is_tested_uses_them() -> None:
    (quoted,) = (block for block in blocks(PAGE, "yaml") if "Subcharts" in block)
    tested = (UMBRELLA / "templates" / "deployment.yaml").read_text()
    for part in quoted.split("…\n"):
        assert part in tested
    (values,) = (block for block in blocks(PAGE, "yaml") if block.startswith("# values.yaml"))
    said = yaml.safe_load(values)["ratelimit-rls"]
    assert said.keys() <= yaml.safe_load((UMBRELLA / "values.yaml").read_text())["ratelimit-rls"].keys()


def test_every_template_that_is_offered_exists() -> None:
    offered = set(re.findall(r"`(ratelimit-rls\.\w+)`", PAGE))
    defined = {
        name
        for path in helm.CHART.glob("templates/*.tpl")
        for name in re.findall(r'define "([^"]+)"', path.read_text())
    }
    assert offered
    assert offered <= defined


def test_the_values_that_are_named_exist() -> None:
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


@pytest.mark.slow
def test_the_notes_end_in_a_command(tmp_path: Path) -> None:
    # Helm shows notes only to those who have a cluster; a template that includes them shows them to us.
    chart = shutil.copytree(helm.CHART, tmp_path / "ratelimit-rls")
    (chart / "templates" / "notes.yaml").write_text(
        'kind: Notes\nmetadata: {name: notes}\ntext: {{ include (print .Template.BasePath "/NOTES.txt") . | toJson }}\n'
    )
    for case in helm.cases():
        shown = helm.template("-f", helm.CHART / "ci" / f"{case}-values.yaml", chart=chart)
        notes = helm.one(helm.parsed(shown), "Notes")["text"]
        last = notes.strip().splitlines()[-1]
        assert re.match(r"  (kubectl|helm) \S", last), f"{case}: {last}"
        assert ("`helm test` proves only that" in notes) == (case in NOBODY_KNOWS_THE_RULES), case
