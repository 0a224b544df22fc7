"""Fixtures for all tests; the servers are in tests/support/servers.py."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, settings
from structlog.dev import ConsoleRenderer, plain_traceback

from tests.support.databases import _upgraded_database, _upgraded_file, database_url, postgres_server, upgraded_url
from tests.support.servers import RedisServer, redis_binaries

# pytest finds fixtures in this module.
__all__ = ["_upgraded_database", "_upgraded_file", "database_url", "postgres_server", "upgraded_url"]

# Keep bytecode even with PYTHONDONTWRITEBYTECODE: otherwise pytest rewrites the assertions of every module each time,
# which takes as long as many hundred tests. Its plugins are imported before this module: child processes keep theirs.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Tests run without the logging of the service. The default of structlog formats tracebacks with rich, if that is
# installed, and with all local variables: half a second for each.
ConsoleRenderer.get_active().exception_formatter = plain_traceback

# Not judged by wall time, which is that of a busy machine, too.
_untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("few", _untimed, max_examples=30)
settings.register_profile("many", _untimed, max_examples=100)
settings.load_profile("few")
"""Profiles of Hypothesis; `make test` uses --hypothesis-profile=many."""

REDIS_IDS = ("redis-6.2", "valkey-9", "redis-on-path")


MAX_PROCESSES = 4
"""Every process of pytest-xdist imports and collects all tests, which takes 6 s of CPU."""


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Run all tests in one process per core, and chosen files or tests in this process."""
    runs_all = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    return min(MAX_PROCESSES, len(os.sched_getaffinity(0))) if runs_all else 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run quick tests first, so that failures show within seconds."""
    items.sort(key=lambda item: any(item.get_closest_marker(name) for name in ("slow", "e2e", "chaos")))


def pytest_collection_finish() -> None:
    """Exclude the collected tests from garbage collection, which would take seconds."""
    gc.collect()
    gc.freeze()


def param_with_slow_mark(name: str) -> object:
    """Return the parameter, marked slow for all but the embedded store and one server; `make test` runs them all."""
    slow = name not in ("embedded", "valkey-9")
    return pytest.param(name, marks=pytest.mark.slow) if slow else name


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A temporary directory for Unix sockets: their paths have at most 107 bytes, and pytest's are long."""
    with TemporaryDirectory() as directory:
        yield Path(directory)


@pytest.fixture(scope="session", params=map(param_with_slow_mark, REDIS_IDS))
def _running_redis(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    binary = redis_binaries().get(request.param)
    if binary is None:
        pytest.skip(f"{request.param} is not on this machine")
    with RedisServer(binary) as server:
        yield server


@pytest.fixture
def redis_server(_running_redis: RedisServer) -> RedisServer:
    """Each available Redis in turn: empty, and restarted if the previous test stopped it."""
    _running_redis.flush()
    return _running_redis


@pytest.fixture(scope="session")
def _any_redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def any_redis(_any_redis: RedisServer) -> RedisServer:
    """One Redis, for tests that do not depend on its version."""
    _any_redis.flush()
    return _any_redis
