"""The cluster client when nodes join and leave: whose slot map it uses, and which connections it keeps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager

import pytest

from ratelimit_rls.core.model import StoreResult
from ratelimit_rls.core.storage_keys import key_slot
from ratelimit_rls.errors import StoreError
from ratelimit_rls.settings.redis_address import RedisAddress, RedisServers
from ratelimit_rls.store.redis.cluster import Cluster
from ratelimit_rls.store.redis.script_node import RedisOptions
from ratelimit_rls.store.redis.sharded_store import ShardedStore
from tests.support.redis_servers import RedisCluster
from tests.support.servers import RedisServer
from tests.support.stores import KeyedOp, call, long_step

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    with RedisCluster() as cluster:
        yield cluster


@asynccontextmanager
async def connected(nodes: Sequence[RedisServer]) -> AsyncIterator[ShardedStore]:
    seeds = tuple(RedisAddress("127.0.0.1", node.port) for node in nodes)
    store = ShardedStore(
        Cluster(RedisServers("cluster", seeds), RedisOptions(timeout_s=5))
    )  # on a machine that may be busy
    await store.start()
    try:
        yield store
    finally:
        await store.close()


class Client:
    """Calls one limit repeatedly, and collects the results."""

    def __init__(self, store: ShardedStore, limit: KeyedOp) -> None:
        self.results: list[StoreResult | StoreError] = []
        self._store = store
        self._plan = store.prepare(call(limit))
        self._over = asyncio.Event()

    async def _ask(self) -> None:
        while not self._over.is_set():
            self.results += await self._store.spend([self._plan])

    async def __aenter__(self) -> Client:
        self._tasks = [asyncio.create_task(self._ask()) for _ in range(20)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._over.set()
        await asyncio.gather(*self._tasks)


async def test_joining_and_leaving_nodes_fail_no_call(cluster: RedisCluster) -> None:
    """A new node receives ASK redirects for its first slot while others move and the slot map is refreshed.

    It then loses that slot, and is disconnected while calls to it are in flight.
    """
    limit, other = long_step("alice", 10**6), long_step("bob", 10**6)
    slot, other_slot = key_slot(limit.key), key_slot(other.key)
    masters = list(cluster.nodes)
    home = cluster.owner(slot)
    guest = await asyncio.to_thread(cluster.add_node)
    async with connected(masters) as store, Client(store, limit) as first, Client(store, other) as second:
        await asyncio.to_thread(cluster.begin_move, slot, guest)
        await asyncio.to_thread(cluster.move_keys, slot, guest)
        connections = received(guest)
        for _ in range(4):
            to = next(node for node in masters if node is not cluster.owner(other_slot))
            await asyncio.to_thread(cluster.move_slot, other_slot, to)
            await asyncio.sleep(0.1)
        connections = received(guest) - connections
        await asyncio.to_thread(cluster.finish_move, slot, guest)
        await asyncio.sleep(0.1)
        await asyncio.to_thread(cluster.move_slot, slot, home)
        await asyncio.sleep(0.1)

    results = [*first.results, *second.results]
    print(f"{len(results)} calls while two slots moved six times, {connections} connections to the node without slots")
    assert not [one for one in results if isinstance(one, StoreError)]
    # MIGRATE and the commands of this test have connections, too; one per refresh of the slot map would be more.
    assert connections <= 12
    await asyncio.to_thread(guest.close)
    cluster.nodes.remove(guest)


def node_of_its_own() -> RedisServer:
    """Return a cluster client that is not started and knows no node."""
    return RedisCluster(masters=1).nodes[0]


def received(server: RedisServer) -> int:
    return int(server.cli("INFO", "stats")["total_connections_received"])


async def test_the_slot_map_of_a_node_that_left_is_ignored(cluster: RedisCluster) -> None:
    with node_of_its_own() as stranger:
        assert stranger.cli("CLUSTER", "SLOTS") == []
        async with connected([stranger, *cluster.nodes]) as store:
            (results,) = await store.spend([store.prepare(call(long_step("carol")))])
            assert isinstance(results, StoreResult)


async def test_the_slot_map_of_a_partitioned_node_is_ignored(cluster: RedisCluster) -> None:
    """The node has been cut off from the others for a while."""
    with node_of_its_own() as alone:
        alone.cli("CLUSTER", "ADDSLOTS", *range(16_000))
        async with connected([alone, *cluster.nodes]) as store:
            (results,) = await store.spend([store.prepare(call(long_step("carol")))])
            assert isinstance(results, StoreResult)
            assert alone.cli("DBSIZE") == 0
