"""The admin API over each database, or over the one at hand for what has nothing to do with it."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.integration.admin.office import Client, Office, new_office


@pytest.fixture
async def office(upgraded_url: str) -> AsyncIterator[Office]:
    async with new_office(upgraded_url) as office:
        yield office


@pytest.fixture
async def any_office(_upgraded_file: Path, tmp_path: Path) -> AsyncIterator[Office]:
    """For tests to which the database does not matter."""
    path = tmp_path / "records.db"
    shutil.copy(_upgraded_file, path)
    async with new_office(f"sqlite:///{path}") as office:
        yield office


@pytest.fixture
def admin(office: Office) -> Client:
    """With the first token."""
    return office.client()


@pytest.fixture
def any_admin(any_office: Office) -> Client:
    return any_office.client()
