"""Fixtures that run each conformance test on every store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import cache
from typing import NamedTuple

import pytest

from tests.conftest import param_with_slow_mark
from tests.support.redis_servers import RedisCluster
from tests.support.servers import RedisServer, redis_binaries
from tests.support.stores import (
    CLUSTER,
    CLUSTER_WITH_FUNCTIONS,
    EMBEDDED,
    PER_SECOND,
    STORE_IDS,
    WITHOUT_FUNCTIONS,
    StoreUnderTest,
    cluster_store,
    embedded_store,
    redis_store,
    split_store,
    store_without_functions,
)


class Running(NamedTuple):
    servers: Sequence[RedisServer]
    connected: Callable[[], AbstractContextManager[StoreUnderTest]]


def _running(name: str, stack: ExitStack) -> Running:
    if name == EMBEDDED:
        return Running([], embedded_store)
    if name in (CLUSTER, CLUSTER_WITH_FUNCTIONS):
        binary = redis_binaries().get("valkey-9") if name == CLUSTER_WITH_FUNCTIONS else None
        cluster = stack.enter_context(RedisCluster(binary))
        return Running(cluster.nodes, lambda: cluster_store(cluster))
    if name == PER_SECOND:
        server, other = (stack.enter_context(RedisServer()) for _ in range(2))
        return Running([server, other], lambda: split_store(server, other))
    if name == WITHOUT_FUNCTIONS:
        server = stack.enter_context(RedisServer(redis_binaries()["valkey-9"]))
        return Running([server], lambda: store_without_functions(server))
    binary = redis_binaries().get(name)
    if binary is None:
        pytest.skip(f"{name} is not on this machine")
    server = stack.enter_context(RedisServer(binary))
    return Running([server], lambda: redis_store(server))


@pytest.fixture(scope="session")
def _servers() -> Iterator[Callable[[str], Running]]:
    """Return servers by the id of a store. Started on first use and kept for all modules: a cluster takes seconds."""
    with ExitStack() as stack:
        yield cache(lambda name: _running(name, stack))


@pytest.fixture(scope="module", params=map(param_with_slow_mark, STORE_IDS))
def _store(
    request: pytest.FixtureRequest, _servers: Callable[[str], Running]
) -> Iterator[tuple[StoreUnderTest, Sequence[RedisServer]]]:
    """Return a store with its own clock, which advances by a year per test and must stay below 2^53 µs."""
    servers, connected = _servers(request.param)
    with connected() as store:
        yield store, servers


@pytest.fixture
def store(_store: tuple[StoreUnderTest, Sequence[RedisServer]]) -> StoreUnderTest:
    """Return a store without any counts at its current time: each test starts a year after the previous one."""
    under_test, servers = _store
    for server in servers:
        server.flush()
    under_test.now_us += 366 * 86_400 * 1_000_000
    under_test.now_us -= under_test.now_us % 86_400_000_000
    return under_test
