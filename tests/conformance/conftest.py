"""One body per behaviour, run over every store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from tests.conftest import of_every_run
from tests.redis_servers import RedisCluster
from tests.servers import RedisServer, redis_binaries
from tests.stores import (
    CLUSTER,
    EMBEDDED,
    PER_SECOND,
    STORE_IDS,
    StoreUnderTest,
    cluster_store,
    embedded_store,
    redis_store,
    split_store,
)


@pytest.fixture(scope="module", params=map(of_every_run, STORE_IDS))
def _store(request: pytest.FixtureRequest) -> Iterator[tuple[StoreUnderTest, Sequence[RedisServer]]]:
    if request.param == EMBEDDED:
        with embedded_store() as store:
            yield store, []
        return
    if request.param == CLUSTER:
        with RedisCluster() as cluster, cluster_store(cluster) as store:
            yield store, cluster.nodes
        return
    if request.param == PER_SECOND:
        with RedisServer() as server, RedisServer() as other, split_store(server, other) as store:
            yield store, [server, other]
        return
    binary = redis_binaries().get(request.param)
    if binary is None:
        pytest.skip(f"{request.param} is not on this machine")
    with RedisServer(binary) as server, redis_store(server) as store:
        yield store, [server]


@pytest.fixture
def store(_store: tuple[StoreUnderTest, Sequence[RedisServer]]) -> StoreUnderTest:
    """A store that has counted nothing at its present moment: each test begins a year after the one before."""
    under_test, servers = _store
    for server in servers:
        server.flush()
    under_test.now_us += 366 * 86_400 * 1_000_000
    under_test.now_us -= under_test.now_us % 86_400_000_000
    return under_test
