"""A database with its tables, copied from a template that is upgraded once: SQLite, and PostgreSQL in `make test`."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from ratelimit_rls.database.database import Database
from tests.support.databases import PostgresServer


class Clock:
    """A manual clock that starts at 2023-11-15T00:00:00Z."""

    def __init__(self) -> None:
        self.now_s = 1_700_006_400.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def _upgraded(url: str) -> None:
    async def upgrade() -> None:
        database = Database(url)
        await database.upgrade()
        await database.close()

    asyncio.run(upgrade())


@pytest.fixture(scope="session")
def _sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("series") / "template.db"
    _upgraded(f"sqlite:///{path}")
    return path


@pytest.fixture(scope="session")
def _postgres_template() -> Iterator[Callable[[PostgresServer], str]]:
    @cache
    def template(server: PostgresServer) -> str:
        name = server.new_database()
        _upgraded(server.url(name))
        return name

    yield template
    template.cache_clear()


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def series_url(
    request: pytest.FixtureRequest, tmp_path: Path, _sqlite_template: Path, _postgres_template: Callable[..., str]
) -> Iterator[str]:
    if request.param == "sqlite":
        path = tmp_path / "records.db"
        shutil.copyfile(_sqlite_template, path)
        yield f"sqlite:///{path}"
        return
    server: PostgresServer = request.getfixturevalue("postgres_server")
    name = server.new_database(_postgres_template(server))
    yield server.url(name)
    server.drop_database(name)


@pytest.fixture
async def database(series_url: str) -> AsyncIterator[Database]:
    made = Database(series_url)
    yield made
    await made.close()
