"""Over random traces with an explicit clock, every store answers what the textbook says, to the microsecond."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ratelimit_rls.core.model import Algorithm, Charge, Unit
from tests.stores import StoreUnderTest, call, step
from tests.traces import Moment, replay

LONGEST_WAIT_US = 2**50
"""Traces stay within the bounds the algorithms state: no debt takes longer than this to pay."""

UNITS = (Unit.SECOND, Unit.MINUTE, Unit.HOUR, Unit.DAY, Unit.WEEK, Unit.MONTH, Unit.YEAR)


@st.composite
def steps(draw: st.DrawFn, algorithm: Algorithm, unit: Unit, limit: int, burst: int):  # type: ignore[no-untyped-def]
    most = max(1, min(2**32 - 1, 2 * max(limit, burst), LONGEST_WAIT_US // 40 * limit // (unit.seconds * 1_000_000)))
    cost = draw(
        st.one_of(
            st.integers(0, 3),
            st.integers(-most, most),
            st.sampled_from([1, limit, burst or 1, -1, most]).map(lambda cost: min(cost, most)),
        )
    )
    return step(
        draw(st.sampled_from("ab")),
        limit,
        unit=unit,
        algorithm=algorithm,
        burst=burst,
        cost=cost,
        charge=draw(st.sampled_from(Charge)),
        shadow=draw(st.booleans()) and draw(st.booleans()),
        quota=draw(st.booleans()) and draw(st.booleans()),
    )


@st.composite
def traces(draw: st.DrawFn, algorithm: Algorithm) -> list[Moment]:
    unit = draw(st.sampled_from(UNITS))
    window_us = unit.seconds * 1_000_000
    largest = 10_000 if algorithm is Algorithm.SLIDING_LOG else 2**32 - 1
    limit = draw(st.one_of(st.integers(1, 12), st.integers(1, largest), st.just(largest)))
    burst = draw(st.one_of(st.just(limit), st.integers(1, min(4 * limit, 2**32 - 1)))) if algorithm.has_burst else 0
    waits = st.one_of(
        st.just(0),
        st.just(1),
        st.integers(0, window_us // max(1, min(limit, window_us))),
        st.integers(0, 3 * window_us),
        st.sampled_from([window_us - 1, window_us, window_us + 1]),
    )
    one_call = st.lists(steps(algorithm, unit, limit, burst), min_size=1, max_size=3).map(lambda found: call(*found))
    return draw(st.lists(st.builds(Moment, waits, one_call), min_size=1, max_size=12))


def check(algorithm: Algorithm, stores: dict[str, StoreUnderTest], examples: int) -> None:
    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(traces(algorithm))
    def answers_as_the_textbook(trace: list[Moment]) -> None:
        replay(trace, stores)

    answers_as_the_textbook()


@pytest.mark.parametrize("algorithm", list(Algorithm), ids=lambda algorithm: algorithm.value)
def test_every_store_answers_as_the_textbook(algorithm: Algorithm, stores: dict[str, StoreUnderTest]) -> None:
    check(algorithm, stores, 20)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("algorithm", list(Algorithm), ids=lambda algorithm: algorithm.value)
def test_every_store_answers_as_the_textbook_over_thousands_of_traces(
    algorithm: Algorithm, stores: dict[str, StoreUnderTest]
) -> None:
    check(algorithm, stores, 1000)
