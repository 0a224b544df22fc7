"""docs/architecture.md names files, functions and settings that exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
PATHS = sorted(set(re.findall(r"`([\w/]+/[\w/.]*|\w+\.(?:py|lua|md|toml))`", PAGE)))
NAMES = sorted(set(re.findall(r"`(_?[A-Za-z]\w+(?:\.\w+)?)`", PAGE)) - set(PATHS))


@cache
def sources() -> str:
    folders = ("ratelimit_rls", "lua", "tests/support")
    return "\n".join(
        path.read_text() for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".lua")
    )


@pytest.mark.parametrize("path", PATHS)
def test_path_exists(path: str) -> None:
    assert (ROOT / "ratelimit_rls" / path).exists() or (ROOT / path).exists(), path


@pytest.mark.parametrize("name", NAMES)
def test_name_exists(name: str) -> None:
    *owner, last = name.split(".")
    assert re.search(rf"\b{last}\b", sources(), re.IGNORECASE), name
    assert all(re.search(rf"^class {one}\b", sources(), re.MULTILINE) for one in owner if one[0].isupper()), name
