"""A pytest plugin (`-p tests.support.only_compiled`): nothing is tested unless the hot path is compiled."""

from __future__ import annotations

import tomllib
from importlib.machinery import ExtensionFileLoader
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]


def compiled_modules() -> list[Path]:
    """Return the sources that `hatch_build.py` compiles, relative to the root of the checkout."""
    targets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    return [Path(path) for path in targets["wheel"]["hooks"]["custom"]["modules"]]


def pytest_sessionstart() -> None:
    for path in compiled_modules():
        spec = find_spec(".".join(path.with_suffix("").parts))
        assert spec is not None
        assert isinstance(spec.loader, ExtensionFileLoader), f"{spec.origin} is not compiled"
