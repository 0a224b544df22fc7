"""Operations of leases: take up to a number of hits, and return hits taken at a given time."""

from __future__ import annotations

import pytest

from ratelimit_rls.core.model import Algorithm, Plan, StoreResult, Unit
from tests.support.stores import StoreUnderTest, call, step

ALGORITHMS = pytest.mark.parametrize("algorithm", list(Algorithm), ids=lambda algorithm: algorithm.value)


def take(store: StoreUnderTest, plan: Plan, hits: int) -> StoreResult:
    return store.answered(store.store.prepare(plan).take_up_to(hits))[0]


def give_back(store: StoreUnderTest, plan: Plan, hits: int, charged_at_us: int) -> None:
    store.answered(store.store.prepare(plan).refund(hits, charged_at_us))


def left(store: StoreUnderTest, algorithm: Algorithm) -> int:
    return store.ask(step(limit=10, algorithm=algorithm, cost=0)).readings[0].left


@ALGORITHMS
def test_take_up_to_returns_what_is_left(store: StoreUnderTest, algorithm: Algorithm) -> None:
    plan = call(step(limit=10, algorithm=algorithm))

    assert [take(store, plan, hits).granted for hits in (4, 4, 4, 4)] == [4, 4, 2, 0]
    assert left(store, algorithm) == 0


@ALGORITHMS
def test_empty_take_has_exact_retry(store: StoreUnderTest, algorithm: Algorithm) -> None:
    plan = call(step(limit=10, algorithm=algorithm))
    take(store, plan, 10)
    none = take(store, plan, 5)
    assert (none.granted, none.denied) == (0, True)
    store.now_us += none.readings[0].retry_us - 1
    assert take(store, plan, 1).granted == 0
    store.now_us += 1

    assert take(store, plan, 1).granted == 1


def test_take_is_bounded_by_every_limit(store: StoreUnderTest) -> None:
    """Hits beyond that stay in the counters."""
    many, few = step(limit=100), step(limit=3, unit=Unit.HOUR, algorithm=Algorithm.GCRA)
    answer = take(store, call(many, few), 50)

    assert answer.granted == 3
    assert [reading.left for reading in answer.readings] == [97, 0]
    assert take(store, call(many, few), 50).granted == 0
    assert store.ask(step(limit=100, cost=0)).readings[0].left == 97


def test_takes_in_one_batch_see_each_other(store: StoreUnderTest) -> None:
    plan = store.store.prepare(call(step(limit=10)))
    answers = store.answered(plan.take_up_to(6), plan, plan.take_up_to(6))

    assert [answers[0].granted, answers[2].granted] == [6, 3]
    assert answers[1].readings[0].left == 3


@ALGORITHMS
def test_unused_hits_are_returned(store: StoreUnderTest, algorithm: Algorithm) -> None:
    plan = call(step(limit=10, algorithm=algorithm))
    taken = take(store, plan, 8)
    store.ask(step(limit=10, algorithm=algorithm))
    give_back(store, plan, 5, taken.now_us)

    assert left(store, algorithm) == 6


@ALGORITHMS
def test_full_return_restores_state(store: StoreUnderTest, algorithm: Algorithm) -> None:
    plan = call(step(limit=10, algorithm=algorithm))
    taken = take(store, plan, 8)
    give_back(store, plan, 8, taken.now_us)
    again = store.ask(step(limit=10, algorithm=algorithm, cost=0)).readings[0]

    assert again.left == 10
    assert again.reset_us == (60_000_000 if algorithm is Algorithm.FIXED_WINDOW else 0)


def test_sliding_log_return_removes_that_charge_only(store: StoreUnderTest) -> None:
    log = step(limit=10, algorithm=Algorithm.SLIDING_LOG)
    plan = call(log)
    first = take(store, plan, 4)
    store.now_us += 10_000_000
    take(store, plan, 3)
    store.now_us += 10_000_000
    take(store, plan, 2)
    give_back(store, plan, 3, first.now_us)
    assert left(store, Algorithm.SLIDING_LOG) == 4

    store.now_us += 40_000_000  # the rest of the first charge is a minute old
    assert left(store, Algorithm.SLIDING_LOG) == 5
    store.now_us += 10_000_000
    assert left(store, Algorithm.SLIDING_LOG) == 8
    store.now_us += 10_000_000
    assert left(store, Algorithm.SLIDING_LOG) == 10


