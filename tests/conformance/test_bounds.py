"""Bounds of the algorithms."""

from __future__ import annotations

import pytest

from ratelimit_rls.core.model import Algorithm, Charge, Unit
from tests.support.stores import StoreUnderTest, step

SECOND_US = 1_000_000
HUGE = 2**32 - 1
BUCKETS = pytest.mark.parametrize(
    "algorithm", [Algorithm.TOKEN_BUCKET, Algorithm.LEAKY_BUCKET, Algorithm.GCRA], ids=lambda algorithm: algorithm.value
)


@pytest.mark.parametrize(
    "algorithm", [one for one in Algorithm if one is not Algorithm.GCRA], ids=lambda algorithm: algorithm.value
)
def test_debt_is_bounded(store: StoreUnderTest, algorithm: Algorithm) -> None:
    for _ in range(40):
        state = store.ask(step(limit=100, algorithm=algorithm, cost=HUGE, charge=Charge.ALWAYS)).readings[0]

    assert -(2**36) - 100 <= state.left <= -(2**35)


@BUCKETS
def test_waits_are_bounded(store: StoreUnderTest, algorithm: Algorithm) -> None:
    for _ in range(3):
        debt = step(limit=1, unit=Unit.YEAR, algorithm=algorithm, cost=HUGE, charge=Charge.ALWAYS)
        state = store.ask(debt).readings[0]

    assert state.reset_us == 2**51


def test_gcra_fraction_of_larger_limit_is_below_one_microsecond(store: StoreUnderTest) -> None:
    store.ask(step(limit=HUGE, unit=Unit.SECOND, algorithm=Algorithm.GCRA))

    look = step(limit=1, unit=Unit.SECOND, algorithm=Algorithm.GCRA, cost=0)
    assert store.ask(look).readings[0].retry_us <= 1


def test_sliding_log_stays_ordered_if_clock_is_set_back(store: StoreUnderTest) -> None:
    hit = step(limit=2, algorithm=Algorithm.SLIDING_LOG)
    store.ask(hit)
    store.now_us -= 30 * SECOND_US

    assert store.ask(hit).readings[0].reset_us == 90 * SECOND_US
    store.now_us += 70 * SECOND_US
    assert store.ask(step(limit=2, algorithm=Algorithm.SLIDING_LOG, cost=0)).readings[0].left == 0


def test_denied_call_has_a_denying_limit(store: StoreUnderTest) -> None:
    admitted, always = step("one key", 5, cost=3), step("one key", 5, cost=3, charge=Charge.ALWAYS)

    answer = store.ask(admitted, always)

    assert answer.denied
    assert [reading.allowed for reading in answer.readings] == [True, False]
    assert answer.readings[1].left == 2
