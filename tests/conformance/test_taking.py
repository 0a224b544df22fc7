"""Taking as many hits as there are, and giving back what was taken at a moment: what leases are made of."""

from __future__ import annotations

import pytest

from ratelimit_rls.core.model import Algorithm, Answer, Plan, Unit
from tests.stores import StoreUnderTest, call, step

ALGORITHMS = pytest.mark.parametrize("algorithm", list(Algorithm), ids=lambda algorithm: algorithm.value)


def take(store: StoreUnderTest, plan: Plan, hits: int) -> Answer:
    return store.answered(store.store.prepare(plan).at_most(hits))[0]


def give_back(store: StoreUnderTest, plan: Plan, hits: int, charged_at_us: int) -> None:
    store.answered(store.store.prepare(plan).returned(hits, charged_at_us))


def left(store: StoreUnderTest, algorithm: Algorithm) -> int:
    return store.ask(step(limit=10, algorithm=algorithm, cost=0)).readings[0].left


@ALGORITHMS
def test_as_many_as_are_asked_for_are_taken_or_as_many_as_there_are(
    store: StoreUnderTest, algorithm: Algorithm
) -> None:
    plan = call(step(limit=10, algorithm=algorithm))

    assert [take(store, plan, hits).granted for hits in (4, 4, 4, 4)] == [4, 4, 2, 0]
    assert left(store, algorithm) == 0


@ALGORITHMS
def test_who_gets_none_is_told_when_there_is_one(store: StoreUnderTest, algorithm: Algorithm) -> None:
    plan = call(step(limit=10, algorithm=algorithm))
    take(store, plan, 10)
    none = take(store, plan, 5)
    assert (none.granted, none.refused) == (0, True)
    store.now_us += none.readings[0].retry_us - 1
    assert take(store, plan, 1).granted == 0
    store.now_us += 1

    assert take(store, plan, 1).granted == 1


def test_no_more_is_taken_than_every_limit_has(store: StoreUnderTest) -> None:
    """And what one of them has more stays with it."""
    many, few = step(limit=100), step(limit=3, unit=Unit.HOUR, algorithm=Algorithm.GCRA)
    answer = take(store, call(many, few), 50)

    assert answer.granted == 3
    assert [reading.left for reading in answer.readings] == [97, 0]
    assert take(store, call(many, few), 50).granted == 0
    assert store.ask(step(limit=100, cost=0)).readings[0].left == 97


def test_takers_of_one_batch_see_each_other(store: StoreUnderTest) -> None:
    plan = store.store.prepare(call(step(limit=10)))
    answers = store.answered(plan.at_most(6), plan, plan.at_most(6))

    assert [answers[0].granted, answers[2].granted] == [6, 3]
    assert answers[1].readings[0].left == 3


@ALGORITHMS
def test_what_was_not_needed_goes_back(store: StoreUnderTest, algorithm: Algorithm) -> None:
    plan = call(step(limit=10, algorithm=algorithm))
    taken = take(store, plan, 8)
    store.ask(step(limit=10, algorithm=algorithm))
    give_back(store, plan, 5, taken.now_us)

    assert left(store, algorithm) == 6


@ALGORITHMS
def test_all_of_it_given_back_leaves_no_trace(store: StoreUnderTest, algorithm: Algorithm) -> None:
    plan = call(step(limit=10, algorithm=algorithm))
    taken = take(store, plan, 8)
    give_back(store, plan, 8, taken.now_us)
    again = store.ask(step(limit=10, algorithm=algorithm, cost=0)).readings[0]

    assert again.left == 10
    assert again.reset_us == (60_000_000 if algorithm is Algorithm.FIXED_WINDOW else 0)


