"""The example of docs/algorithms.md, "By the clock": ten a minute, ten at 00:00:50, ten more at 00:01:05."""

from __future__ import annotations

import pytest

from ratelimit_rls.core.model import Algorithm
from tests.stores import StoreUnderTest, step

SECOND_US = 1_000_000


@pytest.mark.parametrize(
    ("algorithm", "admitted", "retry_s"),
    [
        (Algorithm.FIXED_WINDOW, 10, None),
        (Algorithm.SLIDING_WINDOW, 0, 1),
        (Algorithm.SLIDING_LOG, 0, 45),
        (Algorithm.TOKEN_BUCKET, 2, 3),
        (Algorithm.LEAKY_BUCKET, 2, 3),
        (Algorithm.GCRA, 2, 3),
    ],
    ids=lambda value: getattr(value, "value", str(value)),
)
def test_the_second_rush_fares_as_documented(
    store: StoreUnderTest, algorithm: Algorithm, admitted: int, retry_s: int | None
) -> None:
    hit = step(limit=10, algorithm=algorithm)
    store.now_us += 50 * SECOND_US
    assert all(store.ask(hit).readings[0].allowed for _ in range(10))

    store.now_us += 15 * SECOND_US
    rush = [store.ask(hit).readings[0] for _ in range(10)]

    assert sum(reading.allowed for reading in rush) == admitted
    refusals = [reading for reading in rush if not reading.allowed]
    if retry_s is not None:
        assert refusals[0].retry_us == retry_s * SECOND_US
