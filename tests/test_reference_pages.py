"""Generated documentation pages are current."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.reference import generate

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize(
    "page", ["reference/settings.md", "reference/commands.md", "reference/metrics.md", "admin-api.md", "records.md"]
)
def test_generated_page_is_current(page: str) -> None:
    path = DOCS / page

    assert path.read_text() == generate.pages()[path], "the code has changed: run `make docs`"
