"""What every end-to-end test stands on: an upstream, the sandboxes of envoy/, and both transports."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers import SANDBOXES, Upstream


@pytest.fixture(scope="session")
def upstream() -> Iterator[Upstream]:
    with Upstream() as server:
        yield server


@pytest.fixture(params=["native", "grpcio"])
def transport(request: pytest.FixtureRequest) -> str:
    """Both gRPC transports, where the test is cheap enough to run twice."""
    name: str = request.param
    return name


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    """A file with the rules of the plain sandbox, by the day: no test meets the end of a minute."""
    path = tmp_path / "rules" / "edge.yaml"
    path.parent.mkdir()
    path.write_text((SANDBOXES / "rls-http" / "rules.yaml").read_text().replace("unit: minute", "unit: day"))
    return path
