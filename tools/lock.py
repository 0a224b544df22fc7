"""Writes requirements/: the packages of the image at the versions of constraints.txt, with the hash of each wheel.

The hashes come from the configured package index of pip, for the wheels that pip would choose on each target. `make
hashes` runs it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
MACHINES = ("x86_64", "aarch64")
NEWEST_GLIBC = 41
"""Minor version of glibc 2 in the newest common Debian image; wheels for older ones are found, too."""

HEADER = """\
# {about}
# `make hashes` writes it from pyproject.toml and constraints.txt: Linux with glibc, {machines}, Python {pythons}.
"""

Hashes = dict[str, set[str]]


def hashes(requirements: list[str]) -> Hashes:
    """Return the sha256 of every wheel that any target would install, by `name==version`."""
    found: Hashes = defaultdict(set)
    for python in PYTHONS:
        for machine in MACHINES:
            for item in resolved(requirements, python, machine):
                name = re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower()
                archive = item["download_info"]["archive_info"]
                found[f"{name}=={item['metadata']['version']}"].add(archive["hashes"]["sha256"])
    names = [pin.partition("==")[0] for pin in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise SystemExit(f"constraints.txt does not pin one version for every target: {', '.join(sorted(twice))}")
    return found


def resolved(requirements: list[str], python: str, machine: str) -> list[dict[str, Any]]:
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(NEWEST_GLIBC, 4, -1)]
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        command += ["--target", directory, "--report", str(report), "--only-binary", ":all:"]
        command += ["--python-version", python, "--constraint", str(ROOT / "constraints.txt")]
        command += [part for platform in platforms for part in ("--platform", platform)]
        subprocess.run([*command, *requirements], check=True)  # noqa: S603 - of pyproject.toml
        install = json.loads(report.read_text())["install"]
    assert isinstance(install, list)
    return install


def write(path: Path, about: str, requirements: list[str]) -> None:
    header = HEADER.format(about=about, machines=" and ".join(MACHINES), pythons=f"{PYTHONS[0]} to {PYTHONS[-1]}")
    lines = [
        " \\\n    ".join([pin, *(f"--hash=sha256:{one}" for one in sorted(found))])
        for pin, found in sorted(hashes(requirements).items())
    ]
    path.write_text(header + "\n".join(lines) + "\n")
    print(f"{path.relative_to(ROOT)}: {len(lines)} packages")


def main() -> None:
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = about["project"]
    extra = project["optional-dependencies"]["archive"]
    write(ROOT / "requirements/image.txt", "What the image has beside this project.", project["dependencies"] + extra)
    write(ROOT / "requirements/build.txt", "What builds the wheel of this project.", about["build-system"]["requires"])


if __name__ == "__main__":
    main()
