"""Stores for random traces."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import REDIS_IDS, param_with_slow_mark
from tests.support.servers import RedisServer, redis_binaries
from tests.support.stores import StoreUnderTest, embedded_store, redis_store


@pytest.fixture(scope="module", params=map(param_with_slow_mark, REDIS_IDS))
def stores(request: pytest.FixtureRequest) -> Iterator[dict[str, StoreUnderTest]]:
    """Return the embedded store and one Redis: 6.2 runs a script, the others a function."""
    binary = redis_binaries().get(request.param)
    if binary is None:
        pytest.skip(f"{request.param} is not on this machine")
    with RedisServer(binary) as server, redis_store(server) as redis, embedded_store() as embedded:
        yield {"embedded": embedded, request.param: redis}