def test_sliding_log_return_is_bounded_by_the_charge(store: StoreUnderTest) -> None:
    plan = call(step(limit=10, algorithm=Algorithm.SLIDING_LOG))
    first = take(store, plan, 2)
    store.now_us += 1_000_000
    take(store, plan, 5)
    give_back(store, plan, 7, first.now_us)
    give_back(store, plan, 7, first.now_us)
    give_back(store, plan, 7, first.now_us + 1)

    assert left(store, Algorithm.SLIDING_LOG) == 5


@pytest.mark.parametrize("algorithm", [Algorithm.FIXED_WINDOW, Algorithm.SLIDING_LOG], ids=lambda one: one.value)
def test_return_after_end_of_window_is_ignored(store: StoreUnderTest, algorithm: Algorithm) -> None:
    plan = call(step(limit=10, algorithm=algorithm))
    taken = take(store, plan, 8)
    store.now_us += 60_000_000
    take(store, plan, 8)
    give_back(store, plan, 8, taken.now_us)

    assert left(store, algorithm) == 2


BUCKETS = pytest.mark.parametrize(
    "algorithm", [Algorithm.TOKEN_BUCKET, Algorithm.LEAKY_BUCKET, Algorithm.GCRA], ids=lambda one: one.value
)


@BUCKETS
def test_bucket_return_is_reduced_by_refill(store: StoreUnderTest, algorithm: Algorithm) -> None:
    """Ten per minute with a burst of one: a charge is refilled after six seconds, and must not be refunded too."""
    bucket = step(limit=10, algorithm=algorithm, burst=1)
    taken = take(store, call(bucket), 1)
    store.now_us += 6_000_000
    assert not store.ask(bucket).denied
    give_back(store, call(bucket), 1, taken.now_us)
    store.now_us += 1

    denied = store.ask(bucket)
    assert denied.denied
    assert denied.readings[0].retry_us == 6_000_000 - 1


@BUCKETS
def test_full_bucket_stays_full_after_return(store: StoreUnderTest, algorithm: Algorithm) -> None:
    bucket = step(limit=10, algorithm=algorithm)
    taken = take(store, call(bucket), 4)
    store.now_us += 7_654_321
    give_back(store, call(bucket), 4, taken.now_us)

    again = store.ask(step(limit=10, algorithm=algorithm, cost=0)).readings[0]
    assert (again.left, again.reset_us) == (10, 0)


@BUCKETS
def test_bucket_keeps_at_most_the_refill_charged(store: StoreUnderTest, algorithm: Algorithm) -> None:
    bucket = step(limit=10, algorithm=algorithm)
    take(store, call(bucket), 6)
    taken = take(store, call(bucket), 4)
    store.now_us += 6_000_000  # one token is added
    give_back(store, call(bucket), 4, taken.now_us)

    assert left(store, algorithm) == 0 + 1 + 3


def test_sliding_log_with_refunds_and_returns_in_one_batch(store: StoreUnderTest) -> None:
    plan = store.store.prepare(call(step(limit=10, algorithm=Algorithm.SLIDING_LOG)))
    refund = store.store.prepare(call(step(limit=10, algorithm=Algorithm.SLIDING_LOG, cost=-1)))
    taken = store.answered(plan.take_up_to(4))[0]
    store.now_us += 1_000_000
    store.answered(plan, refund, plan.refund(2, taken.now_us), plan)

    assert left(store, Algorithm.SLIDING_LOG) in (5, 7)  # next to a refund in the same batch, a charge may remain
    store.answered(plan.refund(2, taken.now_us))
    assert left(store, Algorithm.SLIDING_LOG) >= 7
