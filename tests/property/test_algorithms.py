"""Random traces with an explicit clock: every store agrees with the oracle to the microsecond."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ratelimit_rls.core.model import Algorithm, Charge, Unit
from tests.support.stores import StoreUnderTest, call, step
from tests.support.traces import Moment, replay

MAX_WAIT_US = 2**50
"""Maximum time to pay a debt: traces stay within the documented bounds of the algorithms."""

UNITS = (Unit.SECOND, Unit.MINUTE, Unit.HOUR, Unit.DAY, Unit.WEEK, Unit.MONTH, Unit.YEAR)
LARGEST = 2**32 - 1


class Form(NamedTuple):
    """Properties shared by all limits of a trace."""

    algorithm: Algorithm
    unit: Unit
    limit: int
    burst: int

    @property
    def window_us(self) -> int:
        return self.unit.seconds * 1_000_000

    @property
    def most(self) -> int:
        """Maximum cost of one call."""
        payable = MAX_WAIT_US // 40 * self.limit // self.window_us
        return max(1, min(LARGEST, 2 * max(self.limit, self.burst), payable))


# Values that depend on a form are drawn as functions of it: building a strategy with the bounds of its form for every
# trace takes Hypothesis longer than drawing from it.
OfForm = Callable[[Form], int]


def within(drawn: int, most: int) -> int:
    """Return the drawn number, mapped into the range from -most to most."""
    size = abs(drawn)
    return drawn if size <= most else size % (most + 1) * (1 if drawn > 0 else -1)


LIMITS = {
    largest: st.one_of(st.integers(1, 12), st.integers(1, largest), st.just(largest)) for largest in (10_000, LARGEST)
}

BURSTS: st.SearchStrategy[Callable[[int], int]] = st.one_of(
    st.just(lambda limit: limit),
    st.integers(1, LARGEST).map(lambda drawn: lambda limit: max(1, within(drawn, min(4 * limit, LARGEST)))),
)

WAITS: st.SearchStrategy[OfForm] = st.one_of(
    st.just(lambda form: 0),
    st.just(lambda form: 1),
    st.integers(0, Unit.YEAR.seconds * 1_000_000).map(
        lambda drawn: lambda form: within(drawn, form.window_us // max(1, min(form.limit, form.window_us)))
    ),
    st.integers(0, 3 * Unit.YEAR.seconds * 1_000_000).map(lambda drawn: lambda form: within(drawn, 3 * form.window_us)),
    st.sampled_from([-1, 0, 1]).map(lambda off: lambda form: form.window_us + off),
)

NOTABLE: list[OfForm] = [
    lambda form: 1,
    lambda form: form.limit,
    lambda form: form.burst or 1,
    lambda form: -1,
    lambda form: form.most,
]

COSTS: st.SearchStrategy[OfForm] = st.one_of(
    st.integers(0, 3).map(lambda cost: lambda form: cost),
    st.integers(-LARGEST, LARGEST).map(lambda drawn: lambda form: within(drawn, form.most)),
    st.sampled_from(NOTABLE).map(lambda notable: lambda form: min(notable(form), form.most)),
)

RARELY = (False, False, False, True)

KINDS = list(itertools.product("ab", Charge, RARELY, RARELY))
"""Combinations of key, charge, shadow and quota."""

MOMENTS = st.lists(
    st.tuples(WAITS, st.lists(st.tuples(st.sampled_from(KINDS), COSTS), min_size=1, max_size=3)),
    min_size=1,
    max_size=12,
)


@st.composite
def traces(draw: st.DrawFn, algorithm: Algorithm) -> list[Moment]:
    limit = draw(LIMITS[10_000 if algorithm is Algorithm.SLIDING_LOG else LARGEST])
    burst = draw(BURSTS)(limit) if algorithm.has_burst else 0
    form = Form(algorithm, draw(st.sampled_from(UNITS)), limit, burst)
    return [
        Moment(
            wait(form),
            call(
                *(
                    step(
                        key,
                        limit,
                        unit=form.unit,
                        algorithm=algorithm,
                        burst=burst,
                        cost=cost(form),
                        charge=charge,
                        shadow=shadow,
                        quota=quota,
                    )
                    for (key, charge, shadow, quota), cost in steps
                )
            ),
        )
        for wait, steps in draw(MOMENTS)
    ]


def check(algorithm: Algorithm, stores: dict[str, StoreUnderTest], examples: int) -> None:
    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(traces(algorithm))
    def matches_the_oracle(trace: list[Moment]) -> None:
        replay(trace, stores)

    matches_the_oracle()


@pytest.mark.parametrize("algorithm", list(Algorithm), ids=lambda algorithm: algorithm.value)
def test_every_store_matches_the_oracle(algorithm: Algorithm, stores: dict[str, StoreUnderTest]) -> None:
    check(algorithm, stores, 20)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("algorithm", list(Algorithm), ids=lambda algorithm: algorithm.value)
def test_every_store_matches_the_oracle_over_hundreds_of_traces(
    algorithm: Algorithm, stores: dict[str, StoreUnderTest]
) -> None:
    check(algorithm, stores, 250)
