"""Random traces with penalties, warnings and throttling: every store agrees with the oracle to the microsecond."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ratelimit_rls.core.model import Algorithm, Charge, Penalty, Unit, WarnAt
from tests.support.stores import KeyedOp, MonitoredDescriptor, StoreUnderTest, monitored_call, step
from tests.support.traces import Moment, replay

SECOND_US = 1_000_000
LIMITS = ("bucket", "window", "queue and window", "two buckets")


@st.composite
def descriptors(
    draw: st.DrawFn, key: str, limits: str, delay_us: int, watchers: tuple[Penalty | WarnAt | None, ...]
) -> MonitoredDescriptor:
    """Draw the descriptors of one client: the limits are fixed, the calls vary."""
    cost = draw(st.sampled_from([1, 1, 1, 1, 2, 4, 0, -1]))
    charge = Charge.ADMITTED if delay_us else draw(st.sampled_from(Charge))

    def bucket(algorithm: Algorithm, limit: int, burst: int) -> KeyedOp:
        return step(
            key,
            limit,
            unit=Unit.SECOND,
            algorithm=algorithm,
            burst=burst,
            cost=cost,
            charge=charge,
            max_delay_us=delay_us,
        )

    gcra, leaky = bucket(Algorithm.GCRA, 2, 3), bucket(Algorithm.LEAKY_BUCKET, 5, 2)
    window = step(key, 4, unit=Unit.SECOND, cost=cost, charge=charge)
    ops = dict(zip(LIMITS, ((gcra,), (window,), (leaky, window), (gcra, leaky)), strict=True))[limits]
    return MonitoredDescriptor(ops, tuple(watcher for watcher in watchers if watcher is not None))


@st.composite
def traces(draw: st.DrawFn) -> list[Moment]:
    penalty = draw(
        st.builds(
            Penalty,
            st.sampled_from([SECOND_US, 5 * SECOND_US, 60 * SECOND_US]),
            st.integers(1, 3),
            st.sampled_from([(1,), (1, 2, 4, 8), (3, 3), (2, 5)]),
        )
        | st.none()
    )
    warn_at = draw(st.builds(WarnAt, st.sampled_from([200, 500, 740, 990])) | st.none())
    delay_us = draw(st.sampled_from([0, 1, SECOND_US // 2, 3 * SECOND_US]))
    limits = draw(st.sampled_from(LIMITS))
    one = descriptors("a", limits, delay_us, (penalty, warn_at))
    other = descriptors("b", limits, 0, (warn_at,))
    calls = st.one_of(one.map(monitored_call), st.tuples(one, other).map(lambda found: monitored_call(*found)))
    waits = st.one_of(
        st.just(0),
        st.just(0),
        st.integers(0, SECOND_US),
        st.sampled_from([1, SECOND_US // 5, SECOND_US // 2, SECOND_US - 1, SECOND_US, SECOND_US + 1, 4 * SECOND_US]),
    )
    patience = st.one_of(st.none(), st.none(), st.sampled_from([0, 1, SECOND_US // 2, 2**32 - 1]))
    return draw(st.lists(st.builds(Moment, waits, calls, patience), min_size=1, max_size=30))


def check(stores: dict[str, StoreUnderTest], examples: int) -> None:
    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(traces())
    def matches_the_oracle(trace: list[Moment]) -> None:
        replay(trace, stores)

    matches_the_oracle()


def test_every_store_matches_the_oracle(stores: dict[str, StoreUnderTest]) -> None:
    check(stores, 15)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_store_matches_the_oracle_over_hundreds_of_traces(stores: dict[str, StoreUnderTest]) -> None:
    check(stores, 150)
