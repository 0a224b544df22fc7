"""The admin API on each database, or on SQLite for tests that do not depend on the database."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.integration.admin.admin_client import AdminApi, Client, open_admin_api


@pytest.fixture
async def api(upgraded_url: str) -> AsyncIterator[AdminApi]:
    async with open_admin_api(upgraded_url) as api:
        yield api


@pytest.fixture
async def sqlite_api(_upgraded_file: Path, tmp_path: Path) -> AsyncIterator[AdminApi]:
    """The API on SQLite, for tests that do not depend on the database."""
    path = tmp_path / "records.db"
    shutil.copy(_upgraded_file, path)
    async with open_admin_api(f"sqlite:///{path}") as api:
        yield api


@pytest.fixture
def admin(api: AdminApi) -> Client:
    """A client with the bootstrap token."""
    return api.client()


@pytest.fixture
def sqlite_admin(sqlite_api: AdminApi) -> Client:
    return sqlite_api.client()
