"""Fixtures every folder of tests may use; the servers behind them are in tests/servers.py."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.databases import _upgraded_database, _upgraded_file, database_url, postgres_server, upgraded_url
from tests.servers import RedisServer, redis_binaries

# Fixtures are found by being here.
__all__ = ["_upgraded_database", "_upgraded_file", "database_url", "postgres_server", "upgraded_url"]

# Also where Python is told to keep no bytecode: pytest rewrites every assertion of every module, and doing so each time
# takes as long as many hundred tests.
sys.dont_write_bytecode = False

settings.register_profile("few", max_examples=30)
settings.register_profile("many", max_examples=100)
settings.load_profile("few")
"""Of random examples: many with --hypothesis-profile=many, as `make test` runs them."""

REDIS_IDS = ("redis-6.2", "valkey-9", "redis-on-path")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The quick tests run first, whatever was selected: what is broken shows within seconds."""
    items.sort(key=lambda item: any(item.get_closest_marker(name) for name in ("slow", "e2e", "chaos")))


def pytest_collection_finish() -> None:
    """What was collected stays until the end: looking through it again and again for garbage takes seconds."""
    gc.collect()
    gc.freeze()


def of_every_run(name: str) -> object:
    """One server of a wheel is; an older one, one that the machine happens to have, or several are for `make test`."""
    slow = name in ("redis-6.2", "redis-on-path", "cluster", "per-second")
    return pytest.param(name, marks=pytest.mark.slow) if slow else name


@pytest.fixture(scope="session", params=map(of_every_run, REDIS_IDS))
def _running_redis(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    binary = redis_binaries().get(request.param)
    if binary is None:
        pytest.skip(f"{request.param} is not on this machine")
    with RedisServer(binary) as server:
        yield server


@pytest.fixture
def redis_server(_running_redis: RedisServer) -> RedisServer:
    """Each Redis there is, in turn: empty, and running again should the test before have stopped it."""
    _running_redis.flush()
    return _running_redis


@pytest.fixture(scope="session")
def _any_redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def any_redis(_any_redis: RedisServer) -> RedisServer:
    """One Redis, for tests to which its version does not matter."""
    _any_redis.flush()
    return _any_redis
