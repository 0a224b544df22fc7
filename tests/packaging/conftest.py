"""The image, built once; it is also the clean environment for testing the wheel."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.packaging.dockerfile import Image, build

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def image() -> Iterator[Image]:
    # Not below pytest's own directory, which other users cannot access: the service runs as another user here.
    with tempfile.TemporaryDirectory(prefix="rls-image-") as directory:
        place = Path(directory)
        place.chmod(0o755)
        yield build(ROOT, place / "image")
