"""Guarantees of the algorithms."""

from __future__ import annotations

import pytest

from ratelimit_rls.core.model import Algorithm, Charge, Unit
from tests.support.stores import StoreUnderTest, step

SECOND_US = 1_000_000
MINUTE_US = 60 * SECOND_US
EVERY = pytest.mark.parametrize("algorithm", list(Algorithm), ids=lambda algorithm: algorithm.value)


@EVERY
def test_exactly_limit_hits_pass_at_once(store: StoreUnderTest, algorithm: Algorithm) -> None:
    states = [store.ask(step(limit=3, algorithm=algorithm)).readings[0] for _ in range(4)]

    assert [reading.left for reading in states] == [2, 1, 0, 0]
    assert [reading.allowed for reading in states] == [True, True, True, False]


@EVERY
@pytest.mark.parametrize("charge", list(Charge), ids=lambda charge: charge.value)
def test_retry_us_is_exact_to_the_microsecond(store: StoreUnderTest, algorithm: Algorithm, charge: Charge) -> None:
    hit = step(limit=7, algorithm=algorithm, cost=3, charge=charge)
    look = step(limit=7, algorithm=algorithm, cost=0, charge=Charge.ADMITTED)
    store.now_us += 12_345_678
    while (denial := store.ask(hit).readings[0]).allowed:
        store.now_us += 1_111
    assert denial.retry_us > 0

    # One microsecond early there is room for at most two, and a look does not change that.
    store.now_us += denial.retry_us - 1
    assert store.ask(look).readings[0].left < 3
    store.now_us += 1
    assert store.ask(hit).readings[0].allowed


@EVERY
def test_look_counts_nothing(store: StoreUnderTest, algorithm: Algorithm) -> None:
    for _ in range(5):
        look = store.ask(step(limit=3, algorithm=algorithm, cost=0)).readings[0]
        assert (look.left, look.allowed) == (3, True)


@EVERY
def test_look_verdict_depends_on_charge(store: StoreUnderTest, algorithm: Algorithm) -> None:
    store.ask(step(limit=3, algorithm=algorithm, cost=3))

    assert not store.ask(step(limit=3, algorithm=algorithm, cost=0)).readings[0].allowed
    assert store.ask(step(limit=3, algorithm=algorithm, cost=0, charge=Charge.ALWAYS)).readings[0].allowed
    store.ask(step(limit=3, algorithm=algorithm, cost=1, charge=Charge.ALWAYS))
    assert not store.ask(step(limit=3, algorithm=algorithm, cost=0, charge=Charge.ALWAYS)).readings[0].allowed


@EVERY
def test_refund_never_exceeds_the_limit(store: StoreUnderTest, algorithm: Algorithm) -> None:
    store.ask(step(limit=5, algorithm=algorithm, cost=5))

    assert store.ask(step(limit=5, algorithm=algorithm, cost=-2)).readings[0].left == 2
    assert store.ask(step(limit=5, algorithm=algorithm, cost=-100)).readings[0].left == 5
    assert store.ask(step(limit=5, algorithm=algorithm, cost=-1)).readings[0].left == 5
    assert store.ask(step("never used", limit=5, algorithm=algorithm, cost=-1)).readings[0].left == 5


@EVERY
def test_cost_above_limit_has_retry_never(store: StoreUnderTest, algorithm: Algorithm) -> None:
    assert store.ask(step(limit=5, algorithm=algorithm, cost=6)).readings[0].retry_us == -1
    assert store.ask(step(limit=5, algorithm=algorithm, cost=5)).readings[0].allowed


@EVERY
def test_charge_always_denies_until_debt_is_paid(store: StoreUnderTest, algorithm: Algorithm) -> None:
    report = step(limit=10, algorithm=algorithm, cost=25, charge=Charge.ALWAYS)
    ask = step(limit=10, algorithm=algorithm, cost=0, charge=Charge.ALWAYS)

    assert store.ask(ask).readings[0].allowed
    assert store.ask(report).readings[0].left == -15
    denied = store.ask(ask).readings[0]

    assert not denied.allowed
    store.now_us += denied.retry_us - 1
    assert not store.ask(ask).readings[0].allowed
    store.now_us += 1
    assert store.ask(ask).readings[0].allowed


@EVERY
def test_reset_us_is_exact_to_the_microsecond(store: StoreUnderTest, algorithm: Algorithm) -> None:
    store.now_us += 7_654_321
    used = store.ask(step(limit=4, algorithm=algorithm)).readings[0]

    store.now_us += used.reset_us - 1
    assert store.ask(step(limit=4, algorithm=algorithm, cost=0)).readings[0].left == 3
    store.now_us += 1
    assert store.ask(step(limit=4, algorithm=algorithm, cost=0)).readings[0].left == 4


