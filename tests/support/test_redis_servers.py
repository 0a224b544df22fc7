"""Redis Cluster, Sentinel and TCP proxy fixtures behave as the tests expect."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.conftest import REDIS_IDS
from tests.support.redis_servers import RedisCluster, RedisSentinels, wait_until
from tests.support.servers import ONCE, RedisServer, redis_binaries
from tests.support.tcp_proxy import SlowProxy


@pytest.fixture(params=REDIS_IDS)
def binary(request: pytest.FixtureRequest) -> Path:
    found = redis_binaries().get(request.param)
    if found is None:
        pytest.skip(f"{request.param} is not on this machine")
    return found


@pytest.fixture
def cluster(binary: Path) -> Iterator[RedisCluster]:
    with RedisCluster(binary) as cluster:
        yield cluster


@pytest.mark.slow
def test_slot_moves_in_steps(cluster: RedisCluster) -> None:
    slot, old = cluster.slot_of("{a}"), cluster.node_of("{a}")
    new = next(node for node in cluster.nodes if node is not old)
    for number in range(10):
        old.cli("SET", f"{{a}}{number}", number)

    cluster.begin_move(slot, new)
    assert cluster.move_keys(slot, new, most=4) == 4
    assert (old.cli("DBSIZE"), new.cli("DBSIZE"), cluster.owner(slot)) == (6, 4, old)
    with pytest.raises(redis.ResponseError, match=f"{slot} {new.address}"):
        old.cli("GET", "{a}missing")  # ASK

    assert cluster.move_keys(slot, new) == 6
    cluster.finish_move(slot, new)
    assert cluster.node_of("{a}") is new
    with pytest.raises(redis.ResponseError, match=f"{slot} {new.address}"):
        old.cli("GET", "{a}0")  # MOVED
    assert new.cli("GET", "{a}0") == b"0"


@pytest.mark.slow
def test_node_joins_a_cluster_and_takes_a_slot(cluster: RedisCluster) -> None:
    joined = cluster.add_node()
    assert len(cluster.nodes) == 4
    cluster.move_slot(cluster.slot_of("k"), joined)
    joined.cli("SET", "k", "v")
    assert cluster.node_of("k") is joined


# One server version each: tests/chaos and tests/integration/store cover the others.


@pytest.mark.slow
def test_replica_takes_over_from_a_killed_cluster_node() -> None:
    with RedisCluster(list(redis_binaries().values())[-1], replicas=1, password="s3cret") as cluster:
        killed = cluster.node_of("k")
        cluster.kill(killed)
        wait_until(lambda: cluster.node_of("k") is not killed, "a replica has taken over")
        cluster.wait_until_ok()
        assert cluster.nodes.index(cluster.node_of("k")) >= 3


@pytest.mark.slow
def test_replica_takes_over_from_a_killed_master() -> None:
    with RedisSentinels(replicas=2) as sentinels:
        assert sentinels.url.split(",")[0] == "main"
        killed = sentinels.kill_master()
        assert sentinels.wait_for_another(killed) in sentinels.servers[1:]


def test_slow_proxy_delays_responses(any_redis: RedisServer) -> None:
    with SlowProxy(any_redis) as relay, redis.Redis(port=relay.port, retry=ONCE) as client:
        client.set("k", "v")
        relay.delay_ms = 50
        began = time.monotonic()
        with client.pipeline(transaction=False) as pipeline:
            for _ in range(100):
                pipeline.get("k")
            assert pipeline.execute() == [b"v"] * 100
        assert 0.05 <= time.monotonic() - began < 4  # delayed once, not once per reply
