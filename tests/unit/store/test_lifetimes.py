"""Expiry of states in the embedded store, on a virtual clock that also drives expiry."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ratelimit_rls.core.model import Algorithm, Unit
from tests.support.stores import StoreUnderTest, embedded_store, step

SECOND_US = 1_000_000
HOUR_US = 3600 * SECOND_US


@pytest.fixture
def store() -> Iterator[StoreUnderTest]:
    with embedded_store() as under_test:
        under_test.now_us -= under_test.now_us % (60 * SECOND_US)
        yield under_test


def test_a_new_window_gets_its_own_ttl(store: StoreUnderTest) -> None:
    store.now_us += 59_900_000
    store.ask(step(limit=3))
    store.now_us += 200_000  # the state of the previous minute still exists
    store.ask(step(limit=3, cost=3))

    store.now_us += 5 * SECOND_US
    assert not store.ask(step(limit=3)).readings[0].allowed


def test_a_look_does_not_shorten_the_ttl_of_a_sliding_log(store: StoreUnderTest) -> None:
    hit, look = (step(limit=2, algorithm=Algorithm.SLIDING_LOG, cost=cost) for cost in (1, 0))
    store.ask(hit)
    store.now_us += 30 * SECOND_US
    store.ask(hit)
    store.now_us += 31 * SECOND_US
    store.ask(look)

    store.now_us += 9 * SECOND_US
    assert store.ask(look).readings[0].left == 1


@pytest.mark.parametrize(
    "algorithm", [Algorithm.TOKEN_BUCKET, Algorithm.LEAKY_BUCKET, Algorithm.GCRA], ids=lambda algorithm: algorithm.value
)
def test_a_bucket_with_a_lowered_rate_does_not_expire_early(store: StoreUnderTest, algorithm: Algorithm) -> None:
    store.ask(step(limit=600, burst=600, unit=Unit.HOUR, algorithm=algorithm, cost=600))
    slow = step(limit=6, burst=600, unit=Unit.HOUR, algorithm=algorithm, cost=100)
    store.ask(slow)

    store.now_us += HOUR_US + 2 * SECOND_US
    # GCRA stores a time, not a count, and capacity booked until then is booked at any rate.
    assert store.ask(slow).readings[0].allowed is (algorithm is Algorithm.GCRA)
