"""The denial cache: which denials are repeated without the store, for how long, and which are never cached."""

from __future__ import annotations

import asyncio
import gc
import random
import tracemalloc
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ratelimit_rls.core.decision import decision_of
from ratelimit_rls.core.model import (
    Algorithm,
    Charge,
    Code,
    LeasePolicy,
    Penalty,
    Plan,
    Purpose,
    Rule,
    StoreResult,
    Unit,
    WarnAt,
    WarningState,
)
from ratelimit_rls.core.refund import Refund, refund
from ratelimit_rls.errors import StoreError, StoreTimeout
from ratelimit_rls.store.base import PreparedPlan, Store
from ratelimit_rls.store.denial_cache import MAX_DENIAL_US, DenialCache
from ratelimit_rls.store.embedded import EmbeddedStore
from ratelimit_rls.telemetry.metrics import Metrics
from tests.support.stores import START_US, KeyedOp, MonitoredDescriptor, call, monitored_call, step

SECOND_US = 1_000_000
MINUTE_US = 60 * SECOND_US


class CountingStore:
    """The embedded store with a count of the plans that reach it, and with hooks to delay results."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self._store = EmbeddedStore(2**22, clock)
        self.requested = 0
        self.batches: list[Sequence[PreparedPlan]] = []
        self.before: Callable[[], Awaitable[None]] | None = None  # between sending and deciding
        self.after: Callable[[], Awaitable[None]] | None = None  # between deciding and returning
        self.fault: StoreError | None = None  # returned for every plan that is not exempt
        self.spared: list[PreparedPlan] = []
        self.closed = False

    def prepare(self, plan: Plan) -> PreparedPlan:
        return self._store.prepare(plan)

    def refund_of(self, prepared: PreparedPlan, charged: Refund) -> PreparedPlan:
        return self._store.refund_of(prepared, charged)

    def decode_key(self, key: Hashable) -> bytes:
        return self._store.decode_key(key)

    async def spend(self, batch: Sequence[PreparedPlan]) -> list[StoreResult | StoreError]:
        self.requested += len(batch)
        self.batches.append(batch)
        if self.before:
            await self.before()
        answers = await self._store.spend(batch)
        if self.after:
            await self.after()
        if self.fault is None:
            return answers
        return [
            answer if requested in self.spared else self.fault for requested, answer in zip(batch, answers, strict=True)
        ]

    async def close(self) -> None:
        self.closed = True


class Harness:
    """A DenialCache around a counting store, on a manual clock."""

    def __init__(self, *, skip_over_limit_charges: bool = False, max_bytes: int = 2**20) -> None:
        self.now_us = START_US
        self.inner = CountingStore(lambda: self.now_us)
        self.denials = DenialCache(
            self.inner,  # type: ignore[arg-type]
            max_bytes,
            skip_over_limit_charges=skip_over_limit_charges,
            clock=lambda: (self.now_us - START_US) / 1e6,
        )
        self.denials.set_subscribed(True)

    async def spend(self, *plans: Plan) -> list[StoreResult]:
        return await self.answered(*map(self.denials.prepare, plans))

    async def answered(self, *requested: PreparedPlan) -> list[StoreResult]:
        answers = await self.denials.spend(requested)
        for answer in answers:
            assert isinstance(answer, StoreResult), answer
        return answers  # type: ignore[return-value]

    async def ask(self, plan: Plan) -> StoreResult:
        return (await self.spend(plan))[0]

    async def denied(self, plan: Plan) -> StoreResult:
        """Call until the plan is denied for the first time."""
        for _ in range(20):
            answer = await self.ask(plan)
            if answer.denied:
                assert not answer.remembered
                return answer
        raise AssertionError("it was never denied")

    def gauge(self, name: str) -> int:
        return dict(self.denials.gauges())[f"ratelimit.denial_cache.{name}"]

    @property
    def remembered(self) -> int:
        return self.gauge("entries")


@pytest.fixture
def harness() -> Harness:
    return Harness()


def purposed(plan: Plan, purpose: Purpose) -> Plan:
    return plan._replace(template=replace(plan.template, purpose=purpose))


@pytest.mark.parametrize("algorithm", list(Algorithm), ids=lambda algorithm: algorithm.value)
async def test_a_denial_is_repeated_without_the_store_until_it_ends(harness: Harness, algorithm: Algorithm) -> None:
    harness.now_us += 12_345_678
    plan = call(step(algorithm=algorithm))
    first = await harness.denied(plan)
    begun_us, retry_us = harness.now_us, first.readings[0].retry_us
    requested = harness.inner.requested

    for share in (0, 1, 1, 250, 700, 990, 999):
        harness.now_us = begun_us + retry_us * share // 1000
        again = await harness.ask(plan)
        assert again.denied
        assert again.remembered
        assert abs(harness.now_us + again.readings[0].retry_us - (begun_us + retry_us)) <= 1
    assert harness.inner.requested == requested
    assert harness.gauge("hits") == 7

    harness.now_us = begun_us + retry_us - 1
    assert (await harness.ask(plan)).denied
    harness.now_us = begun_us + retry_us
    last = await harness.ask(plan)
    assert not last.denied
    assert not last.remembered
    assert harness.remembered == 0


async def test_a_repeated_denial_has_the_values_the_store_would_return(harness: Harness) -> None:
    plan = call(
        step("a", 2), step("b", 100, algorithm=Algorithm.TOKEN_BUCKET, unit=Unit.HOUR), step("c", 9, unit=Unit.SECOND)
    )
    await harness.denied(plan)
    harness.now_us += 1_700_000  # the window of `c` is over
    again = await harness.ask(plan)
    (true,) = await harness.inner.spend([harness.inner.prepare(plan)])
    assert isinstance(true, StoreResult)

    assert again.remembered
    assert (again.denied, again.now_us) == (true.denied, true.now_us)
    assert again.readings[:2] == true.readings[:2]
    # A fixed window that has ended is empty, and the next one begins with the next call.
    assert (again.readings[2].left, again.readings[2].retry_us) == (true.readings[2].left, 0)


async def test_a_client_that_waits_for_retry_after_is_admitted_even_if_the_store_was_slow(harness: Harness) -> None:
    plan = call(step(limit=1, algorithm=Algorithm.GCRA))
    await harness.ask(plan)

    async def slow() -> None:
        harness.now_us += 100_000

    harness.inner.before = harness.inner.after = slow
    sent_us = harness.now_us
    first = await harness.denied(plan)
    harness.inner.before = harness.inner.after = None
    decided_us, received_us = sent_us + 100_000, sent_us + 200_000
    ends_us = decided_us + first.readings[0].retry_us

    harness.now_us = received_us + 10 * SECOND_US
    again = await harness.ask(plan)
    assert again.remembered
    assert harness.now_us + again.readings[0].retry_us >= ends_us

    harness.now_us = sent_us + first.readings[0].retry_us  # from here on the store may admit the call
    assert not (await harness.ask(plan)).remembered


async def test_a_cached_denial_ends_first_even_if_our_clock_is_slow(harness: Harness) -> None:
    plan = call(step(limit=1))
    first = await harness.denied(plan)
    harness.now_us += int(first.readings[0].retry_us * (1 - 400e-6))
    assert not (await harness.ask(plan)).remembered


async def test_a_long_denial_is_confirmed_periodically(harness: Harness) -> None:
    plan = call(step(limit=1, unit=Unit.DAY))
    await harness.denied(plan)
    harness.now_us += MAX_DENIAL_US // 2
    assert (await harness.ask(plan)).remembered
    harness.now_us += MAX_DENIAL_US // 2
    assert not (await harness.ask(plan)).remembered
    assert (await harness.ask(plan)).remembered


async def test_a_cached_denial_ends_with_the_first_denying_limit(harness: Harness) -> None:
    plan = call(step("a", 1, unit=Unit.SECOND), step("b", 1, unit=Unit.MINUTE))
    assert [reading.allowed for reading in (await harness.denied(plan)).readings] == [False, False]
    harness.now_us += SECOND_US
    second = await harness.ask(plan)
    assert not second.remembered
    assert [reading.allowed for reading in second.readings] == [True, False]
    harness.now_us += SECOND_US
    third = await harness.ask(plan)
    assert third.remembered
    assert [reading.allowed for reading in third.readings] == [True, False]


@pytest.mark.parametrize("plan", [call(step(limit=3, cost=4)), call(step(limit=0))], ids=["cost", "limit"])
async def test_an_impossible_cost_is_denied_until_its_limit_resets(harness: Harness, plan: Plan) -> None:
    harness.now_us += SECOND_US
    first = await harness.denied(plan)
    assert first.readings[0].retry_us == -1
    harness.now_us += SECOND_US
    again = await harness.ask(plan)
    assert again.remembered
    assert again.readings[0] == first.readings[0]._replace(reset_us=first.readings[0].reset_us - SECOND_US)
    harness.now_us += again.readings[0].reset_us
    assert not (await harness.ask(plan)).remembered


async def test_a_denial_without_an_end_is_not_cached(harness: Harness) -> None:
    plan = call(step(limit=3, cost=4, algorithm=Algorithm.GCRA))
    assert (await harness.denied(plan)).readings[0] == (3, -1, 0)
    assert not (await harness.ask(plan)).remembered


async def test_a_denial_in_global_shadow_mode_is_not_cached(harness: Harness) -> None:
    """In global shadow mode the call passes, and limits with capacity left are charged."""
    plan = call(step("a", 1), step("b", 5), shadow_mode=True)
    await harness.denied(plan)
    left = (await harness.ask(plan)).readings[1].left
    assert (await harness.ask(plan)).readings[1].left == left - 1


async def test_a_limit_in_shadow_mode_does_not_deny(harness: Harness) -> None:
    plan = call(step("a", 1, shadow=True), step("b", 2))
    await harness.ask(plan)
    assert not (await harness.ask(plan)).denied
    assert harness.remembered == 0
    assert (await harness.denied(plan)).readings[0].retry_us > 0
    assert (await harness.ask(plan)).remembered


async def test_quotas_are_not_cached(harness: Harness) -> None:
    plan = call(step("a", 1, quota=True))
    await harness.denied(plan)
    assert not (await harness.ask(plan)).remembered


async def test_a_call_that_can_be_delayed_is_not_cached(harness: Harness) -> None:
    queue = call(step(limit=1, algorithm=Algorithm.GCRA, max_delay_us=SECOND_US))
    await harness.denied(queue)
    prepared = harness.denials.prepare(queue).with_max_wait(2_000_000)
    for _ in range(2):
        (answer,) = await harness.answered(prepared)
        assert not answer.remembered


async def test_a_call_with_a_request_id_is_not_cached(harness: Harness) -> None:
    plan = call(step(limit=1))
    await harness.ask(plan)
    prepared = harness.denials.prepare(plan).idempotent(b"1")
    for _ in range(2):
        (answer,) = await harness.answered(prepared)
        assert answer.denied
        assert not answer.remembered
    assert harness.remembered == 0


async def test_a_request_for_leased_hits_is_not_cached(harness: Harness) -> None:
    plan = call(step(limit=1))
    await harness.ask(plan)
    prepared = harness.denials.prepare(plan).take_up_to(5)
    await harness.answered(prepared)
    await harness.answered(prepared)
    assert harness.remembered == 0


@pytest.mark.parametrize("algorithm", [Algorithm.FIXED_WINDOW, Algorithm.TOKEN_BUCKET])
@pytest.mark.parametrize("other", [0, 1])
async def test_a_limit_that_counts_denied_hits_is_not_cached(
    harness: Harness, algorithm: Algorithm, other: int
) -> None:
    """Regardless of whether it denies itself, or another limit does."""
    own = step("a", 1 if not other else 9, algorithm=algorithm, charge=Charge.ALWAYS)
    plan = call(own, step("b", 1)) if other else call(own)
    await harness.denied(plan)
    left = [(await harness.ask(plan)).readings[0].left for _ in range(3)]
    assert left == [left[0], left[0] - 1, left[0] - 2]


async def test_a_denied_look_is_cached_even_under_charge_always(harness: Harness) -> None:
    spend = step(limit=2, charge=Charge.ALWAYS)
    for _ in range(3):
        await harness.ask(call(spend))
    look = call(step(limit=2, charge=Charge.ALWAYS, cost=0))
    await harness.denied(look)
    assert (await harness.ask(look)).remembered


async def test_a_refund_is_never_cached(harness: Harness) -> None:
    plan = call(step("a", 1), step("b", 5, cost=-1, charge=Charge.ALWAYS))
    await harness.spend(*(call(step("b", 5)) for _ in range(5)))
    await harness.denied(plan)
    left = (await harness.ask(plan)).readings[1].left
    assert (await harness.ask(plan)).readings[1].left == left + 1


async def test_a_denied_report_is_counted_every_time() -> None:
    harness = Harness(skip_over_limit_charges=True)
    report = purposed(call(step(limit=1, charge=Charge.ALWAYS)), Purpose.REPORT)
    await harness.denied(report)
    left = [(await harness.ask(report)).readings[0].left for _ in range(3)]
    assert left == [left[0], left[0] - 1, left[0] - 2]


class TestSkippedOverLimitCharges:
    async def test_hits_on_an_exceeded_window_are_not_counted(self) -> None:
        harness = Harness(skip_over_limit_charges=True)
        plan = call(step(limit=2, charge=Charge.ALWAYS))
        await harness.denied(plan)
        for _ in range(5):
            assert (await harness.ask(plan)).remembered
        assert (await harness.ask(call(step(limit=2, cost=0)))).readings[0].left == -1
        harness.now_us += MINUTE_US
        assert not (await harness.ask(plan)).denied

    async def test_all_hits_of_a_later_call_are_over_limit_in_metrics(self) -> None:
        harness = Harness(skip_over_limit_charges=True)
        plan = call(step(limit=10, cost=4, charge=Charge.ALWAYS))
        await harness.denied(plan)  # two of its hits were within the limit
        metrics = Metrics()
        decision = decision_of(plan.template, await harness.ask(plan))
        assert decision.remembered
        assert decision.code is Code.OVER_LIMIT
        metrics.record(decision, (metrics.limit("path"),))
        counted = metrics.limit("path")
        assert (counted.total_hits, counted.over_limit, counted.over_limit_with_local_cache) == (4, 4, 4)
        assert (counted.near_limit, counted.within_limit) == (0, 0)

    async def test_a_window_with_limit_zero_is_exceeded_by_its_first_hit(self) -> None:
        harness = Harness(skip_over_limit_charges=True)
        plan = call(step(limit=0, charge=Charge.ALWAYS))
        await harness.denied(plan)
        assert (await harness.ask(plan)).remembered

    async def test_other_algorithms_keep_counting(self) -> None:
        harness = Harness(skip_over_limit_charges=True)
        plan = call(step(limit=1, charge=Charge.ALWAYS, algorithm=Algorithm.SLIDING_WINDOW))
        await harness.denied(plan)
        assert not (await harness.ask(plan)).remembered

    async def test_a_window_that_is_not_exceeded_keeps_counting(self) -> None:
        harness = Harness(skip_over_limit_charges=True)
        plan = call(step("a", 1, charge=Charge.ALWAYS), step("b", 4, charge=Charge.ALWAYS))
        assert [(await harness.ask(plan)).readings[1].left for _ in range(6)] == [3, 2, 1, 0, -1, -2]
        assert harness.remembered == 1  # now that both are

    async def test_a_window_that_is_full_only_with_an_undone_charge_keeps_counting(self) -> None:
        harness = Harness(skip_over_limit_charges=True)
        plan = call(step("a", 1), step("a", 1, charge=Charge.ALWAYS))
        await harness.denied(plan)
        assert not (await harness.ask(plan)).remembered


class TestPenalties:
    def plan(self, *, after: int = 1, cost: int = 1) -> Plan:
        limit = step("a", 1, algorithm=Algorithm.GCRA, cost=cost)
        return monitored_call(MonitoredDescriptor((limit,), (Penalty(3600 * SECOND_US, after, (2, 4, 8)),)))

    async def test_a_cooldown_is_cached_until_a_limit_ends_and_then_until_it_ends(self, harness: Harness) -> None:
        plan = self.plan()
        first = await harness.denied(plan)
        assert (first.readings[0].retry_us, first.readings[1].retry_us) == (MINUTE_US, 2 * MINUTE_US)
        harness.now_us += MINUTE_US // 2
        assert (await harness.ask(plan)).remembered
        harness.now_us += MINUTE_US // 2
        assert [reading.allowed for reading in (await harness.ask(plan)).readings] == [True, False]
        harness.now_us += MINUTE_US // 2
        again = await harness.ask(plan)
        assert again.remembered
        assert abs(again.readings[1].retry_us - MINUTE_US // 2) <= 1
        harness.now_us += MINUTE_US // 2
        assert not (await harness.ask(plan)).denied

    async def test_without_a_cooldown_denials_are_not_cached(self, harness: Harness) -> None:
        """A denial before a cooldown begins counts as a violation, though no call was admitted in between."""
        plan = self.plan(after=3)
        assert (await harness.denied(plan)).readings[1].left == 1
        assert not (await harness.ask(plan)).remembered

    async def test_not_cached_if_another_descriptor_may_have_a_violation(self, harness: Harness) -> None:
        own = MonitoredDescriptor((step("b", 5),), (Penalty(3600 * SECOND_US, 1, (2,)),))
        plan = monitored_call(MonitoredDescriptor((step("a", 1),)), own)
        await harness.denied(plan)
        await harness.spend(*(monitored_call(own) for _ in range(4)))
        assert (await harness.ask(plan)).readings[2].left == 1

    async def test_a_warning_keeps_the_state_from_the_store(self, harness: Harness) -> None:
        plan = monitored_call(MonitoredDescriptor((step("a", 2),), (WarnAt(500),)))
        await harness.denied(plan)
        again = await harness.ask(plan)
        assert again.remembered
        assert decision_of(plan.template, again).statuses[0].state is WarningState.THROTTLED


class TestRefunds:
    async def test_a_refund_ends_the_denial(self, harness: Harness) -> None:
        plan = call(step(limit=2))
        await harness.denied(plan)
        assert (await harness.ask(plan)).remembered
        await harness.ask(call(step(limit=2, cost=-1)))
        assert not (await harness.ask(plan)).denied
        assert harness.gauge("invalidations") == 1

    async def test_the_refund_of_a_disconnected_caller_ends_the_denial(self, harness: Harness) -> None:
        plan = call(step(limit=1))
        admitted = await harness.ask(plan)
        await harness.denied(plan)
        charged = refund(decision_of(plan.template, admitted))
        assert charged is not None
        await harness.answered(harness.denials.refund_of(harness.denials.prepare(plan), charged))
        assert not (await harness.ask(plan)).denied

    async def test_a_returned_lease_ends_the_denial(self, harness: Harness) -> None:
        plan = call(step(limit=1))
        leased = replace(plan.template.descriptor_plans[0], rule=Rule("domain.k", (), hot=LeasePolicy(100_000)))
        plan = plan._replace(template=replace(plan.template, descriptor_plans=(leased,)))
        admitted = await harness.ask(plan)
        await harness.denied(plan)
        await harness.answered(harness.denials.prepare(plan).refund(1, admitted.now_us))
        assert not (await harness.ask(plan)).denied

    @pytest.mark.parametrize("refund_first", [True, False])
    async def test_a_refund_in_the_same_batch_ends_the_denial(self, harness: Harness, refund_first: bool) -> None:
        plan, given_back = call(step(limit=1)), call(step(limit=1, cost=-1))
        await harness.denied(plan)
        batch = [given_back, plan] if refund_first else [plan, given_back]
        answers = await harness.spend(*batch)
        assert [answer.denied for answer in answers] == [not refund_first, False]
        if not refund_first:
            assert not (await harness.ask(plan)).denied

    async def test_a_denial_decided_before_a_refund_and_received_after_is_not_cached(self, harness: Harness) -> None:
        plan, given_back = call(step(limit=1)), call(step(limit=1, cost=-1))
        await harness.ask(plan)

        async def refund_meanwhile() -> None:
            harness.inner.after = None
            await harness.ask(given_back)

        harness.inner.after = refund_meanwhile
        assert (await harness.ask(plan)).denied
        assert harness.remembered == 0
        assert not (await harness.ask(plan)).denied

    async def test_a_failed_refund_invalidates_because_it_may_have_happened(self, harness: Harness) -> None:
        plan, given_back = call(step(limit=1)), call(step(limit=1, cost=-1))
        await harness.denied(plan)
        harness.inner.fault = StoreTimeout("late")
        assert await harness.denials.spend([harness.denials.prepare(given_back)]) == [harness.inner.fault]
        harness.inner.fault = None
        assert not (await harness.ask(plan)).denied

    async def test_a_cancelled_refund_invalidates_because_it_may_have_happened(self, harness: Harness) -> None:
        plan, given_back = call(step(limit=1)), call(step(limit=1, cost=-1))
        await harness.denied(plan)

        async def never() -> None:
            harness.inner.after = None
            (again,) = await harness.spend(plan)
            assert not again.denied
            await harness.denied(plan)  # cached while the refund is in flight
            await asyncio.Event().wait()

        harness.inner.after = never
        giving_back = asyncio.create_task(harness.ask(given_back))
        while harness.inner.after:  # type: ignore[truthy-function]
            await asyncio.sleep(0)
        giving_back.cancel()
        await asyncio.gather(giving_back, return_exceptions=True)
        assert harness.remembered == 0


class TestInvalidation:
    async def test_a_freed_counter_ends_only_the_denials_it_caused(self, harness: Harness) -> None:
        a, b = call(step("a", 1)), call(step("b", 1))
        both = call(step("a", 1), step("c", 9))
        for plan in (a, b, both):
            await harness.denied(plan)
        harness.denials.forget([a.keys[0]])
        assert [answer.remembered for answer in await harness.spend(a, b, both)] == [False, True, False]

    async def test_freeing_a_counter_that_did_not_deny_ends_nothing(self, harness: Harness) -> None:
        """On a cluster, each denied call refunds the charges of its other limits."""
        plan = call(step("a", 1), step("b", 9))
        await harness.denied(plan)
        harness.denials.forget([plan.keys[1]])
        assert (await harness.ask(plan)).remembered

    async def test_a_request_sent_before_an_invalidation_is_not_cached_after(self, harness: Harness) -> None:
        a, b = call(step("a", 1)), call(step("b", 1))
        await harness.spend(a, b)

        async def invalidate() -> None:
            harness.denials.forget([a.keys[0]])

        harness.inner.after = invalidate
        assert [answer.denied for answer in await harness.spend(a, b)] == [True, True]
        harness.inner.after = None
        assert [answer.remembered for answer in await harness.spend(a, b)] == [False, True]
        assert [answer.remembered for answer in await harness.spend(a, b)] == [True, True]

    @pytest.mark.parametrize("event", ["lost", "back", "rules"])
    async def test_everything_is_dropped_when_the_subscription_or_the_rules_change(
        self, harness: Harness, event: str
    ) -> None:
        plan, other = call(step("a", 1)), call(step("b", 1))
        await harness.denied(plan)
        await harness.ask(other)

        async def happen() -> None:
            harness.inner.after = None
            if event == "rules":
                harness.denials.forget_all()
            else:
                harness.denials.set_subscribed(False)
                harness.denials.set_subscribed(event == "back")

        harness.inner.after = happen
        assert (await harness.ask(other)).denied  # requests in flight are not cached, either
        assert harness.remembered == 0
        assert harness.gauge("size") == 0
        assert harness.gauge("invalidations") == 1
        assert not (await harness.ask(plan)).remembered

    async def test_nothing_is_cached_without_a_subscription(self, harness: Harness) -> None:
        plan = call(step(limit=1))
        harness.denials.set_subscribed(False)
        await harness.denied(plan)
        assert not (await harness.ask(plan)).remembered
        harness.denials.set_subscribed(True)
        assert not (await harness.ask(plan)).remembered
        assert (await harness.ask(plan)).remembered


class TestMemory:
    async def test_memory_is_bounded(self) -> None:
        harness = Harness(max_bytes=100_000)
        shape = call(step("k", 0))
        plans = [shape._replace(keys=(f"rl:{{{number}}}:fixed_window:60".encode(),)) for number in range(500)]
        for plan in plans:
            await harness.ask(plan)
            assert harness.gauge("size") <= 100_000
        assert harness.remembered == 500 - harness.gauge("evictions")
        assert harness.remembered > 50
        again = await harness.spend(*plans)
        assert sum(answer.remembered for answer in again) == harness.gauge("hits")

    async def test_an_entry_larger_than_the_budget_is_not_kept(self) -> None:
        harness = Harness(max_bytes=2_000)
        plan = call(*(step(str(number), 0) for number in range(50)))
        await harness.denied(plan)
        assert harness.remembered == 0
        assert harness.gauge("size") == 0

    async def test_a_layout_counts_towards_the_size(self, harness: Harness) -> None:
        shape = call(step("k", 0))
        for key in (b"rl:{a}:fixed_window:60", b"rl:{b}:fixed_window:60"):
            await harness.ask(shape._replace(keys=(key,)))
        sharing = harness.gauge("size")
        harness.denials.forget_all()
        for cost in (0, 1):
            await harness.ask(call(step("k", 0, cost=cost)))
        assert harness.gauge("size") > sharing + 1000

    async def test_expired_entries_do_not_accumulate(self, harness: Harness) -> None:
        shape = call(step("k", 0))
        for number in range(100):
            await harness.ask(shape._replace(keys=(f"rl:{{{number}}}:fixed_window:60".encode(),)))
        assert harness.remembered == 100
        harness.now_us += MINUTE_US
        other = call(step("other", 99))
        for _ in range(60):
            await harness.ask(other)
        assert harness.remembered == 0
        assert harness.gauge("size") == 0

    async def test_a_key_that_occurs_twice_in_a_call_is_kept_once(self, harness: Harness) -> None:
        plan = call(step("a", 0), step("a", 0))
        await harness.denied(plan)
        assert (await harness.ask(plan)).remembered
        harness.denials.forget(plan.keys)
        assert harness.remembered == 0

    @pytest.mark.slow
    async def test_the_estimated_size_matches_tracemalloc(self) -> None:
        harness = Harness(max_bytes=2**26)
        some = call(step("k", 0), step("l", 5), step("m", 5))
        for shape in (call(step("k", 0)), some, call(*(step(key, 0) for key in "klm"))):
            harness.denials.forget_all()
            gc.collect()
            tracemalloc.start()
            for number in range(2000):
                names = [f"rl:{{domain/user={number}/{key}}}:fixed_window:60" for key in range(len(shape.keys))]
                await harness.ask(shape._replace(keys=tuple(map(str.encode, names))))
                harness.inner.batches.clear()
            gc.collect()
            taken, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            print(
                f"{len(shape.keys)} keys: {taken / 2000:.0f} bytes each, said to be {harness.gauge('size') / 2000:.0f}"
            )
            assert harness.remembered == 2000
            assert taken <= harness.gauge("size") <= 2 * taken

    @pytest.mark.slow
    async def test_forgotten_entries_leave_no_memory_behind(self) -> None:
        harness = Harness(max_bytes=2**26)
        gc.collect()
        tracemalloc.start()
        for number in range(500):  # each with a layout of its own
            await harness.ask(call(step(str(number), 0)))
            harness.inner.batches.clear()
        full, _ = tracemalloc.get_traced_memory()
        harness.denials.forget(step(str(number), 0).key for number in range(500))
        gc.collect()
        left, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert harness.gauge("invalidations") == 500
        assert left < full / 10, f"{left} of {full} bytes"


async def test_results_of_a_batch_are_in_order(harness: Harness) -> None:
    denied, other = call(step("a", 0)), call(step("b", 9))
    await harness.denied(denied)
    answers = await harness.spend(other, denied, other, denied, denied, other)
    assert [answer.remembered for answer in answers] == [False, True, False, True, True, False]
    assert [answer.readings[0].left for answer in answers] == [8, 0, 7, 0, 0, 6]


async def test_an_expired_entry_is_dropped_on_lookup(harness: Harness) -> None:
    plan, other = call(step(limit=1)), call(step("other"))
    longer = call(step(limit=0, unit=Unit.HOUR))
    await harness.denied(plan)
    others = [longer._replace(keys=(b"rl:{%d}:fixed_window:3600" % number,)) for number in range(200)]
    await harness.spend(*others)
    harness.now_us += MINUTE_US
    assert [answer.denied for answer in await harness.spend(plan, plan)] == [False, True]
    assert harness.remembered == len(others) + 1
    harness.now_us += MINUTE_US
    assert [answer.denied for answer in await harness.spend(plan, other)] == [False, False]
    assert harness.remembered == len(others)


async def test_concurrent_identical_denials_are_cached_once(harness: Harness) -> None:
    plan = call(step(limit=1))
    await harness.ask(plan)

    async def meanwhile() -> None:
        harness.inner.after = None
        assert (await harness.ask(plan)).denied

    harness.inner.after = meanwhile
    assert (await harness.ask(plan)).denied
    assert harness.remembered == 1
    harness.denials.forget(plan.keys)
    assert harness.gauge("size") == 0


async def test_a_store_error_does_not_affect_cached_denials(harness: Harness) -> None:
    denied, other = call(step("a", 0)), call(step("b", 9))
    await harness.denied(denied)
    harness.inner.fault = StoreTimeout("late")
    reported = await harness.denials.spend([harness.denials.prepare(other), harness.denials.prepare(denied)])
    assert reported[0] is harness.inner.fault
    assert isinstance(reported[1], StoreResult)
    assert harness.remembered == 1


async def test_a_denial_beside_a_store_error_is_cached(harness: Harness) -> None:
    denied, other = harness.denials.prepare(call(step("a", 0))), harness.denials.prepare(call(step("b", 9)))
    harness.inner.fault, harness.inner.spared = StoreTimeout("late"), [denied]
    await harness.denials.spend([other, denied, other])
    assert harness.remembered == 1


async def test_a_batch_without_cached_denials_is_forwarded_unchanged(harness: Harness) -> None:
    batch = [harness.denials.prepare(call(step(limit=9)))]
    await harness.denials.spend(batch)
    assert harness.inner.batches[-1] is batch
    await harness.denied(call(step("other", 0)))
    await harness.denials.spend(batch)
    assert harness.inner.batches[-1] is batch


async def test_closing_closes_the_store(harness: Harness) -> None:
    await harness.denials.close()
    assert harness.inner.closed


# Random traffic on two stores, one of them behind a DenialCache.


@st.composite
def limits(draw: st.DrawFn, key: str, charge: Charge) -> KeyedOp:
    return step(
        key,
        draw(st.integers(1, 3)),
        unit=draw(st.sampled_from([Unit.SECOND, Unit.MINUTE])),
        algorithm=draw(st.sampled_from(Algorithm)),
        burst=draw(st.integers(1, 3)),
        charge=charge,
        shadow=draw(st.sampled_from([False, False, False, True])),
    )


@st.composite
def traffic(draw: st.DrawFn) -> list[Plan]:
    """Generate some descriptors, and calls that use one or two of them, at some cost."""
    charges = st.sampled_from([Charge.ADMITTED] * 3 + [Charge.ALWAYS])
    penalties = (
        st.none()
        | st.none()
        | st.builds(
            Penalty,
            st.sampled_from([5 * SECOND_US, 60 * SECOND_US]),
            st.integers(1, 2),
            st.sampled_from([(1, 2), (3,)]),
        )
    )
    described = []
    for key in ("a", "b"):
        charge, penalty = draw(charges), draw(penalties)
        warn_at = draw(st.none() | st.just(WarnAt(500)))
        ops = tuple(
            {one.key: one for one in (draw(limits(key, charge)) for _ in range(draw(st.integers(1, 2))))}.values()
        )
        described.append(MonitoredDescriptor(ops, tuple(one for one in (penalty, warn_at) if one)))

    def at_cost(one: MonitoredDescriptor, cost: int) -> MonitoredDescriptor:
        ops = tuple(KeyedOp(key, replace(op, cost=cost)) for key, op in one.ops)
        return one._replace(ops=ops)

    costs = st.sampled_from([1, 1, 1, 2, 0, -1])
    which = st.sampled_from([(0,), (0,), (1,), (0, 1), (1, 0)])
    plans = []
    for _ in range(draw(st.integers(1, 4))):
        cost = draw(costs)
        plans.append(monitored_call(*(at_cost(described[number], cost) for number in draw(which))))
    return plans


@st.composite
def traces(draw: st.DrawFn) -> tuple[list[Plan], list[tuple[int, int | str, bool]]]:
    """Generate calls by index, their delays (or their own retry), and whether the caller disconnects."""
    plans = draw(traffic())
    waits = st.one_of(
        st.just(0),
        st.integers(0, SECOND_US // 10),
        st.integers(0, SECOND_US // 2),
        st.sampled_from([1, SECOND_US, 20 * SECOND_US]),
        st.sampled_from(["retry", "just before"]),
    )
    leaves = st.sampled_from([False] * 7 + [True])
    events = st.tuples(st.integers(0, len(plans) - 1), waits, leaves)
    return plans, draw(st.lists(events, min_size=5, max_size=40))


class Twins:
    """Sends the same calls to a plain store and to one behind a DenialCache, at the same times."""

    def __init__(self, skip_over_limit_charges: bool = False) -> None:
        self.harness = Harness(skip_over_limit_charges=skip_over_limit_charges)
        self.plain: Store = EmbeddedStore(2**22, lambda: self.harness.now_us)
        self.repeated = 0
        self.traces = 0

    def begin(self, plans: Iterable[Plan]) -> list[Plan]:
        """Begin another trace at the same time, with counters of its own."""
        self.traces += 1
        self.harness.now_us = START_US
        self.harness.denials.forget_all()
        return [plan._replace(keys=tuple(b"%d:%s" % (self.traces, key) for key in plan.keys)) for plan in plans]

    async def ask(self, plan: Plan) -> tuple[StoreResult, StoreResult]:
        decided = await self.harness.ask(plan)
        (true,) = await self.plain.spend([self.plain.prepare(plan)])
        assert isinstance(true, StoreResult)
        self.repeated += decided.remembered
        return decided, true

    async def give_back(self, plan: Plan, answer: StoreResult) -> None:
        charged = refund(decision_of(plan.template, answer))
        if charged is not None:
            for store in (self.harness.denials, self.plain):
                await store.spend([store.refund_of(store.prepare(plan), charged)])


def assert_equal_results(decided: StoreResult, true: StoreResult, alone: bool) -> None:
    """`alone`: no other call moves these counters."""
    if not decided.remembered:
        assert decided == true
        return
    assert decided.denied
    assert true.denied
    assert abs(decided.now_us - true.now_us) <= 1
    for reported, now in zip(decided.readings, true.readings, strict=True):
        if reported.retry_us > 0:
            assert now.retry_us >= reported.retry_us - 1
            if alone:
                assert abs(now.retry_us - reported.retry_us) <= 1
                assert abs(now.reset_us - reported.reset_us) <= 1
        elif alone:
            assert now.allowed == reported.allowed


async def play(twins: Twins, drawn: list[Plan], events: Sequence[tuple[int, int | str, bool]]) -> None:
    plans = twins.begin(drawn)
    last_retry_us = 0
    for number, wait, leaves in events:
        if isinstance(wait, str):
            wait = max(0, last_retry_us - (wait == "just before"))
        twins.harness.now_us += wait
        plan = plans[number]
        decided, true = await twins.ask(plan)
        assert_equal_results(decided, true, alone=len(plans) == 1)
        last_retry_us = max((reading.retry_us for reading in true.readings), default=0)
        if leaves and not true.denied:
            await twins.give_back(plan, true)
    for wait_us in (0, SECOND_US, 30 * SECOND_US, MINUTE_US):  # so that every count becomes visible
        twins.harness.now_us += wait_us
        for plan in plans:
            assert_equal_results(*await twins.ask(plan), alone=False)


def check(examples: int) -> int:
    """Return how many denials were repeated."""
    twins = Twins()

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(traces())
    def answers_as_the_store(trace: tuple[list[Plan], list[tuple[int, int | str, bool]]]) -> None:
        asyncio.run(play(twins, *trace))

    answers_as_the_store()
    return twins.repeated


@pytest.mark.slow
def test_every_result_equals_the_plain_stores() -> None:
    assert check(10) > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_result_equals_the_plain_stores_over_hundreds_of_traces() -> None:
    repeated = check(500)
    print(f"{repeated} denials repeated")
    assert repeated > 300


@pytest.mark.parametrize("seed", range(10))
async def test_verdicts_with_skipped_charges_equal_the_plain_stores(seed: int) -> None:
    """Counts differ, since hits over the limit are not counted, but that never affects a later window."""
    random_ = random.Random(seed)
    plans = []
    for _ in range(4):
        keys = random_.sample(["a", "b", "c"], random_.randint(1, 2))
        requested = [
            step(key, 3, unit=random_.choice([Unit.SECOND, Unit.MINUTE]), charge=Charge.ALWAYS) for key in keys
        ]
        plans.append(call(*requested))
    twins = Twins(skip_over_limit_charges=True)
    for _ in range(150):
        twins.harness.now_us += random_.choice([0, 0, 1, 200_000, SECOND_US, 7 * SECOND_US])
        decided, true = await twins.ask(random_.choice(plans))
        assert decided.denied == true.denied
        if not true.denied:
            assert decided == true
    assert twins.repeated > 0
