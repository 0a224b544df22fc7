"""The generated pages say what the code says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

GENERATOR = Path(__file__).parents[1] / "docs" / "reference" / "generate.py"


@pytest.mark.parametrize("page", ["settings.md", "commands.md", "metrics.md", "../admin-api.md", "../records.md"])
def test_a_generated_page_is_current(page: str) -> None:
    spec = importlib.util.spec_from_file_location("reference_pages", GENERATOR)
    assert spec is not None
    assert spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)

    path = (GENERATOR.parent / page).resolve()

    assert path.read_text() == generator.pages()[path], "the code has changed; `make docs` writes the page anew"
