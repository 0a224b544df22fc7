"""Executes a Dockerfile below a directory, without a container engine: the same files, commands and variables.

Paths of the image are replaced by paths below that directory. The base image is this machine.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

_MOVED = re.compile(r"(?<![\w.-])/(?=src\b|wheels\b|opt/ratelimit-rls\b|usr/local/bin/ratelimit-rls\b|bin/ratelimit\b)")
"""Paths created by the Dockerfile; all others belong to the base image."""


@dataclass(frozen=True, slots=True)
class Instruction:
    name: str
    text: str


def instructions(dockerfile: Path) -> list[Instruction]:
    lines = [line for line in dockerfile.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [Instruction(*line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


@dataclass(slots=True)
class Image:
    """Result of the last stage."""

    root: Path
    environment: dict[str, str] = field(default_factory=dict)
    user: str = ""
    directory: str = "/"
    ports: tuple[int, ...] = ()
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    labels: dict[str, str] = field(default_factory=dict)

    def at(self, path: str) -> Path:
        """Return the local path of a path in the image."""
        return self.root / path.lstrip("/")


def build(context: Path, root: Path, **build_args: str) -> Image:
    """Execute the Dockerfile of a checkout; raises AssertionError with the output of a failed command."""
    defaults: dict[str, str] = {}  # of ARGs before the first FROM, which a stage must redeclare
    arguments: dict[str, str] = {}  # ARGs of the stage
    stages: dict[str, Path] = {}
    image = Image(root)
    for one in instructions(context / "Dockerfile"):
        match one.name:
            case "ARG":
                name, _, default = one.text.partition("=")
                arguments[name] = build_args.get(name, default or defaults.get(name, ""))
                if not stages:
                    defaults[name] = arguments[name]
            case "FROM":
                if root.exists():  # the previous stage; its files are copied back to the same paths
                    earlier = root.with_name(f"{root.name}-{len(stages)}")
                    root.rename(earlier)
                    stages[next(reversed(stages))] = earlier
                stages[one.text.partition(" AS ")[2] or "last"] = root
                for made in ("usr/local/bin", "bin"):
                    (root / made).mkdir(parents=True)
                image = Image(root)
                arguments = {}
            case "COPY":
                _copy(one.text, context, stages, image)
            case "RUN":
                _run(one.text, image, arguments)
            case "ENV":
                image.environment |= dict(pair.split("=", 1) for pair in shlex.split(one.text))
            case "WORKDIR":
                image.directory = one.text
                image.at(one.text).mkdir(parents=True, exist_ok=True)
            case "USER":
                image.user = one.text
            case "EXPOSE":
                image.ports = tuple(map(int, one.text.split()))
            case "ENTRYPOINT":
                image.entrypoint = tuple(json.loads(one.text))
            case "CMD":
                image.cmd = tuple(json.loads(one.text))
            case "LABEL":
                given = shlex.split(Template(one.text).substitute(arguments))
                image.labels |= dict(pair.split("=", 1) for pair in given)
            case other:
                raise AssertionError(f"{other} is not carried out here; teach it to this module")
    return image


def _copy(text: str, context: Path, stages: dict[str, Path], image: Image) -> None:
    *sources, target = text.split()
    if sources[0].startswith("--from="):
        (source,) = sources[1:]
        assert source == target, "a virtual environment works where it was made only"
        image.at(target).parent.mkdir(parents=True, exist_ok=True)
        (stages[sources[0].removeprefix("--from=")] / source.lstrip("/")).rename(image.at(target))
        return
    for source in sources:
        to = image.at(image.directory) / target
        if (context / source).is_dir():
            shutil.copytree(context / source, to, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
        else:
            shutil.copy(context / source, to)


def _run(text: str, image: Image, arguments: dict[str, str]) -> None:
    prefix = str(image.root)
    own = {name: _MOVED.sub(f"{prefix}/", value) for name, value in image.environment.items()}
    # Paths of this process are not inherited: the wheel must not find its files in the checkout. Neither are pins.
    hidden = ("PYTHON", "VIRTUAL_ENV", "PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT")
    outer = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    path = os.pathsep.join([str(Path(sys.executable).parent), outer.get("PATH", "")])
    done = subprocess.run(
        ["/bin/sh", "-c", _MOVED.sub(f"{prefix}/", text)],
        cwd=image.at(image.directory),
        env=outer | arguments | own | {"PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