@EVERY
def test_clock_set_back_frees_nothing(store: StoreUnderTest, algorithm: Algorithm) -> None:
    store.ask(step(limit=3, algorithm=algorithm, cost=3))

    store.now_us -= 90 * SECOND_US
    denied = store.ask(step(limit=3, algorithm=algorithm)).readings[0]

    assert not denied.allowed
    store.now_us += denied.retry_us
    assert store.ask(step(limit=3, algorithm=algorithm)).readings[0].allowed


@EVERY
def test_largest_limit_over_a_year_is_exact(store: StoreUnderTest, algorithm: Algorithm) -> None:
    limit = 10_000 if algorithm is Algorithm.SLIDING_LOG else 2**32 - 1
    everything = step(limit=limit, unit=Unit.YEAR, algorithm=algorithm, cost=limit)
    one = step(limit=limit, unit=Unit.YEAR, algorithm=algorithm)

    assert store.ask(everything).readings[0].left == 0
    denied = store.ask(one).readings[0]

    assert not denied.allowed
    store.now_us += denied.retry_us - 1
    assert not store.ask(one).readings[0].allowed
    store.now_us += 1
    assert store.ask(one).readings[0].allowed


def test_fixed_window_ends_with_the_clock(store: StoreUnderTest) -> None:
    store.now_us += 59 * SECOND_US
    store.ask(step(limit=3, cost=3))

    assert store.ask(step(limit=3)).readings[0].retry_us == SECOND_US
    store.now_us += SECOND_US
    assert store.ask(step(limit=3, cost=3)).readings[0].allowed


def test_sliding_window_weighs_previous_window(store: StoreUnderTest) -> None:
    hit = step(limit=100, algorithm=Algorithm.SLIDING_WINDOW)
    store.now_us += 30 * SECOND_US
    store.ask(step(limit=100, algorithm=Algorithm.SLIDING_WINDOW, cost=80))

    # A quarter into the next minute, three quarters of 80 still count.
    store.now_us += 45 * SECOND_US
    assert store.ask(hit).readings[0].left == 100 - 60 - 1


def test_sliding_log_frees_hits_after_one_window(store: StoreUnderTest) -> None:
    hit = step(limit=2, algorithm=Algorithm.SLIDING_LOG)
    store.ask(hit)
    store.now_us += 10 * SECOND_US
    store.ask(hit)

    assert store.ask(hit).readings[0].retry_us == 50 * SECOND_US
    store.now_us += 50 * SECOND_US
    assert store.ask(hit).readings[0].allowed
    assert store.ask(hit).readings[0].retry_us == 10 * SECOND_US


def test_sliding_log_refunds_newest_hits_first(store: StoreUnderTest) -> None:
    log = Algorithm.SLIDING_LOG
    store.ask(step(limit=9, algorithm=log, cost=3))
    store.now_us += SECOND_US
    store.ask(step(limit=9, algorithm=log, cost=3))
    store.now_us += SECOND_US

    # Four of six: all three of the second charge and one of the first, so only the first is left to expire.
    given_back = store.ask(step(limit=9, algorithm=log, cost=-4)).readings[0]
    assert given_back.left == 7
    assert given_back.reset_us == MINUTE_US - 2 * SECOND_US


@pytest.mark.parametrize("algorithm", [Algorithm.TOKEN_BUCKET, Algorithm.LEAKY_BUCKET, Algorithm.GCRA])
def test_burst_passes_at_once_and_refills_at_the_rate(store: StoreUnderTest, algorithm: Algorithm) -> None:
    burst = step(limit=60, burst=90, algorithm=algorithm, cost=90)
    assert store.ask(burst).readings[0].allowed

    assert store.ask(step(limit=60, burst=90, algorithm=algorithm)).readings[0].retry_us == SECOND_US
    store.now_us += 30 * SECOND_US
    assert store.ask(step(limit=60, burst=90, algorithm=algorithm, cost=30)).readings[0].left == 0


@EVERY
def test_changed_limit_keeps_count(store: StoreUnderTest, algorithm: Algorithm) -> None:
    store.ask(step(limit=10, algorithm=algorithm, burst=10, cost=10))

    assert not store.ask(step(limit=10, algorithm=algorithm, burst=10)).readings[0].allowed
    if algorithm in (Algorithm.FIXED_WINDOW, Algorithm.SLIDING_WINDOW, Algorithm.SLIDING_LOG):
        assert store.ask(step(limit=15, algorithm=algorithm, cost=5)).readings[0].left == 0
