"""Leases on a virtual clock: several processes as objects on one store, and the results of their calls.

The event loop's time is virtual: when nothing is left to do it jumps to the next timer. The store uses the same clock,
and round trips to it take as long as a test says.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import pytest

from ratelimit_rls.core.decision import decision_of
from ratelimit_rls.core.model import (
    Algorithm,
    Charge,
    DescriptorPlan,
    LeasePolicy,
    Limit,
    Plan,
    PlanTemplate,
    Purpose,
    Rule,
    Step,
    StoreResult,
    Unit,
)
from ratelimit_rls.core.refund import refund
from ratelimit_rls.errors import StoreError, StoreTimeout
from ratelimit_rls.store.base import PreparedPlan
from ratelimit_rls.store.embedded import EmbeddedStore
from ratelimit_rls.store.leases import LeasingStore
from ratelimit_rls.store.leases.lease_pool import REFUND_DELAY_US
from ratelimit_rls.store.leases.leased_plan import LeasedPlan
from ratelimit_rls.store.script_codec import EncodedPlan
from tests.support.stores import START_US

LEASE_US = 100_000
SECOND_US = 1_000_000
HOUR_US = 3_600 * SECOND_US


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self._now_s = 1000.0
        select = self._selector.select  # type: ignore[attr-defined]

        def jump(timeout_s: float | None) -> Any:
            assert timeout_s is not None, "nothing will ever happen again"
            self._now_s += timeout_s
            return select(0)

        self._selector.select = jump  # type: ignore[attr-defined]

    def time(self) -> float:
        return self._now_s


class World(EmbeddedStore):
    """The shared store with a latency, which records all plans sent to it."""

    def __init__(self, trip_us: Callable[[], int] = lambda: 0) -> None:
        self._loop = asyncio.get_running_loop()
        super().__init__(clock=self.now_us)
        self._trip_us = trip_us
        self.trips = 0
        self.fails: StoreError | None = None
        self.closed = 0

    def now_us(self) -> int:
        return START_US + round((self._loop.time() - 1000) * 1e6)

    async def spend(self, batch: Sequence[PreparedPlan]) -> list[StoreResult | StoreError]:
        self.trips += 1
        await sleep_us(self._trip_us())
        answers = self.spend_now(batch) if self.fails is None else [self.fails] * len(batch)  # type: ignore[arg-type]
        await sleep_us(self._trip_us())
        return answers  # type: ignore[return-value]

    async def close(self) -> None:
        self.closed += 1

    def left(self, plan: Plan) -> list[int]:
        """Return what is left of each limit, without counting."""
        looks = Plan(
            template_of(
                *[
                    [step_of(one.limit, 0) for one in descriptor_plan.steps]
                    for descriptor_plan in plan.template.descriptor_plans
                ]
            ),
            plan.keys,
        )
        (answer,) = self.spend_now([self.prepare(looks)])
        assert isinstance(answer, StoreResult)
        return [reading.left for reading in answer.readings]


async def sleep_us(us: int) -> None:
    if us:
        await asyncio.sleep(us / 1e6)


def step_of(limit: Limit, cost: int = 1) -> Step:
    return Step(limit, cost, Charge.ADMITTED)


def template_of(*descriptors: Sequence[Step], hot: Sequence[bool] = (), **more: Any) -> PlanTemplate:
    descriptor_plans = []
    for number, steps in enumerate(descriptors):
        limits = tuple(step.limit for step in steps)
        lease = LeasePolicy(LEASE_US) if number < len(hot) and hot[number] else None
        descriptor_plans.append(
            DescriptorPlan(Rule("path", limits, charge=Charge.ADMITTED, hot=lease), tuple(steps), steps[0].cost)
        )
    return PlanTemplate(
        "domain", True, tuple(step for steps in descriptors for step in steps), tuple(descriptor_plans), **more
    )


def limit_of(
    requests: int, unit: Unit = Unit.SECOND, algorithm: Algorithm = Algorithm.FIXED_WINDOW, burst: int | None = None
) -> Limit:
    return Limit(requests, unit, algorithm, (requests if burst is None else burst) if algorithm.has_burst else 0)


def hot_call(limit: Limit, cost: int = 1, key: bytes = b"hot") -> Plan:
    return Plan(template_of([step_of(limit, cost)], hot=[True]), (key,))


def virtually(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test in an event loop with virtual time."""

    @wraps(test)
    def run(**arguments: Any) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(**arguments))  # type: ignore[arg-type]

    return run


