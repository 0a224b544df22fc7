"""The largest call that is taken is decided by every store, even if no two of its limits are alike."""

from __future__ import annotations

from dataclasses import replace

from ratelimit_rls.core.plan import MOST_STATES
from tests.stores import StoreUnderTest, call, step


def test_as_many_different_limits_as_one_call_may_have(store: StoreUnderTest) -> None:
    asked = [step(f"k{number}", number + 1, cost=1) for number in range(MOST_STATES)]
    answer = store.ask(*asked)
    assert not answer.refused
    assert [reading.left for reading in answer.readings] == list(range(MOST_STATES))

    again = store.spend(call(*asked[:1]), call(*[one._replace(step=replace(one.step, cost=2)) for one in asked[1:]]))
    assert [one.refused for one in again] == [True, True]
