"""Tells compiled installations from pure Python ones (`hatch_build.py` compiles)."""

from __future__ import annotations

from importlib.machinery import ExtensionFileLoader
from importlib.util import find_spec


def build() -> str:
    """Return how this installation runs the hot path: "compiled" or "pure Python".

    All modules of the hot path are compiled or none is, so one of them tells.
    """
    spec = find_spec("ratelimit_rls.core.storage_keys")
    return "compiled" if spec is not None and isinstance(spec.loader, ExtensionFileLoader) else "pure Python"
