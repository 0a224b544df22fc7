"""Where the algorithms stop to be exact, and what outlives what."""

from __future__ import annotations

import pytest

from ratelimit_rls.core.model import Algorithm, Charge, Unit
from tests.stores import StoreUnderTest, step

SECOND_US = 1_000_000
HUGE = 2**32 - 1
BUCKETS = pytest.mark.parametrize(
    "algorithm", [Algorithm.TOKEN_BUCKET, Algorithm.LEAKY_BUCKET, Algorithm.GCRA], ids=lambda algorithm: algorithm.value
)


@pytest.mark.parametrize(
    "algorithm", [one for one in Algorithm if one is not Algorithm.GCRA], ids=lambda algorithm: algorithm.value
)
def test_debt_stays_at_its_bound(store: StoreUnderTest, algorithm: Algorithm) -> None:
    for _ in range(40):
        told = store.ask(step(limit=100, algorithm=algorithm, cost=HUGE, charge=Charge.ALWAYS)).readings[0]

    assert -(2**36) - 100 <= told.left <= -(2**35)


@BUCKETS
def test_waits_stay_at_their_bound(store: StoreUnderTest, algorithm: Algorithm) -> None:
    for _ in range(3):
        debt = step(limit=1, unit=Unit.YEAR, algorithm=algorithm, cost=HUGE, charge=Charge.ALWAYS)
        told = store.ask(debt).readings[0]

    assert told.reset_us == 2**51


def test_gcra_parts_of_a_larger_limit_are_less_than_a_microsecond(store: StoreUnderTest) -> None:
    store.ask(step(limit=HUGE, unit=Unit.SECOND, algorithm=Algorithm.GCRA))

    look = step(limit=1, unit=Unit.SECOND, algorithm=Algorithm.GCRA, cost=0)
    assert store.ask(look).readings[0].retry_us <= 1


def test_a_log_keeps_its_order_when_the_clock_is_set_back(store: StoreUnderTest) -> None:
    hit = step(limit=2, algorithm=Algorithm.SLIDING_LOG)
    store.ask(hit)
    store.now_us -= 30 * SECOND_US

    assert store.ask(hit).readings[0].reset_us == 90 * SECOND_US
    store.now_us += 70 * SECOND_US
    assert store.ask(step(limit=2, algorithm=Algorithm.SLIDING_LOG, cost=0)).readings[0].left == 0


def test_a_call_that_was_refused_has_a_limit_that_says_so(store: StoreUnderTest) -> None:
    admitted, always = step("one key", 5, cost=3), step("one key", 5, cost=3, charge=Charge.ALWAYS)

    answer = store.ask(admitted, always)

    assert answer.refused
    assert [reading.allowed for reading in answer.readings] == [True, False]
    assert answer.readings[1].left == 2
