"""Uniform access to every store with a manual clock, for conformance and property tests."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

from pydantic import SecretStr

from ratelimit_rls.core.decision import decision_of
from ratelimit_rls.core.model import (
    Algorithm,
    Charge,
    DescriptorPlan,
    Limit,
    Plan,
    PlanTemplate,
    Step,
    StoreResult,
    Unit,
    Watcher,
)
from ratelimit_rls.core.refund import refund
from ratelimit_rls.settings.redis_address import RedisAddress, RedisServers
from ratelimit_rls.store.base import PreparedPlan, Store
from ratelimit_rls.store.embedded import EmbeddedStore
from ratelimit_rls.store.redis.factory import AnyRedisStore
from ratelimit_rls.store.redis.factory import redis_store as new_redis_store
from ratelimit_rls.store.redis.script_node import RedisOptions
from tests.support.redis_servers import RedisCluster
from tests.support.servers import RedisServer

T = TypeVar("T")

START_US = 1_786_000_000_000_000
"""A time in 2026 at which a second and a minute begin, but no hour."""

EMBEDDED = "embedded"
CLUSTER = "cluster"
CLUSTER_WITH_FUNCTIONS = "cluster-valkey-9"
PER_SECOND = "per-second"
WITHOUT_FUNCTIONS = "valkey-9-without-functions"
SERVERS = ("redis-6.2", "valkey-9", "redis-on-path", WITHOUT_FUNCTIONS)
STORE_IDS = (EMBEDDED, *SERVERS, CLUSTER, CLUSTER_WITH_FUNCTIONS, PER_SECOND)


class KeyedOp(NamedTuple):
    """One counter key with its operation."""

    key: bytes
    step: Step


class StoreUnderTest:
    """A store with a manual clock, `now_us`; calls are made one by one or in batches."""

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
        """The store itself, for use with `run`."""
        return self._store

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the event loop of the store."""
        return self._runner.run(work)

    def spend(self, *plans: Plan, max_wait_us: int | None = None) -> list[StoreResult]:
        """Spend the plans as one batch; `patience_us` is how long the callers can wait."""
        ops = [self._store.prepare(plan) for plan in plans]
        if max_wait_us is not None:
            ops = [one.with_max_wait(max_wait_us) for one in ops]
        return self.answered(*ops)

    def give_back(self, plan: Plan, result: StoreResult) -> None:
        """Refund what an admitted plan spent."""
        refunded = refund(decision_of(plan.template, result))
        if refunded is not None:
            self.answered(self._store.refund_of(self._store.prepare(plan), refunded))

    def answered(self, *ops: PreparedPlan) -> list[StoreResult]:
        """Spend prepared plans as one batch."""
        results = self._runner.run(self._store.spend(ops))
        for result in results:
            assert isinstance(result, StoreResult), result
        return results  # type: ignore[return-value]

    def ask(self, *ops: KeyedOp) -> StoreResult:
        """Make one call with these limits."""
        return self.spend(call(*ops))[0]


@contextmanager
def embedded_store(budget_bytes: int = 2**26) -> Iterator[StoreUnderTest]:
    clock = [START_US]
    with asyncio.Runner() as runner:
        yield StoreUnderTest(EmbeddedStore(budget_bytes, clock=lambda: clock[0]), runner, clock)


def redis_store(server: RedisServer) -> AbstractContextManager[StoreUnderTest]:
    return store_on(_at("single", server))


def store_without_functions(server: RedisServer) -> AbstractContextManager[StoreUnderTest]:
    """Return a store whose user may not call functions, so the script runs with EVALSHA."""
    server.cli("ACL", "SETUSER", "limited", "reset", "on", ">secret", "~*", "&*", "+@all", "-fcall")
    address = RedisAddress("127.0.0.1", server.port, username="limited", password=SecretStr("secret"))
    return store_on(RedisServers("single", (address,)))


def cluster_store(cluster: RedisCluster) -> AbstractContextManager[StoreUnderTest]:
    return store_on(_at("cluster", *cluster.nodes))


def split_store(server: RedisServer, per_second: RedisServer) -> AbstractContextManager[StoreUnderTest]:
    """Return a store with a second Redis for limits per second."""
    return store_on(_at("single", server), _at("single", per_second))


def _at(kind: Literal["single", "cluster"], *servers: RedisServer) -> RedisServers:
    return RedisServers(kind, tuple(RedisAddress("127.0.0.1", server.port) for server in servers))


@contextmanager
def store_on(servers: RedisServers, per_second: RedisServers | None = None) -> Iterator[StoreUnderTest]:
    clock = [START_US]
    with asyncio.Runner() as runner:
        terms = RedisOptions(timeout_s=10, clock=lambda: clock[0])
        store = runner.run(_started(servers, per_second, terms))
        try:
            yield StoreUnderTest(store, runner, clock)
        finally:
            runner.run(store.close())


async def _started(servers: RedisServers, per_second: RedisServers | None, terms: RedisOptions) -> AnyRedisStore:
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
) -> KeyedOp:
    full = (limit if burst is None else burst) if algorithm.has_burst else 0
    name = f"rl:{{{key}}}:{algorithm.value}:{unit.seconds}".encode()
    return KeyedOp(name, Step(Limit(limit, unit, algorithm, full), cost, charge, shadow, quota, max_delay_us))


long_step = partial(step, unit=Unit.YEAR)
"""A `step` whose window does not end during a test on the real clock."""


def call(*ops: KeyedOp, quota_passes: bool = False, shadow_mode: bool = False) -> Plan:
    descriptor_plans = tuple(DescriptorPlan(None, (one.step,), 1) for one in ops)
    plan_template = PlanTemplate(
        "domain", True, tuple(one.step for one in ops), descriptor_plans, quota_passes, shadow_mode
    )
    return Plan(plan_template, tuple(one.key for one in ops))


class MonitoredDescriptor(NamedTuple):
    """One descriptor: its limits and their monitors (penalty, warning)."""

    ops: tuple[KeyedOp, ...]
    watchers: tuple[Watcher, ...] = ()


def monitored_call(*descriptors: MonitoredDescriptor) -> Plan:
    """Return a plan; the state keys of a descriptor's monitors derive from its first key."""
    descriptor_plans = tuple(
        DescriptorPlan(None, tuple(one.step for one in ops), 1, watchers=watchers) for ops, watchers in descriptors
    )
    steps = tuple(step for descriptor_plan in descriptor_plans for step in descriptor_plan.steps)
    keys: list[bytes] = []
    for ops, watchers in descriptors:
        keys += [one.key for one in ops]
        keys += [b"%s:%s" % (ops[0].key, type(watcher).__name__.encode()) for watcher in watchers]
    return Plan(PlanTemplate("domain", True, steps, descriptor_plans, can_wait=True), tuple(keys))
