"""The store on a real Redis Cluster: where counters live, calls over several nodes, and slots on the move."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from ratelimit_rls.core.model import Algorithm, Answer, Charge, Plan, Unit
from ratelimit_rls.errors import StoreError, StoreUnavailable
from ratelimit_rls.settings.redis_address import RedisAddress, RedisServers
from ratelimit_rls.store.redis.node import Terms
from ratelimit_rls.store.redis.servers import OneServer
from ratelimit_rls.store.redis.sharded import ShardedStore
from ratelimit_rls.store.redis.store import RedisStore
from ratelimit_rls.store.redis.topology import Cluster, slot_of
from tests.redis_servers import RedisCluster
from tests.servers import RedisServer
from tests.stores import Asked, call, step

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

ALGORITHMS = pytest.mark.parametrize("algorithm", list(Algorithm), ids=lambda algorithm: algorithm.value)


@pytest.fixture(scope="module")
def _cluster() -> Iterator[RedisCluster]:
    with RedisCluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(_cluster: RedisCluster) -> RedisCluster:
    for node in _cluster.nodes:
        node.flush()
    return _cluster


@asynccontextmanager
async def connected(cluster: RedisCluster, **terms: float) -> AsyncIterator[ShardedStore]:
    seeds = tuple(RedisAddress("127.0.0.1", node.port) for node in cluster.nodes)
    store = ShardedStore(Cluster(RedisServers("cluster", seeds), Terms(**terms)))  # type: ignore[arg-type]
    await store.start()
    try:
        yield store
    finally:
        await store.close()


async def spend(store: ShardedStore, *plans: Plan) -> list[Answer]:
    answers = await store.spend([store.prepare(plan) for plan in plans])
    for answer in answers:
        assert isinstance(answer, Answer), answer
    return answers  # type: ignore[return-value]


async def left(store: ShardedStore, asked: Asked) -> int:
    limit = asked.step.limit
    look = Asked(
        asked.key, step(limit=limit.requests_per_unit, unit=limit.unit, algorithm=limit.algorithm, cost=0).step
    )
    return (await spend(store, call(look)))[0].readings[0].left


def on_each_node(cluster: RedisCluster, limits: list[int], **more: object) -> list[Asked]:
    """A limit on each of the nodes, in their order."""
    found: dict[int, Asked] = {}
    for number in range(1000):
        one = step(f"k{number}", limits[len(found)] if len(found) < len(limits) else 1, **more)  # type: ignore[arg-type]
        node = cluster.node_of(one.key)
        found.setdefault(node.port, one)
        if len(found) == len(limits):
            return list(found.values())
    raise AssertionError("some node has no slots")


def states(cluster: RedisCluster) -> dict[bytes, bytes | list[bytes] | None]:
    """Everything that is counted, on whichever node."""
    found: dict[bytes, bytes | list[bytes] | None] = {}
    for node in cluster.running:
        for key in node.cli("KEYS", "*"):
            is_list = node.cli("TYPE", key) in (b"list", "list")
            found[key] = node.cli("LRANGE", key, 0, -1) if is_list else node.cli("GET", key)
    return found


def test_slots_are_counted_as_redis_does() -> None:
    for key in (b"foo", b"rl:{edge/user=alice}:gcra:60", b"rl:{edge}/user=a:gcra:60", b"{}x", b"a{b", b""):
        assert slot_of(key) == RedisCluster.slot_of(key), key
    assert slot_of(b"123456789") == 0x31C3 % 16384  # the check value of CRC-16/XMODEM


@ALGORITHMS
async def test_three_descriptors_on_three_nodes_of_which_the_last_refuses_leave_all_as_it_was(
    cluster: RedisCluster, algorithm: Algorithm
) -> None:
    limits = on_each_node(cluster, [10, 10, 2], algorithm=algorithm)
    async with connected(cluster) as store:
        await spend(store, *[call(*limits)] * 2)
        before = [await left(store, one) for one in limits]
        (refused,) = await spend(store, call(*limits))
        after = [await left(store, one) for one in limits]

    print(f"{algorithm.value}: left {before} before the refused call, {after} after it")
    assert refused.refused
    assert before == [8, 8, 0]
    # A bucket may have gained a token meanwhile, and never has one less.
    assert all(now >= then for then, now in zip(before, after, strict=True))
    assert all(now <= then + 1 for then, now in zip(before, after, strict=True))
    assert [reading.left for reading in refused.readings][:2] == before[:2]


async def test_under_concurrency_no_limit_is_ever_exceeded_and_the_last_hit_is_used(cluster: RedisCluster) -> None:
    limits = on_each_node(cluster, [50, 300, 300])
    async with connected(cluster) as one, connected(cluster) as other:

        async def ask(store: ShardedStore) -> int:
            answers = await spend(store, *[call(*limits)] * 5)
            return sum(not answer.refused for answer in answers)

        admitted = sum(await asyncio.gather(*(ask(store) for store in (one, other) for _ in range(40))))
        counted = [300 - await left(one, limit) for limit in limits[1:]]

    print(f"400 calls over three nodes at a limit of 50: {admitted} admitted, {counted} counted on the others")
    assert admitted == 50
    assert counted == [50, 50]


async def test_what_is_charged_always_stays_charged_when_another_node_refuses(cluster: RedisCluster) -> None:
    first, last = on_each_node(cluster, [10, 1, 1], charge=Charge.ALWAYS)[:2]
    async with connected(cluster) as store:
        await spend(store, *[call(first, last)] * 3)
        assert await left(store, first) == 7


async def test_a_node_that_cannot_be_asked_fails_only_the_calls_that_need_it() -> None:
    with RedisCluster() as cluster:
        first, second, third = on_each_node(cluster, [10, 10, 10])
        async with connected(cluster, timeout_s=0.3) as store:
            await spend(store, call(first, second, third))
            cluster.kill(cluster.node_of(third.key))
            told = await store.spend([store.prepare(call(one)) for one in (first, third, second)])

            assert isinstance(told[1], StoreError)
            assert [isinstance(told[0], Answer), isinstance(told[2], Answer)] == [True, True]


async def test_slots_that_move_under_load_lose_and_double_no_hit(cluster: RedisCluster) -> None:
    """Whole slots, one after the other and back, some of them left half way for a while: ASK, TRYAGAIN and MOVED."""
    asked = [step(f"user{number}", 10**6, unit=Unit.YEAR) for number in range(40)]  # no window ends meanwhile
    sent = 0
    async with connected(cluster, timeout_s=5) as store:
        over = asyncio.Event()

        async def hammer() -> None:
            nonlocal sent
            while not over.is_set():
                await spend(store, *[call(one) for one in asked])
                sent += 1

        load = [asyncio.create_task(hammer()) for _ in range(3)]
        moved = 0
        for one in asked[:12]:
            slot = slot_of(one.key)
            there = next(node for node in cluster.nodes if node.port != cluster.owner(slot).port)
            await asyncio.to_thread(cluster.begin_move, slot, there)
            await asyncio.sleep(0.01)
            await asyncio.to_thread(cluster.move_keys, slot, there)
            await asyncio.sleep(0.01)
            await asyncio.to_thread(cluster.finish_move, slot, there)
            moved += 1
        over.set()
        await asyncio.gather(*load)
        counted = {10**6 - await left(store, one) for one in asked}

    print(f"{moved} slots moved under {sent * len(asked)} calls, none lost or doubled")
    assert counted == {sent}


async def test_a_node_that_joins_gets_work_and_one_that_leaves_is_let_go() -> None:
    with RedisCluster() as cluster:
        asked = step("alice", 10)
        slot = slot_of(asked.key)
        async with connected(cluster) as store:
            await spend(store, call(asked))
            home = cluster.owner(slot)
            guest = await asyncio.to_thread(cluster.add_node)
            await asyncio.to_thread(cluster.move_slot, slot, guest)
            await spend(store, call(asked))
            assert evals(guest) > 0
            assert await left(store, asked) == 8

            await asyncio.to_thread(cluster.move_slot, slot, home)
            await spend(store, call(asked))
            await asyncio.to_thread(guest.stop)
            assert await left(store, asked) == 7


def evals(server: RedisServer) -> int:
    stats = server.cli("INFO", "commandstats")
    return sum(int(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"]) for name in ("eval", "evalsha"))


async def test_keys_are_found_and_forgotten_wherever_they_are(cluster: RedisCluster) -> None:
    asked = [step(f"user{number}") for number in range(20)]
    async with connected(cluster) as store:
        await spend(store, *[call(one) for one in asked])
        keys = [one.key for one in asked]
        assert await store.present([*keys, b"rl:{nobody}:gcra:60"]) == keys
        assert sorted([key async for some in store.scan(b"rl:{user*") for key in some]) == sorted(keys)
        assert await store.forget(keys[:5]) == keys[:5]
        assert await store.present(keys) == keys[5:]


async def test_a_server_that_is_no_cluster_is_told_apart(any_redis: RedisServer) -> None:
    servers = RedisServers("cluster", (RedisAddress("127.0.0.1", any_redis.port),))
    store = ShardedStore(Cluster(servers, Terms()))
    with pytest.raises(StoreUnavailable, match="not a node of a cluster"):
        await store.start()
    await store.close()


async def test_a_node_of_a_cluster_that_is_taken_for_the_only_server_says_what_to_set(cluster: RedisCluster) -> None:
    told = set()
    for node in cluster.nodes:
        servers = RedisServers("single", (RedisAddress("127.0.0.1", node.port),))
        store = RedisStore(OneServer(servers, Terms()))
        try:
            await store.start()
            answers = await store.spend([store.prepare(call(step(f"user{number}"))) for number in range(20)])
            told |= {str(answer) for answer in answers if isinstance(answer, StoreError)}
        except StoreUnavailable as exc:
            told.add(str(exc))
        await store.close()

    assert all("set REDIS_TYPE=CLUSTER" in sentence or "CROSSSLOT" in sentence for sentence in told), told
    assert len(told) >= 2
