"""The largest accepted call is decided by every store, even if all of its limits differ."""

from __future__ import annotations

from dataclasses import replace

from ratelimit_rls.core.plan import MAX_STATES
from tests.support.stores import StoreUnderTest, call, step


def test_call_with_maximum_number_of_different_limits(store: StoreUnderTest) -> None:
    ops = [step(f"k{number}", number + 1, cost=1) for number in range(MAX_STATES)]
    answer = store.ask(*ops)
    assert not answer.denied
    assert [reading.left for reading in answer.readings] == list(range(MAX_STATES))

    again = store.spend(call(*ops[:1]), call(*[one._replace(step=replace(one.step, cost=2)) for one in ops[1:]]))
    assert [one.denied for one in again] == [True, True]
