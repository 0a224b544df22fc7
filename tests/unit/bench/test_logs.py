"""Prefilled sliding logs are the ones the service's script uses."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from bench import logs, workload
from bench.connection import LoadError
from bench.workload import RuleSet
from ratelimit_rls.core.model import Code, Decision, Descriptor, Entry, Request
from ratelimit_rls.protos.messages import RateLimitRequest
from ratelimit_rls.rules.compile import compile_documents
from ratelimit_rls.settings.redis_address import RedisAddress, RedisServers
from ratelimit_rls.simulation.runner import make_limiter
from ratelimit_rls.store.redis.factory import redis_store
from ratelimit_rls.store.redis.script_node import RedisOptions
from tests.support.servers import RedisServer

HITS = 20
CALLERS = (7, 100_003)


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


async def decisions(redis: RedisServer, tmp_path: Path, limit: int) -> list[Decision]:
    """Return the keys of each caller's first call, from the rules and requests of the workload."""
    workload.write_rules(tmp_path, RuleSet("sliding_log", "admitted", limit))
    rules = (tmp_path / workload.SUBDIRECTORY / "config" / "bench.yaml").read_bytes()
    servers = RedisServers("single", (RedisAddress("127.0.0.1", redis.port),))
    store = redis_store(servers, None, RedisOptions(timeout_s=10))
    await store.start()
    try:
        limiter = make_limiter(compile_documents({"bench.yaml": rules}).tree, store)
        decided = await limiter.check([limiter.prepare(request_of(number)) for number in CALLERS])
    finally:
        await store.close()
    assert all(isinstance(one, Decision) for one in decided)
    return [one for one in decided if isinstance(one, Decision)]


def request_of(number: int) -> Request:
    result = RateLimitRequest.FromString(workload.request(number, 1))
    entries = (tuple(Entry(one.key, one.value) for one in descriptor.entries) for descriptor in result.descriptors)
    return Request(result.domain, tuple(map(Descriptor, entries)))


async def test_filled_log_contains_the_given_hits(
    redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "ONE_EXPIRES_EVERY_S", 60.0)  # none while this test runs
    keys = [logs.key(number) for number in CALLERS]
    for limit, code in ((HITS + 1, Code.OK), (HITS, Code.OVER_LIMIT)):
        logs.fill(redis.address, keys, HITS)
        decided = await decisions(redis, tmp_path, limit)
        assert [one.code for one in decided] == [code, code]


def test_filled_hits_expire_one_by_one(redis: RedisServer) -> None:
    before_s, before_us = redis.cli("TIME")
    logs.fill(redis.address, [logs.key(number) for number in CALLERS], HITS)
    now_s, now_us = redis.cli("TIME")
    _, *elements = redis.cli("LRANGE", logs.key(CALLERS[1]), 0, -1)
    moments_us = [int(element.split()[0]) for element in elements]
    assert {later - earlier for earlier, later in pairwise(moments_us)} == {500_000}
    earliest_us, latest_us = (
        (s - logs.WINDOW_S) * 1_000_000 + us for s, us in ((before_s, before_us), (now_s, now_us))
    )
    assert earliest_us < moments_us[0] <= latest_us + 500_000


async def test_no_figures_if_calls_use_other_keys(redis: RedisServer, tmp_path: Path) -> None:
    keys = [logs.key(number) for number in CALLERS]
    redis.flush()
    with pytest.raises(LoadError, match="no call was added"):
        logs.check(redis.address, keys, HITS)
    logs.fill(redis.address, keys, HITS)
    with pytest.raises(LoadError, match="which was given 20 hits"):
        logs.check(redis.address, keys, HITS)
    await decisions(redis, tmp_path, HITS + 1)
    logs.check(redis.address, keys, HITS)


def test_longer_log_takes_more_bytes(redis: RedisServer) -> None:
    keys = [logs.key(number) for number in CALLERS]
    short, long = (logs.fill(redis.address, keys, hits) for hits in (10, 1_000))
    assert 0 < short < long
    assert redis.cli("LLEN", keys[1]) == 1_001
