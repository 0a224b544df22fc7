"""Batches of fixed windows: on the short path of the script and off it, every call gets the result of the oracle."""

from __future__ import annotations

import random

import pytest

from ratelimit_rls.core.model import Algorithm, Plan, StoreResult, Unit
from ratelimit_rls.store.embedded import EmbeddedStore
from ratelimit_rls.store.redis.deployment import decode_part_results, decode_results
from ratelimit_rls.store.redis.sharded_store import in_full
from ratelimit_rls.store.script_codec import EncodedPlan, decode_reply, make_layout
from tests.support.oracle import Oracle
from tests.support.stores import START_US, call, step

NOW_US = START_US + 12_500_000  # 52.5 s into a minute, 6 minutes and 52.5 s into an hour
SHORT = [NOW_US, 5, 7, 3]
FULL = [NOW_US, 0, 5, 0, 7_500_000, 7, 0, 3_187_500_000, 0, 3, 0, 500_000]


def encoded(plan: Plan) -> EncodedPlan[bytes]:
    return EncodedPlan(plan.keys, make_layout(plan.template, bytes, bytes))


BATCH = [encoded(call(step("a", 9), step("b", 9, unit=Unit.HOUR))), encoded(call(step("c", 9, unit=Unit.SECOND)))]


def test_short_reply_means_the_same_as_the_full_one() -> None:
    assert decode_reply(BATCH, SHORT) == decode_reply(BATCH, FULL)


def test_parts_that_pass_are_decoded_to_what_calls_need() -> None:
    calls = decode_reply(BATCH, SHORT)

    assert [in_full(part) for part in decode_part_results(BATCH, SHORT)] == calls
    assert decode_part_results(BATCH, FULL) == calls


@pytest.mark.parametrize("limits", [1, 2])
def test_short_reply_to_other_limits_is_an_error(limits: int) -> None:
    run = [encoded(call(*[step(f"{n}", algorithm=Algorithm.GCRA) for n in range(limits)]))]

    (result,) = decode_results(run, [NOW_US, *[5] * limits])
    (part,) = decode_part_results(run, [NOW_US, *[5] * limits])

    assert "malformed" in str(result)
    assert "malformed" in str(part)


def test_batches_equal_the_oracle() -> None:
    drawn = random.Random(11)
    clock = [START_US]
    store, oracle = EmbeddedStore(clock=lambda: clock[0]), Oracle()
    denied = after_a_denial = 0
    for _ in range(600):
        clock[0] += drawn.choice((0, 1_000, 400_000, 3_000_000))
        plans = [
            call(
                *(step(drawn.choice("abcd"), 6, unit=drawn.choice((Unit.SECOND, Unit.MINUTE))) for _ in range(limits)),
                shadow_mode=drawn.random() < 0.1,
            )
            for limits in drawn.choices((1, 2, 3), k=drawn.randint(1, 5))
        ]
        if drawn.random() < 0.1:  # so many that the key is read once
            plans = [call(step("hot", 100))] * drawn.randint(15, 40)
        expected = [oracle.decide(plan, clock[0]) for plan in plans]

        results = store.spend_now([store.prepare(plan) for plan in plans])

        assert results == expected
        denials = [result.denied for result in results if isinstance(result, StoreResult)]
        denied += sum(denials)
        after_a_denial += not denials[-1] and any(denials)
    assert denied > 150
    assert after_a_denial > 30
