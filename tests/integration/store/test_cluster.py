"""The store on a real Redis Cluster: slots of counters, calls over several nodes, and moving slots."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from ratelimit_rls.cli import main
from ratelimit_rls.core.model import Algorithm, Charge, Descriptor, Entry, Plan, Request, StoreResult
from ratelimit_rls.core.plan import Planner, Policy
from ratelimit_rls.core.storage_keys import Location, key_slot
from ratelimit_rls.errors import StoreError, StoreUnavailable
from ratelimit_rls.rules.compile import compile_documents
from ratelimit_rls.settings.redis_address import RedisAddress, RedisServers
from ratelimit_rls.store.redis.cluster import Cluster
from ratelimit_rls.store.redis.deployment import SingleNode
from ratelimit_rls.store.redis.script_node import RedisOptions
from ratelimit_rls.store.redis.sharded_store import ShardedStore
from ratelimit_rls.store.redis.store import RedisStore
from tests.support.redis_servers import RedisCluster
from tests.support.servers import RedisServer, redis_binaries
from tests.support.stores import KeyedOp, call, long_step

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

ALGORITHMS = pytest.mark.parametrize("algorithm", list(Algorithm), ids=lambda algorithm: algorithm.value)


@pytest.fixture(scope="module", params=["redis-6.2", "redis-on-path", "valkey-9"])
def _cluster(request: pytest.FixtureRequest) -> Iterator[RedisCluster]:
    """Return a cluster without functions, and two with them; the script may use several slots in different ways."""
    binary = redis_binaries().get(request.param)
    if binary is None:
        pytest.skip(f"{request.param} is not on this machine")
    with RedisCluster(binary) as cluster:
        yield cluster


@pytest.fixture
def cluster(_cluster: RedisCluster) -> RedisCluster:
    for node in _cluster.nodes:
        node.flush()
    return _cluster


@asynccontextmanager
async def connected(cluster: RedisCluster, **options: float) -> AsyncIterator[ShardedStore]:
    seeds = tuple(RedisAddress("127.0.0.1", node.port) for node in cluster.nodes)
    store = ShardedStore(Cluster(RedisServers("cluster", seeds), RedisOptions(**options)))  # type: ignore[arg-type]
    await store.start()
    try:
        yield store
    finally:
        await store.close()


async def spend(store: ShardedStore, *plans: Plan) -> list[StoreResult]:
    answers = await store.spend([store.prepare(plan) for plan in plans])
    for answer in answers:
        assert isinstance(answer, StoreResult), answer
    return answers  # type: ignore[return-value]


async def left(store: ShardedStore, limits: KeyedOp) -> int:
    limit = limits.step.limit
    look = KeyedOp(limits.key, long_step(limit=limit.requests_per_unit, algorithm=limit.algorithm, cost=0).step)
    return (await spend(store, call(look)))[0].readings[0].left


def on_each_node(cluster: RedisCluster, limits: list[int], **more: object) -> list[KeyedOp]:
    """Return one limit on each node, in the order of the nodes."""
    found: dict[int, KeyedOp] = {}
    for number in range(1000):
        one = long_step(f"k{number}", limits[len(found)] if len(found) < len(limits) else 1, **more)  # type: ignore[arg-type]
        node = cluster.node_of(one.key)
        found.setdefault(node.port, one)
        if len(found) == len(limits):
            return list(found.values())
    raise AssertionError("some node has no slots")


def states(cluster: RedisCluster) -> dict[bytes, bytes | list[bytes] | None]:
    """Return all counters of all nodes."""
    found: dict[bytes, bytes | list[bytes] | None] = {}
    for node in cluster.running:
        for key in node.cli("KEYS", "*"):
            is_list = node.cli("TYPE", key) in (b"list", "list")
            found[key] = node.cli("LRANGE", key, 0, -1) if is_list else node.cli("GET", key)
    return found


def test_key_slots_are_computed_as_in_redis() -> None:
    for key in (b"foo", b"rl:{edge/user=alice}:gcra:60", b"rl:{edge}/user=a:gcra:60", b"{}x", b"a{b", b""):
        assert key_slot(key) == RedisCluster.slot_of(key), key
    assert key_slot(b"123456789") == 0x31C3 % 16384  # the check value of CRC-16/XMODEM


@ALGORITHMS
async def test_a_denial_on_one_of_three_nodes_leaves_all_counters_unchanged(
    cluster: RedisCluster, algorithm: Algorithm
) -> None:
    limits = on_each_node(cluster, [10, 10, 2], algorithm=algorithm)
    async with connected(cluster) as store:
        await spend(store, *[call(*limits)] * 2)
        before = [await left(store, one) for one in limits]
        (denied,) = await spend(store, call(*limits))
        after = [await left(store, one) for one in limits]

    print(f"{algorithm.value}: left {before} before the denied call, {after} after it")
    assert denied.denied
    assert before == [8, 8, 0]
    # A bucket may have gained a token meanwhile, but never has one less.
    assert all(now >= then for then, now in zip(before, after, strict=True))
    assert all(now <= then + 1 for then, now in zip(before, after, strict=True))
    assert [reading.left for reading in denied.readings][:2] == before[:2]


TENANTS = b"""
domain: edge
shard_by: {key: org}
charge: admitted
descriptors:
  - key: org
    rate_limit: {unit: day, requests_per_unit: 3}
    descriptors:
      - key: user
        rate_limit: {unit: day, requests_per_unit: 10}
  - key: plan
    descriptors:
      - key: org
        rate_limit: {unit: day, requests_per_unit: 10}
