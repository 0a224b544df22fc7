"""Fixtures of the end-to-end tests: an upstream and the rules of a sandbox of envoy/."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.servers import SANDBOXES, Upstream
from tests.support.windows import with_yearly_limits


@pytest.fixture(scope="session")
def upstream() -> Iterator[Upstream]:
    with Upstream() as server:
        yield server


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    """File with the rules of the plain sandbox, with yearly limits so that no window ends during a test."""
    path = tmp_path / "rules" / "edge.yaml"
    path.parent.mkdir()
    path.write_text(with_yearly_limits((SANDBOXES / "rls-http" / "rules.yaml").read_text()))
    return path
