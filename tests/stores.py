"""Every store behind one face with a clock that tests turn by hand: what conformance and property tests run on."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, NamedTuple, TypeVar

from ratelimit_rls.core.decide import decide
from ratelimit_rls.core.model import Algorithm, Answer, Charge, Limit, Outline, Plan, Slot, Step, Unit, Watcher
from ratelimit_rls.core.refund import refund
from ratelimit_rls.settings.redis_address import RedisAddress, RedisServers
from ratelimit_rls.store.base import Prepared, Store
from ratelimit_rls.store.embedded import EmbeddedStore
from ratelimit_rls.store.redis.new import InRedis
from ratelimit_rls.store.redis.new import redis_store as new_redis_store
from ratelimit_rls.store.redis.node import Terms
from tests.redis_servers import RedisCluster
from tests.servers import RedisServer

T = TypeVar("T")

START_US = 1_786_000_000_000_000
"""A moment in 2026 at which a second and a minute begin, but no hour."""

EMBEDDED = "embedded"
CLUSTER = "cluster"
PER_SECOND = "per-second"
STORE_IDS = (EMBEDDED, "redis-6.2", "valkey-9", "redis-on-path", CLUSTER, PER_SECOND)


class Asked(NamedTuple):
    """One counter, and what is asked of it."""

    key: bytes
    step: Step


class StoreUnderTest:
    """Calls go in one by one or as batches; the moment is `now_us`."""

    def __init__(self, store: Store, runner: asyncio.Runner, clock: list[int]) -> None:
        self._store = store
        self._runner = runner
        self._clock = clock

    @property
    def now_us(self) -> int:
        return self._clock[0]

    @now_us.setter
    def now_us(self, us: int) -> None:
        self._clock[0] = us

    @property
    def store(self) -> Store:
        """The store itself, for what `run` runs."""
        return self._store

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """In the loop the store lives in."""
        return self._runner.run(work)

    def spend(self, *plans: Plan, patience_us: int | None = None) -> list[Answer]:
        """The plans as one batch, of callers that can wait so long."""
        asked = [self._store.prepare(plan) for plan in plans]
        if patience_us is not None:
            asked = [one.within(patience_us) for one in asked]
        return self.answered(*asked)

    def give_back(self, plan: Plan, answer: Answer) -> None:
        """What an admitted plan took."""
        owed = refund(decide(plan.outline, answer))
        if owed is not None:
            self.answered(self._store.opposite(self._store.prepare(plan), owed))

    def answered(self, *asked: Prepared) -> list[Answer]:
        """What was prepared already, as one batch."""
        answers = self._runner.run(self._store.spend(asked))
        for answer in answers:
            assert isinstance(answer, Answer), answer
        return answers  # type: ignore[return-value]

    def ask(self, *asked: Asked) -> Answer:
        """One call with these limits."""
        return self.spend(call(*asked))[0]


@contextmanager
def embedded_store(budget_bytes: int = 2**26) -> Iterator[StoreUnderTest]:
    clock = [START_US]
    with asyncio.Runner() as runner:
        yield StoreUnderTest(EmbeddedStore(budget_bytes, clock=lambda: clock[0]), runner, clock)


def redis_store(server: RedisServer) -> AbstractContextManager[StoreUnderTest]:
    return store_on(_at("single", server))


def cluster_store(cluster: RedisCluster) -> AbstractContextManager[StoreUnderTest]:
    return store_on(_at("cluster", *cluster.nodes))


def split_store(server: RedisServer, per_second: RedisServer) -> AbstractContextManager[StoreUnderTest]:
    """With a second Redis for limits per second."""
    return store_on(_at("single", server), _at("single", per_second))


def _at(kind: Literal["single", "cluster"], *servers: RedisServer) -> RedisServers:
    return RedisServers(kind, tuple(RedisAddress("127.0.0.1", server.port) for server in servers))


@contextmanager
def store_on(servers: RedisServers, per_second: RedisServers | None = None) -> Iterator[StoreUnderTest]:
    clock = [START_US]
    with asyncio.Runner() as runner:
        terms = Terms(timeout_s=10, clock=lambda: clock[0])
        store = runner.run(_started(servers, per_second, terms))
        try:
            yield StoreUnderTest(store, runner, clock)
        finally:
            runner.run(store.close())


async def _started(servers: RedisServers, per_second: RedisServers | None, terms: Terms) -> InRedis:
    store = new_redis_store(servers, per_second, terms)
    await store.start()
    return store


def step(
    key: str = "k",
    limit: int = 3,
    *,
    unit: Unit = Unit.MINUTE,
    algorithm: Algorithm = Algorithm.FIXED_WINDOW,
    burst: int | None = None,
    cost: int = 1,
    charge: Charge = Charge.ADMITTED,
    shadow: bool = False,
    quota: bool = False,
    max_delay_us: int = 0,
) -> Asked:
    full = (limit if burst is None else burst) if algorithm.has_burst else 0
    name = f"rl:{{{key}}}:{algorithm.value}:{unit.seconds}".encode()
    return Asked(name, Step(Limit(limit, unit, algorithm, full), cost, charge, shadow, quota, max_delay_us))


def call(*asked: Asked, quota_passes: bool = False, shadow_mode: bool = False) -> Plan:
    slots = tuple(Slot(None, (one.step,), 1) for one in asked)
    outline = Outline("domain", True, tuple(one.step for one in asked), slots, quota_passes, shadow_mode)
    return Plan(outline, tuple(one.key for one in asked))


class Watched(NamedTuple):
    """One descriptor: its limits, and what watches over them."""

    asked: tuple[Asked, ...]
    watchers: tuple[Watcher, ...] = ()


def watched_call(*descriptors: Watched) -> Plan:
    """A descriptor's watchers keep their states under the name of its first key."""
    slots = tuple(Slot(None, tuple(one.step for one in asked), 1, watchers=watchers) for asked, watchers in descriptors)
    steps = tuple(step for slot in slots for step in slot.steps)
    keys: list[bytes] = []
    for asked, watchers in descriptors:
        keys += [one.key for one in asked]
        keys += [b"%s:%s" % (asked[0].key, type(watcher).__name__.encode()) for watcher in watchers]
    return Plan(Outline("domain", True, steps, slots, can_wait=True), tuple(keys))
