"""How long the embedded store keeps what, by a clock that expiry follows too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ratelimit_rls.core.model import Algorithm, Unit
from tests.stores import StoreUnderTest, embedded_store, step

SECOND_US = 1_000_000
HOUR_US = 3600 * SECOND_US


@pytest.fixture
def store() -> Iterator[StoreUnderTest]:
    with embedded_store() as under_test:
        under_test.now_us -= under_test.now_us % (60 * SECOND_US)
        yield under_test


def test_a_new_window_has_a_life_of_its_own(store: StoreUnderTest) -> None:
    store.now_us += 59_900_000
    store.ask(step(limit=3))
    store.now_us += 200_000  # the state of the minute before is still there
    store.ask(step(limit=3, cost=3))

    store.now_us += 5 * SECOND_US
    assert not store.ask(step(limit=3)).readings[0].allowed


def test_a_look_does_not_shorten_the_life_of_a_log(store: StoreUnderTest) -> None:
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
def test_a_bucket_that_was_made_slower_is_not_forgotten_at_its_old_pace(
    store: StoreUnderTest, algorithm: Algorithm
) -> None:
    store.ask(step(limit=600, burst=600, unit=Unit.HOUR, algorithm=algorithm, cost=600))
    slow = step(limit=6, burst=600, unit=Unit.HOUR, algorithm=algorithm, cost=100)
    store.ask(slow)

    store.now_us += HOUR_US + 2 * SECOND_US
    # GCRA remembers a moment, not a count, and what is booked until then is booked at any pace.
    assert store.ask(slow).readings[0].allowed is (algorithm is Algorithm.GCRA)