def leases_on(world: World, **more: Any) -> LeasingStore:
    return LeasingStore(world, clock=asyncio.get_running_loop().time, **more)


class Admitted(NamedTuple):
    at_us: int  # on the store's clock
    hits: int


async def ask(world: World, leases: LeasingStore, *prepared: PreparedPlan) -> tuple[list[StoreResult], list[Admitted]]:
    """Spend one batch; return the results, and which calls were admitted when.

    A call served from a lease was admitted when it arrived; for others the store reports the time.
    """
    arrived_us = world.now_us()
    answers = await leases.spend(prepared)
    at_once = world.now_us() == arrived_us
    admitted = []
    for one, answer in zip(prepared, answers, strict=True):
        assert isinstance(answer, StoreResult), answer
        assert len(answer.readings) == len(one.keys)
        if not answer.denied:
            hits = one.layout.descriptor_plans[0].hits
            admitted.append(Admitted(arrived_us if at_once else answer.now_us, hits))
    return answers, admitted  # type: ignore[return-value]


async def warm(
    world: World, leases: LeasingStore, plan: Plan, times: int = 10, pause_us: int = 5_000
) -> list[Admitted]:
    """Call so often that the counter is hot."""
    admitted: list[Admitted] = []
    prepared = leases.prepare(plan)
    for _ in range(times):
        admitted += (await ask(world, leases, prepared))[1]
        await sleep_us(pause_us)
    return admitted


# -- which plans are leased --------------------------------------------------------------------------------------------

COLD = step_of(limit_of(100))


@pytest.mark.parametrize(
    "plan",
    {
        "no hot rule": Plan(template_of([COLD]), (b"k",)),
        "the global shadow mode": Plan(template_of([COLD], hot=[True], shadow_mode=True), (b"k",)),
        "a quota that passes": Plan(template_of([COLD], hot=[True], quota_passes=True), (b"k",)),
        "a quota": Plan(template_of([Step(COLD.limit, 1, Charge.ADMITTED, quota_mode=True)], hot=[True]), (b"k",)),
        "a look of Kuadrant's": Plan(template_of([COLD], hot=[True], purpose=Purpose.LOOK), (b"k",)),
        "a report": Plan(template_of([COLD], hot=[True], purpose=Purpose.REPORT), (b"k",)),
        "a look": Plan(template_of([step_of(limit_of(100), 0)], hot=[True]), (b"k",)),
        "a refund": Plan(template_of([step_of(limit_of(100), -1)], hot=[True]), (b"k",)),
        "more than the capacity": Plan(template_of([step_of(limit_of(100), 101)], hot=[True]), (b"k",)),
        "the same twice": Plan(template_of([COLD], [COLD], hot=[True, True]), (b"k", b"k")),
    }.items(),
    ids=lambda named: named[0].replace(" ", "-"),
)
@virtually
async def test_plans_that_cannot_be_leased_are_passed_through(plan: tuple[str, Plan]) -> None:
    assert isinstance(leases_on(World()).prepare(plan[1]), EncodedPlan)


@virtually
async def test_calls_with_a_request_id_or_maximum_wait_go_to_the_store() -> None:
    leased = leases_on(World()).prepare(hot_call(limit_of(100)))
    assert isinstance(leased, LeasedPlan)
    for other in (leased.with_max_wait(5), leased.idempotent(b"id"), leased.take_up_to(3), leased.refund(3, 7)):
        assert isinstance(other, EncodedPlan)
    assert leased == leased_again(leased)


