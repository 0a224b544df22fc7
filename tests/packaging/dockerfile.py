"""A Dockerfile carried out below a directory, where no engine can build it: the same files, commands and variables.

Paths of the image are moved below that directory wherever they are written. The base image is this machine.
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

_MOVED = re.compile(r"(?<![\w.-])/(?=src\b|wheels\b|opt/ratelimit-rls\b|usr/local/bin/ratelimit-rls\b|bin/ratelimit\b)")
"""Paths that the Dockerfile makes; all others are the base image's."""


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
    """What the last stage leaves behind."""

    root: Path
    environment: dict[str, str] = field(default_factory=dict)
    user: str = ""
    directory: str = "/"
    ports: tuple[int, ...] = ()
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()

    def at(self, path: str) -> Path:
        """Where a path of the image is here."""
        return self.root / path.lstrip("/")


def build(context: Path, root: Path) -> Image:
    """Carries out the Dockerfile of a checkout; raises AssertionError with the output of a command that fails."""
    arguments: dict[str, str] = {}
    stages: dict[str, Path] = {}
    image = Image(root)
    for one in instructions(context / "Dockerfile"):
        match one.name:
            case "ARG":
                name, _, default = one.text.partition("=")
                arguments[name] = default
            case "FROM":
                if root.exists():  # the stage before: what this one copies from it comes back to the same place
                    earlier = root.with_name(f"{root.name}-{len(stages)}")
                    root.rename(earlier)
                    stages[next(reversed(stages))] = earlier
                stages[one.text.partition(" AS ")[2] or "last"] = root
                for made in ("usr/local/bin", "bin"):
                    (root / made).mkdir(parents=True)
                image = Image(root)
            case "COPY":
                _copy(one.text, context, stages, image)
            case "RUN":
                _run(one.text, image)
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
                pass
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


def _run(text: str, image: Image) -> None:
    prefix = str(image.root)
    own = {name: _MOVED.sub(f"{prefix}/", value) for name, value in image.environment.items()}
    # Nothing of this process's paths is handed on: the wheel must not find its files in the checkout.
    outer = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    path = os.pathsep.join([str(Path(sys.executable).parent), outer.get("PATH", "")])
    done = subprocess.run(
        ["/bin/sh", "-c", _MOVED.sub(f"{prefix}/", text)],
        cwd=image.at(image.directory),
        env=outer | own | {"PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