"""


def script_runs(cluster: RedisCluster) -> int:
    """Return how often the script ran on all nodes."""
    stats = [node.cli("INFO", "commandstats") for node in cluster.running]
    return sum(one.get(f"cmdstat_{name}", {}).get("calls", 0) for one in stats for name in ("fcall", "evalsha", "eval"))


@pytest.mark.parametrize("org", ["acme", "initech", "a:b{c}", "x" * 600])
async def test_a_call_sharded_by_tenant_is_one_run_without_refunds(cluster: RedisCluster, org: str) -> None:
    planner = Planner(compile_documents({"rules.yaml": TENANTS}).tree, Policy())
    shared, plan, user = Entry("org", org), Entry("plan", "free"), Entry("user", "alice")
    descriptors = [(shared,), (shared, user), (plan, shared)]
    tenant = planner.plan(Request("edge", tuple(map(Descriptor, descriptors))))
    async with connected(cluster) as store:
        for node in cluster.running:
            node.cli("CONFIG", "RESETSTAT")
        results = [(await spend(store, tenant))[0] for _ in range(4)]
        runs = script_runs(cluster)
        alone = [planner.plan(Request("edge", (Descriptor(entries),))) for entries in descriptors]
        places = {location for one in alone for location in store.locations(one)}

    assert [result.denied for result in results] == [False, False, False, True]
    assert runs == 4
    assert [reading.left for reading in results[-1].readings] == [0, 7, 7]
    (place,) = places
    assert place == Location(key_slot(tenant.keys[0]), cluster.node_of(tenant.keys[0]).address)


def test_commands_show_slot_and_node(
    cluster: RedisCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("REDIS_URL", "REDIS_TYPE", "CACHE_KEY_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    rules = tmp_path / "rules.yaml"
    rules.write_bytes(TENANTS.replace(b"    rate_limit: {unit: day, requests_per_unit: 3}", b"    value: acme", 1))
    tag = b"p:rl:{edge/org=acme}"
    place = f"slot {key_slot(tag)} on {cluster.node_of(tag).address}"
    redis = ["--redis-url", cluster.url, "--redis-type", "CLUSTER", "--cache-key-prefix", "p:"]
    descriptor = ["--domain", "edge", "--descriptor", "org=acme,user=a"]

    def run(*arguments: str) -> str:
        assert main([arguments[0], str(rules), *arguments[1:]]) == 0
        return capsys.readouterr().out

    assert f"counter p:rl:{{edge/org=acme}}//user=a:fixed_window:86400  {place}\n" in run(
        "explain", *descriptor, *redis
    )
    assert f"  {place}\n" in run("peek", *descriptor, *redis)
    assert run("show", *redis).splitlines()[1].endswith(f"org=acme  {place}")
    location = {"slot": key_slot(tag), "node": cluster.node_of(tag).address}
    (peeked,) = json.loads(run("peek", *descriptor, *redis, "--format", "json"))
    assert peeked.items() >= location.items()
    (explained,) = json.loads(run("explain", *descriptor, *redis, "--format", "json"))["descriptors"]
    assert list(explained["locations"].values()) == [location]


async def test_concurrent_calls_use_a_limit_exactly(cluster: RedisCluster) -> None:
    limits = on_each_node(cluster, [50, 300, 300])
    async with connected(cluster) as one, connected(cluster) as other:

        async def ask(store: ShardedStore) -> int:
            answers = await spend(store, *[call(*limits)] * 5)
            return sum(not answer.denied for answer in answers)

        admitted = sum(await asyncio.gather(*(ask(store) for store in (one, other) for _ in range(40))))
        counted = [300 - await left(one, limit) for limit in limits[1:]]

    print(f"400 calls over three nodes at a limit of 50: {admitted} admitted, {counted} counted on the others")
    assert admitted == 50
    assert counted == [50, 50]


async def test_charge_always_stays_charged_when_another_node_denies(cluster: RedisCluster) -> None:
    first, last = on_each_node(cluster, [10, 1, 1], charge=Charge.ALWAYS)[:2]
    async with connected(cluster) as store:
        await spend(store, *[call(first, last)] * 3)
        assert await left(store, first) == 7


async def test_an_unreachable_node_fails_only_the_calls_that_need_it() -> None:
    with RedisCluster() as cluster:
        first, second, third = on_each_node(cluster, [10, 10, 10])
        async with connected(cluster, timeout_s=0.3) as store:
            await spend(store, call(first, second, third))
            cluster.kill(cluster.node_of(third.key))
            results = await store.spend([store.prepare(call(one)) for one in (first, third, second)])

            assert isinstance(results[1], StoreError)
            assert [isinstance(results[0], StoreResult), isinstance(results[2], StoreResult)] == [True, True]


def runs_of(node: RedisServer) -> int:
    stats = node.cli("INFO", "commandstats")
    return sum(int(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"]) for name in ("fcall", "evalsha", "eval"))


async def test_a_batch_is_one_run_on_each_node(cluster: RedisCluster) -> None:
    limits = [long_step(f"user{number}", 10**6) for number in range(90)]
    logs = [long_step(f"log{number}", 10, algorithm=Algorithm.SLIDING_LOG) for number in range(30)]
    assert len({key_slot(one.key) for one in limits}) > 80
    async with connected(cluster) as store:
        await spend(store, call(limits[0]))
        before = [runs_of(node) for node in cluster.nodes]
        for batch in (limits, [*limits, *logs]):
            answers = await spend(store, *map(call, batch))
            assert all(isinstance(answer, StoreResult) for answer in answers)
        assert [runs_of(node) - earlier for node, earlier in zip(cluster.nodes, before, strict=True)] == [2, 2, 2]
        assert {await left(store, one) for one in limits[1:]} == {10**6 - 2}


async def test_moving_slots_neither_lose_nor_double_hits(cluster: RedisCluster) -> None:
    """Move whole slots one after the other and back, some of them half way for a while: ASK, TRYAGAIN and MOVED."""
    limits = [long_step(f"user{number}", 10**6) for number in range(40)]
    sent = 0
    async with connected(cluster, timeout_s=5) as store:
        over = asyncio.Event()

        async def hammer() -> None:
            nonlocal sent
            while not over.is_set():
                await spend(store, *[call(one) for one in limits])
                sent += 1

        load = [asyncio.create_task(hammer()) for _ in range(3)]
        moved = 0
        for one in limits[:12]:
            slot = key_slot(one.key)
            there = next(node for node in cluster.nodes if node.port != cluster.owner(slot).port)
            await asyncio.to_thread(cluster.begin_move, slot, there)
            await asyncio.sleep(0.01)
            await asyncio.to_thread(cluster.move_keys, slot, there)
            await asyncio.sleep(0.01)
            await asyncio.to_thread(cluster.finish_move, slot, there)
            moved += 1
        over.set()
        await asyncio.gather(*load)
        counted = {10**6 - await left(store, one) for one in limits}

    print(f"{moved} slots moved under {sent * len(limits)} calls, none lost or doubled")
    assert counted == {sent}


async def test_a_slot_that_is_half_moved_neither_loses_nor_doubles_hits(cluster: RedisCluster) -> None:
    """Some keys of a slot are on either node, and calls need both, beside others on all nodes: ASK and TRYAGAIN.

    The slot maps of the clients are outdated from then on: one has not seen the move, the other one has seen it begin.
    """
    tenant = [long_step(f"{number}", 10**6) for number in range(6)]
    logs = [long_step(f"log{number}", 10**4, algorithm=Algorithm.SLIDING_LOG) for number in range(2)]
    shared = [one._replace(key=b"{globex}" + one.key) for one in (*tenant, *logs)]
    others = [long_step(f"user{number}", 10**6) for number in range(40)]
    slot = key_slot(shared[0].key)
    assert {key_slot(one.key) for one in shared} == {slot}
    neighbours = {key_slot(one.key) for one in others if cluster.node_of(one.key) is cluster.owner(slot)}
    assert min(neighbours) < slot < max(neighbours), "a run charges some of them before it comes to this slot"
    there = next(node for node in cluster.nodes if node.port != cluster.owner(slot).port)
    hits: Counter[bytes] = Counter()
    unknown: Counter[bytes] = Counter()

    async def ask(store: ShardedStore) -> None:
        calls = [call(*pair) for pair in zip(shared[:4], shared[4:], strict=True)] + [call(one) for one in others]
        for plan, answer in zip(calls, await store.spend([store.prepare(plan) for plan in calls]), strict=True):
            (hits if isinstance(answer, StoreResult) else unknown).update(plan.keys)

    async with connected(cluster, timeout_s=5) as late, connected(cluster, timeout_s=5) as store:
        await ask(late)
        over = asyncio.Event()

        async def hammer() -> None:
            while not over.is_set():
                await ask(store)

        load = [asyncio.create_task(hammer()) for _ in range(3)]
        await asyncio.to_thread(cluster.begin_move, slot, there)
        for _ in range(4):
            assert await asyncio.to_thread(cluster.move_keys, slot, there, 2) == 2
            await asyncio.sleep(0.02)
        await asyncio.to_thread(cluster.finish_move, slot, there)
        await asyncio.sleep(0.02)
        over.set()
        await asyncio.gather(*load)
        await ask(late)
        counted = {one.key: one.step.limit.requests_per_unit - await left(store, one) for one in (*shared, *others)}

    print(f"{sum(hits.values())} hits, {sum(unknown.values())} of calls that failed while their keys were on two nodes")
    assert counted == hits


async def test_joining_nodes_are_used_and_leaving_nodes_are_disconnected() -> None:
    with RedisCluster() as cluster:
        limits = long_step("alice", 10)
        slot = key_slot(limits.key)
        async with connected(cluster) as store:
            await spend(store, call(limits))
            home = cluster.owner(slot)
            guest = await asyncio.to_thread(cluster.add_node)
            await asyncio.to_thread(cluster.move_slot, slot, guest)
            await spend(store, call(limits))
            assert guest.script_runs() > 0
            assert await left(store, limits) == 8

            await asyncio.to_thread(cluster.move_slot, slot, home)
            await spend(store, call(limits))
            await asyncio.to_thread(guest.stop)
            assert await left(store, limits) == 7


async def test_keys_are_found_and_deleted_on_every_node(cluster: RedisCluster) -> None:
    limits = [long_step(f"user{number}") for number in range(20)]
    async with connected(cluster) as store:
        await spend(store, *[call(one) for one in limits])
        keys = [one.key for one in limits]
        assert await store.present([*keys, b"rl:{nobody}:gcra:60"]) == keys
        assert sorted([key async for some in store.scan(b"rl:{user*") for key in some]) == sorted(keys)
        assert await store.forget(keys[:5]) == keys[:5]
        assert await store.present(keys) == keys[5:]


async def test_a_single_server_is_rejected_as_a_cluster(any_redis: RedisServer) -> None:
    servers = RedisServers("cluster", (RedisAddress("127.0.0.1", any_redis.port),))
    store = ShardedStore(Cluster(servers, RedisOptions()))
    with pytest.raises(StoreUnavailable, match="not a node of a cluster"):
        await store.start()
    await store.close()


async def test_a_cluster_node_used_as_single_server_hints_at_redis_type(cluster: RedisCluster) -> None:
    results = set()
    for node in cluster.nodes:
        servers = RedisServers("single", (RedisAddress("127.0.0.1", node.port),))
        store = RedisStore(SingleNode(servers, RedisOptions()))
        try:
            await store.start()
            answers = await store.spend([store.prepare(call(long_step(f"user{number}"))) for number in range(20)])
            results |= {str(answer) for answer in answers if isinstance(answer, StoreError)}
        except StoreUnavailable as exc:
            results.add(str(exc))
        await store.close()

    assert all("set REDIS_TYPE=CLUSTER" in sentence or "CROSSSLOT" in sentence for sentence in results), results
    assert len(results) >= 2