def leased_again(plan: LeasedPlan) -> PreparedPlan:
    return LeasedPlan(plan.whole, plan.hot, lambda bits: None)


@virtually
async def test_a_rarely_used_counter_is_not_leased() -> None:
    world = World()
    leases = leases_on(world)
    plan = hot_call(limit_of(100, Unit.HOUR))
    await warm(world, leases, plan, times=30, pause_us=LEASE_US // 2)
    assert world.left(plan) == [70]
    assert world.trips == 30


# -- taking and refunding hits -----------------------------------------------------------------------------------------


@virtually
async def test_a_hot_counter_is_served_from_its_lease_with_estimated_state() -> None:
    world = World(lambda: 100)
    leases = leases_on(world)
    plan = hot_call(limit_of(1_000, Unit.HOUR))
    admitted = await warm(world, leases, plan, times=100, pause_us=2_000)
    assert len(admitted) == 100
    assert world.trips < 12
    (answer,), _ = await ask(world, leases, leases.prepare(plan))
    (reading,) = answer.readings
    assert reading.left == 1_000 - 101
    assert reading.retry_us == 0
    ends_in_us = HOUR_US - world.now_us() % HOUR_US
    assert ends_in_us - 200 <= reading.reset_us <= ends_in_us


@virtually
async def test_unused_hits_are_refunded_when_the_lease_ends() -> None:
    world = World(lambda: 100)
    leases = leases_on(world)
    plan = hot_call(limit_of(1_000, Unit.HOUR))
    admitted = await warm(world, leases, plan, times=40, pause_us=2_000)
    assert world.left(plan)[0] < 1_000 - len(admitted)
    await sleep_us(LEASE_US + REFUND_DELAY_US + 1_000)
    assert world.left(plan) == [1_000 - len(admitted)]
    assert dict(leases.gauges())["ratelimit.leases.available_hits"] == 0


@virtually
async def test_expired_hits_are_not_used_even_before_their_refund() -> None:
    world = World(lambda: 100)
    leases = leases_on(world)
    prepared = leases.prepare(hot_call(limit_of(1_000, Unit.HOUR)))
    await warm(world, leases, hot_call(limit_of(1_000, Unit.HOUR)), times=40, pause_us=2_000)
    before = world.trips
    while world.trips == before:
        await ask(world, leases, prepared)
    assert dict(leases.gauges())["ratelimit.leases.available_hits"] > 10
    await sleep_us(LEASE_US + REFUND_DELAY_US // 2)
    before = world.trips
    await ask(world, leases, prepared)
    assert world.trips == before + 1


@pytest.mark.parametrize("algorithm", [Algorithm.FIXED_WINDOW, Algorithm.SLIDING_WINDOW], ids=lambda one: one.value)
@virtually
async def test_hits_of_a_window_are_not_used_in_the_next(algorithm: Algorithm) -> None:
    """Demand stops shortly before the window ends, and resumes in the next."""
    world = World(lambda: 100)
    leases = leases_on(world)
    plan = hot_call(limit_of(400, Unit.SECOND, algorithm))
    await sleep_us(890_000)
    admitted = await warm(world, leases, plan, times=80, pause_us=900)
    assert dict(leases.gauges())["ratelimit.leases.available_hits"] > 5
    await sleep_us(SECOND_US - world.now_us() % SECOND_US + 1_000)
    for _ in range(20):
        admitted += (await ask(world, leases, *[leases.prepare(plan)] * 30))[1]
    check_limit(plan.template.steps[0].limit, sorted(admitted))
    assert len(admitted) >= (480 if algorithm is Algorithm.FIXED_WINDOW else 375)  # sliding hits stay counted


@virtually
async def test_close_refunds_all_hits_before_closing_the_store() -> None:
    world = World(lambda: 100)
    leases = leases_on(world)
    plan = hot_call(limit_of(1_000, Unit.HOUR))
    admitted = await warm(world, leases, plan, times=40, pause_us=2_000)
    running = asyncio.create_task(warm(world, leases, plan, times=1))
    await leases.close()
    assert world.closed == 1
    admitted += await running
    await sleep_us(10 * LEASE_US)
    assert world.left(plan) == [1_000 - len(admitted)]


@virtually
async def test_hits_return_to_the_lease_if_the_remainder_is_denied() -> None:
    world = World(lambda: 100)
    leases = leases_on(world)
    wide, narrow = limit_of(1_000, Unit.HOUR), limit_of(20, Unit.HOUR)
    both = Plan(template_of([step_of(narrow)], [step_of(wide)], hot=[False, True]), (b"narrow", b"wide"))
    answers = []
    prepared = leases.prepare(both)
    for _ in range(100):
        answers += await leases.spend([prepared, prepared])
        await sleep_us(1_000)
    assert [answer.denied for answer in answers] == [False] * 20 + [True] * 180  # type: ignore[union-attr]
    last = answers[-1]
    assert (last.readings[0].retry_us > 0, last.readings[1].left, last.readings[1].retry_us) == (True, 980, 0)  # type: ignore[union-attr]
    await leases.close()
    assert world.left(both) == [0, 980]


@virtually
async def test_only_the_hot_counter_of_a_call_is_served_from_its_lease() -> None:
    world = World()
    leases = leases_on(world)
    limit = limit_of(1_000, Unit.HOUR)
    for number in range(200):
        plan = Plan(template_of([step_of(limit)], [step_of(limit)], hot=[True, True]), (b"user %d" % number, b"all"))
        (answer,), _ = await ask(world, leases, leases.prepare(plan))
        assert [reading.left for reading in answer.readings] == [999, 999 - number]
        await sleep_us(1_000)
        assert world.left(plan)[0] == 999
    await leases.close()
    assert world.left(plan) == [999, 800]


@virtually
async def test_an_evicted_lease_is_refunded() -> None:
    world = World()
    leases = leases_on(world, max_leases=1)
    first, second = (hot_call(limit_of(1_000, Unit.HOUR), key=key) for key in (b"first", b"second"))
    admitted = await warm(world, leases, first, times=20, pause_us=1_000)
    assert world.left(first)[0] < 1_000 - len(admitted)
    await ask(world, leases, leases.prepare(second))
    await sleep_us(REFUND_DELAY_US)
    assert world.left(first) == [1_000 - len(admitted)]
    assert dict(leases.gauges())["ratelimit.leases.counters"] == 1


@virtually
async def test_changed_limits_get_a_new_lease() -> None:
    world = World()
    leases = leases_on(world)
    before, after = hot_call(limit_of(1_000, Unit.HOUR)), hot_call(limit_of(30, Unit.HOUR))
    assert len(await warm(world, leases, before, times=20, pause_us=1_000)) == 20
    await sleep_us(LEASE_US + REFUND_DELAY_US)
    admitted = await warm(world, leases, after, times=100, pause_us=1_000)
    assert len(admitted) == 10
    assert world.left(after) == [0]


@virtually
async def test_a_refund_of_leased_hits_goes_to_the_store() -> None:
    world = World()
    leases = leases_on(world)
    plan = hot_call(limit_of(1_000, Unit.HOUR))
    admitted = await warm(world, leases, plan, times=20, pause_us=1_000)
    prepared = leases.prepare(plan)
    (answer,), more = await ask(world, leases, prepared)
    charged = refund(decision_of(plan.template, answer))
    assert charged is not None
    await leases.spend([leases.refund_of(prepared, charged)])
    await leases.close()
    assert world.left(plan) == [1_000 - len(admitted + more) + 1]


@pytest.mark.slow
@virtually
async def test_no_hit_is_lost_or_counted_twice_with_mixed_calls() -> None:
    """The windows do not end, so that finally each counter must equal the admitted hits."""
    chance = random.Random(7)
    world = World(lambda: chance.randint(0, 2_000))
    limits = {
        b"wide": limit_of(2_000, Unit.HOUR),
        b"hot": limit_of(1_500, Unit.HOUR),
        b"narrow": limit_of(300, Unit.HOUR),
    }
    kinds = [((b"wide", True), (b"hot", True)), ((b"hot", True), (b"narrow", False)), ((b"wide", True),)]
    plans = []
    for kind in kinds:
        for cost in (1, 2):
            steps = [[step_of(limits[key], cost)] for key, _ in kind]
            plans.append(Plan(template_of(*steps, hot=[hot for _, hot in kind]), tuple(key for key, _ in kind)))
    admitted: Counter[bytes] = Counter()

    async def batch(leases: LeasingStore) -> None:
        chosen = chance.choices(plans, k=chance.randint(1, 5))
        for plan, answer in zip(chosen, await leases.spend([leases.prepare(plan) for plan in chosen]), strict=True):
            assert isinstance(answer, StoreResult)
            for key in plan.keys if not answer.denied else ():
                admitted[key] += plan.template.descriptor_plans[0].hits

    processes = [leases_on(world) for _ in range(2)]
    for _ in range(3):
        tasks = []
        for _ in range(100):
            tasks += [asyncio.create_task(batch(leases)) for leases in processes]
            await sleep_us(chance.choice([200, 1_000, 3_000]))
        await asyncio.gather(*tasks)
        await sleep_us(LEASE_US + REFUND_DELAY_US + 5_000)
        counted = {
            key: limit.requests_per_unit - world.left(hot_call(limit, key=key))[0] for key, limit in limits.items()
        }
        assert counted == admitted
    assert admitted[b"narrow"] == 300
    assert world.trips < 500


@virtually
async def test_an_empty_bucket_is_requested_periodically_and_denies_in_between() -> None:
    world = World(lambda: 100)
    leases = leases_on(world)
    plan = hot_call(limit_of(1_000, Unit.SECOND, Algorithm.TOKEN_BUCKET, burst=100))
    prepared = leases.prepare(plan)
    admitted = 0
    for _ in range(500):
        answers = await leases.spend([prepared] * 3)
        admitted += sum(not answer.denied for answer in answers)  # type: ignore[union-attr]
        await sleep_us(1_000)
    assert world.trips < 40
    assert admitted > 0.98 * (100 + 500)
    (answer,) = await leases.spend([prepared])
    while not answer.denied:  # type: ignore[union-attr]
        (answer,) = await leases.spend([prepared])
    assert answer.remembered  # type: ignore[union-attr]
    (reading,) = answer.readings  # type: ignore[union-attr]
    assert 0 < reading.retry_us <= LEASE_US // 4 + 1_000
    await sleep_us(reading.retry_us)
    assert not (await leases.spend([prepared]))[0].denied  # type: ignore[union-attr]


# -- failures ----------------------------------------------------------------------------------------------------------


@virtually
async def test_leased_hits_are_served_while_the_store_fails() -> None:
    world = World()
    leases = leases_on(world)
    plan = hot_call(limit_of(1_000, Unit.HOUR))
    await warm(world, leases, plan, times=20, pause_us=1_000)
    in_hand = dict(leases.gauges())["ratelimit.leases.available_hits"]
    world.fails = StoreTimeout("no answer")
    prepared = leases.prepare(plan)
    answers = [(await leases.spend([prepared]))[0] for _ in range(in_hand + 2)]
    assert [isinstance(answer, StoreError) for answer in answers] == [False] * in_hand + [True] * 2
    world.fails = None
    assert isinstance((await leases.spend([prepared]))[0], StoreResult)


@virtually
async def test_calls_wait_for_a_lease_request_in_flight() -> None:
    world = World(lambda: 500)
    leases = leases_on(world)
    plan = hot_call(limit_of(1_000, Unit.HOUR))
    await warm(world, leases, plan, times=30, pause_us=1_000)
    await sleep_us(LEASE_US)
    prepared, before = leases.prepare(plan), world.trips
    results = await asyncio.gather(*(leases.spend([prepared]) for _ in range(5)))
    assert [answer.denied for (answer,) in results] == [False] * 5  # type: ignore[union-attr]
    assert world.trips == before + 1


@virtually
async def test_a_cancelled_batch_completes_its_lease_requests() -> None:
    world = World(lambda: 500)
    leases = leases_on(world)
    plan = hot_call(limit_of(1_000, Unit.HOUR))
    await warm(world, leases, plan, times=30, pause_us=1_000)
    await sleep_us(LEASE_US)
    prepared = leases.prepare(plan)
    first, second = (asyncio.create_task(leases.spend([prepared])) for _ in range(2))
    await sleep_us(200)
    first.cancel()
    (answer,) = await second
    assert isinstance(answer, StoreError)
    third, fourth = (asyncio.create_task(leases.spend([prepared])) for _ in range(2))
    await sleep_us(200)
    fourth.cancel()
    assert isinstance((await third)[0], StoreResult)


@virtually
async def test_hits_too_few_for_a_large_call_are_refunded() -> None:
    world = World()
    leases = leases_on(world)
    limit = limit_of(100, Unit.HOUR)
    await warm(world, leases, hot_call(limit), times=10, pause_us=1_000)
    await leases.close()
    (answer,), _ = await ask(world, leases, leases.prepare(hot_call(limit, cost=95)))
    assert answer.denied
    assert world.left(hot_call(limit)) == [90]


# -- guarantees, over random traces ------------------------------------------------------------------------------------


class Trace(NamedTuple):
    """Demand on the processes in phases of random length: calls in a batch, and the pause after it."""

    processes: int
    limit: Limit
    trip_us: int
    costs: Sequence[int]
    pauses_us: Sequence[int]
    max_calls: int


def random_trace(chance: random.Random, algorithm: Algorithm, *, small: bool) -> Trace:
    requests = chance.choice([7, 100] if small else [7, 100, 1_000, 5_000])
    burst = chance.choice([requests, max(1, requests // 10)])
    return Trace(
        processes=2 if small else chance.choice([1, 2, 4]),
        limit=limit_of(requests, Unit.SECOND, algorithm, burst),
        trip_us=chance.choice([0, 100, 1_000, 20_000]),
        costs=chance.choice([[1], [1, 2, 5]]),
        pauses_us=chance.choice([[1_000], [500, 2_000, 30_000], [300, 150_000]]),
        max_calls=2 if small else chance.choice([1, 5, 12]),
    )


async def play(chance: random.Random, trace: Trace, seconds: int) -> list[Admitted]:
    world = World(lambda: chance.randint(0, trace.trip_us))
    ends_us = world.now_us() + seconds * SECOND_US
    admitted: list[Admitted] = []
    tasks: set[asyncio.Task[None]] = set()

    async def batch(leases: LeasingStore, calls: Sequence[PreparedPlan]) -> None:
        admitted.extend((await ask(world, leases, *calls))[1])

    async def process() -> None:
        leases = leases_on(world)
        plans = [leases.prepare(hot_call(trace.limit, cost)) for cost in trace.costs]
        await sleep_us(chance.randint(0, 500_000))
        while world.now_us() < ends_us:
            pause_us = chance.choice(trace.pauses_us)
            for _ in range(chance.randint(1, 50)):
                calls = chance.choices(plans, k=chance.randint(1, trace.max_calls))
                task = asyncio.create_task(batch(leases, calls))  # without waiting for the previous one
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                await asyncio.sleep(pause_us / 1e6)
        await leases.close()

    await asyncio.gather(*(process() for _ in range(trace.processes)))
    await asyncio.gather(*tasks)
    return sorted(admitted)


def check_limit(limit: Limit, admitted: Sequence[Admitted]) -> None:
    """Check that the limit held: per clock window where windows are counted, else over a window plus a lease."""
    match limit.algorithm:
        case Algorithm.FIXED_WINDOW | Algorithm.SLIDING_WINDOW:
            check_windows(limit, admitted)
        case Algorithm.SLIDING_LOG:
            check_log(limit, admitted)
        case _:
            check_bucket(limit, admitted)


def check_log(limit: Limit, admitted: Sequence[Admitted]) -> None:
    """Check that hits admitted within a window minus a lease were counted within a window."""
    recent: deque[Admitted] = deque()
    count = 0
    for one in admitted:
        recent.append(one)
        count += one.hits
        while recent[0].at_us <= one.at_us - limit.window_us + LEASE_US:
            count -= recent.popleft().hits
        assert count <= limit.requests_per_unit


def check_bucket(limit: Limit, admitted: Sequence[Admitted]) -> None:
    """Check that no period admits more than the burst plus what refills in it and in a lease."""
    per_us = limit.requests_per_unit / limit.window_us
    level, before_us = 0.0, 0
    for at_us, hits in admitted:
        level = max(0.0, level - (at_us - before_us) * per_us) + hits
        before_us = at_us
        assert level <= limit.burst + LEASE_US * per_us + 1e-6


def check_windows(limit: Limit, admitted: Sequence[Admitted]) -> None:
    """Check exact counts, also by the sliding window formula: a lease does not outlive its window."""
    counts: Counter[int] = Counter()
    for at_us, hits in admitted:
        window, into_us = divmod(at_us, SECOND_US)
        counts[window] += hits
        slid = limit.algorithm is Algorithm.SLIDING_WINDOW
        before = -(-counts[window - 1] * (SECOND_US - into_us) // SECOND_US) if slid else 0
        assert counts[window] + before <= limit.requests_per_unit


@pytest.mark.parametrize("algorithm", list(Algorithm), ids=lambda algorithm: algorithm.value)
def test_no_limit_is_exceeded_by_random_traffic(algorithm: Algorithm) -> None:
    play_some(algorithm, traces=1, small=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("algorithm", list(Algorithm), ids=lambda algorithm: algorithm.value)
def test_no_limit_is_exceeded_in_many_traces(algorithm: Algorithm) -> None:
    play_some(algorithm, traces=25, small=False)


def play_some(algorithm: Algorithm, traces: int, *, small: bool) -> None:
    chance = random.Random(algorithm.value)
    for _ in range(traces):
        trace = random_trace(chance, algorithm, small=small)
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            check_limit(trace.limit, runner.run(play(chance, trace, seconds=1 if small else 2)))


# -- utilisation of a limit --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 4])
@pytest.mark.parametrize("algorithm", list(Algorithm), ids=lambda algorithm: algorithm.value)
def test_nearly_all_of_a_limit_is_used_under_high_demand(algorithm: Algorithm, processes: int) -> None:
    """Each process alone has more demand than the limit."""
    chance = random.Random(1)
    limit = limit_of(2_000, Unit.SECOND, algorithm, burst=200)
    trace = Trace(processes, limit, trip_us=500, costs=[1], pauses_us=[1_000, 2_000], max_calls=10)
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        admitted = runner.run(play(chance, trace, seconds=6))
    check_limit(limit, admitted)
    begins_us, ends_us = START_US + SECOND_US, START_US + 5 * SECOND_US
    used = sum(hits for at_us, hits in admitted if begins_us <= at_us < ends_us)
    print(f"{algorithm.value}, {processes} process(es): {used / 8_000:.1%} used")
    assert used >= 0.98 * 8_000
