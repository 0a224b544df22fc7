"""One body per behaviour, run over every store."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import of_every_run
from tests.servers import RedisServer, redis_binaries
from tests.stores import EMBEDDED, STORE_IDS, StoreUnderTest, embedded_store, redis_store


@pytest.fixture(scope="module", params=map(of_every_run, STORE_IDS))
def _store(request: pytest.FixtureRequest) -> Iterator[tuple[StoreUnderTest, RedisServer | None]]:
    if request.param == EMBEDDED:
        with embedded_store() as store:
            yield store, None
        return
    binary = redis_binaries().get(request.param)
    if binary is None:
        pytest.skip(f"{request.param} is not on this machine")
    with RedisServer(binary) as server, redis_store(server) as store:
        yield store, server


@pytest.fixture
def store(_store: tuple[StoreUnderTest, RedisServer | None], request: pytest.FixtureRequest) -> StoreUnderTest:
    """A store that has counted nothing at its present moment: each test begins a year after the one before."""
    under_test, server = _store
    if server is not None:
        server.flush()
    under_test.now_us += 366 * 86_400 * 1_000_000
    under_test.now_us -= under_test.now_us % 86_400_000_000
    return under_test
