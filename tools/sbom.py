"""Writes a software bill of materials (CycloneDX 1.6, JSON) of the packages in an environment.

    python tools/sbom.py ENVIRONMENT [--report REPORT]... [--base-image NAME] > sbom.cdx.json

ENVIRONMENT is a virtual environment that contains ratelimit-rls. A REPORT is the output of `pip install --report` and
contains the hash of each archive. The output is reproducible: it contains no timestamp unless SOURCE_DATE_EPOCH is set.
It needs only the standard library, so that it can run during the build of an image.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
import uuid
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

PROJECT = "ratelimit-rls"
PROJECT_EXTRAS = {"archive"}
MAX_LICENSE_NAME = 100
"""Maximum length of a licence name: some packages put the whole licence text there."""

Json = dict[str, Any]


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def purl(distribution: Distribution) -> str:
    return f"pkg:pypi/{normalized(distribution.name)}@{distribution.version}"


def requirements(distribution: Distribution, extras: set[str]) -> Iterator[tuple[str, set[str]]]:
    """Yield the requirements of a package with these extras, and the extras it requires of them.

    Of a marker only the extra is evaluated. If the rest did not apply, the package is not installed.
    """
    for text in distribution.requires or ():
        requirement, _, marker = text.partition(";")
        wanted = set(re.findall(r"extra\s*==\s*['\"]([^'\"]+)['\"]", marker))
        if wanted and not wanted & extras:
            continue
        found = re.match(r"\s*([A-Za-z0-9._-]+)\s*(?:\[([^\]]*)\])?", requirement)
        assert found is not None, text
        yield normalized(found[1]), {extra.strip() for extra in (found[2] or "").split(",") if extra.strip()}


def dependencies(installed: dict[str, Distribution]) -> list[Json]:
    """Return the dependencies of each package, with the extras that are required."""
    extras: dict[str, set[str]] = {PROJECT: PROJECT_EXTRAS}
    unseen = [PROJECT]
    while unseen:
        package = unseen.pop()
        for name, wanted in requirements(installed[package], extras[package]):
            if name in installed and not (name in extras and wanted <= extras[name]):
                extras[name] = extras.get(name, set()) | wanted
                unseen.append(name)
    return [
        {
            "ref": purl(distribution),
            "dependsOn": sorted(
                {
                    purl(installed[other])
                    for other, _ in requirements(distribution, extras.get(name, set()))
                    if other in installed
                }
            ),
        }
        for name, distribution in sorted(installed.items())
    ]


def field(distribution: Distribution, name: str) -> str:
    values: list[str] = distribution.metadata.get_all(name) or [""]
    return values[0]


def licenses(distribution: Distribution) -> list[Json]:
    if expression := field(distribution, "License-Expression"):
        return [{"expression": expression}]
    classified = [
        line.rpartition(" :: ")[2]
        for line in distribution.metadata.get_all("Classifier") or ()
        if line.startswith("License :: ")
    ]
    named = field(distribution, "License")
    if classified or not named or len(named) > MAX_LICENSE_NAME or "\n" in named:
        return [{"license": {"name": name}} for name in classified]
    return [{"license": {"name": named}}]


def component(kind: str, distribution: Distribution, hashes: dict[str, str]) -> Json:
    found: Json = {
        "type": kind,
        "bom-ref": purl(distribution),
        "name": normalized(distribution.name),
        "version": distribution.version,
        "purl": purl(distribution),
    }
    if summary := field(distribution, "Summary"):
        found["description"] = summary
    if names := licenses(distribution):
        found["licenses"] = names
    if sha256 := hashes.get(f"{normalized(distribution.name)}=={distribution.version}"):
        found["hashes"] = [{"alg": "SHA-256", "content": sha256}]
    return found


def archive_hashes(reports: Iterable[Path]) -> dict[str, str]:
    return {
        f"{normalized(item['metadata']['name'])}=={item['metadata']['version']}": item["download_info"]["archive_info"][
            "hashes"
        ]["sha256"]
        for report in reports
        for item in json.loads(report.read_text())["install"]
        if "archive_info" in item["download_info"]
    }


def document(installed: dict[str, Distribution], hashes: dict[str, str], base_image: str) -> Json:
    version = platform.python_version()
    python = {"type": "platform", "bom-ref": f"pkg:generic/python@{version}", "name": "python", "version": version}
    python["purl"] = python["bom-ref"]
    libraries = [
        component("library", distribution, hashes)
        for name, distribution in sorted(installed.items())
        if name != PROJECT
    ]
    about: Json = {
        "lifecycles": [{"phase": "build"}],
        "component": component("application", installed[PROJECT], hashes),
    }
    if base_image:
        about["properties"] = [{"name": f"{PROJECT}:base-image", "value": base_image}]
    if moment := os.environ.get("SOURCE_DATE_EPOCH"):
        about["timestamp"] = datetime.fromtimestamp(int(moment), UTC).isoformat()
    content: Json = {"metadata": about, "components": [python, *libraries], "dependencies": dependencies(installed)}
    number = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(content, sort_keys=True))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{number}",
        "version": 1,
    } | content


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the bill of materials of a virtual environment.")
    parser.add_argument("environment", type=Path)
    parser.add_argument("--report", type=Path, action="append", default=[])
    parser.add_argument("--base-image", default="")
    given = parser.parse_args()
    paths = [str(path) for path in given.environment.glob("lib/python3.*/site-packages")]
    installed = {normalized(found.name): found for found in distributions(path=paths)}
    if PROJECT not in installed:
        raise SystemExit(f"{given.environment} is no virtual environment with {PROJECT} in it")
    json.dump(document(installed, archive_hashes(given.report), given.base_image), sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