def test_a_log_takes_out_what_was_charged_then_and_nothing_newer(store: StoreUnderTest) -> None:
    log = step(limit=10, algorithm=Algorithm.SLIDING_LOG)
    plan = call(log)
    first = take(store, plan, 4)
    store.now_us += 10_000_000
    take(store, plan, 3)
    store.now_us += 10_000_000
    take(store, plan, 2)
    give_back(store, plan, 3, first.now_us)
    assert left(store, Algorithm.SLIDING_LOG) == 4

    store.now_us += 40_000_000  # what is left of the first charge is a minute old
    assert left(store, Algorithm.SLIDING_LOG) == 5
    store.now_us += 10_000_000
    assert left(store, Algorithm.SLIDING_LOG) == 8
    store.now_us += 10_000_000
    assert left(store, Algorithm.SLIDING_LOG) == 10


def test_a_log_never_gives_back_more_than_was_charged_then(store: StoreUnderTest) -> None:
    plan = call(step(limit=10, algorithm=Algorithm.SLIDING_LOG))
    first = take(store, plan, 2)
    store.now_us += 1_000_000
    take(store, plan, 5)
    give_back(store, plan, 7, first.now_us)
    give_back(store, plan, 7, first.now_us)
    give_back(store, plan, 7, first.now_us + 1)

    assert left(store, Algorithm.SLIDING_LOG) == 5


@pytest.mark.parametrize("algorithm", [Algorithm.FIXED_WINDOW, Algorithm.SLIDING_LOG], ids=lambda one: one.value)
def test_what_belongs_to_a_window_that_is_over_does_not_come_back(store: StoreUnderTest, algorithm: Algorithm) -> None:
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
def test_a_bucket_that_may_have_been_full_meanwhile_gets_back_less_by_what_came_in(
    store: StoreUnderTest, algorithm: Algorithm
) -> None:
    """Ten a minute with a burst of one: what was charged is there again after six seconds, and must not come twice."""
    bucket = step(limit=10, algorithm=algorithm, burst=1)
    taken = take(store, call(bucket), 1)
    store.now_us += 6_000_000
    assert not store.ask(bucket).refused
    give_back(store, call(bucket), 1, taken.now_us)
    store.now_us += 1

    refused = store.ask(bucket)
    assert refused.refused
    assert refused.readings[0].retry_us == 6_000_000 - 1


@BUCKETS
def test_a_bucket_that_was_full_before_is_full_after_however_long_it_took(
    store: StoreUnderTest, algorithm: Algorithm
) -> None:
    bucket = step(limit=10, algorithm=algorithm)
    taken = take(store, call(bucket), 4)
    store.now_us += 7_654_321
    give_back(store, call(bucket), 4, taken.now_us)

    again = store.ask(step(limit=10, algorithm=algorithm, cost=0)).readings[0]
    assert (again.left, again.reset_us) == (10, 0)


@BUCKETS
def test_of_an_emptier_bucket_no_more_stays_charged_than_has_come_in_since(
    store: StoreUnderTest, algorithm: Algorithm
) -> None:
    bucket = step(limit=10, algorithm=algorithm)
    take(store, call(bucket), 6)
    taken = take(store, call(bucket), 4)
    store.now_us += 6_000_000  # one comes in
    give_back(store, call(bucket), 4, taken.now_us)

    assert left(store, algorithm) == 0 + 1 + 3


def test_a_log_with_refunds_and_returns_in_one_batch_stays_whole(store: StoreUnderTest) -> None:
    plan = store.store.prepare(call(step(limit=10, algorithm=Algorithm.SLIDING_LOG)))
    refund = store.store.prepare(call(step(limit=10, algorithm=Algorithm.SLIDING_LOG, cost=-1)))
    taken = store.answered(plan.at_most(4))[0]
    store.now_us += 1_000_000
    store.answered(plan, refund, plan.returned(2, taken.now_us), plan)

    assert left(store, Algorithm.SLIDING_LOG) in (5, 7)  # what is beside a refund of the same batch may stay charged
    store.answered(plan.returned(2, taken.now_us))
    assert left(store, Algorithm.SLIDING_LOG) >= 7
