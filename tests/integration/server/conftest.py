"""Rules on disk, for tests of the whole process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launched import ROOMY


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    """A file with rules under which nothing is refused."""
    path = tmp_path / "rules" / "roomy.yaml"
    path.parent.mkdir()
    path.write_text(ROOMY)
    return path
