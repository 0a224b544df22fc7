"""Stores for random traces."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.servers import RedisServer
from tests.support.stores import StoreUnderTest, embedded_store, redis_store


@pytest.fixture(scope="module")
def stores() -> Iterator[dict[str, StoreUnderTest]]:
    """Return the embedded store and one Redis; the conformance tests cover the other servers."""
    with RedisServer() as server, redis_store(server) as redis, embedded_store() as embedded:
        yield {"embedded": embedded, "redis": redis}
