"""What random traces are played on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.servers import RedisServer
from tests.stores import StoreUnderTest, embedded_store, redis_store


@pytest.fixture(scope="module")
def stores() -> Iterator[dict[str, StoreUnderTest]]:
    """The embedded store and one Redis; the conformance tests hold the other servers to the same behaviour."""
    with RedisServer() as server, redis_store(server) as redis, embedded_store() as embedded:
        yield {"embedded": embedded, "redis": redis}
