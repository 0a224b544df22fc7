"""Fixtures for tests of the whole process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.service_process import UNRESTRICTIVE_RULES


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    """A rules file under which nothing is denied."""
    path = tmp_path / "rules" / "roomy.yaml"
    path.parent.mkdir()
    path.write_text(UNRESTRICTIVE_RULES)
    return path
