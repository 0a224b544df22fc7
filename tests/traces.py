"""Traces of calls with an explicit clock, played on stores and by the textbook side by side."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ratelimit_rls.core.model import Plan
from tests.oracle import Oracle
from tests.stores import START_US, StoreUnderTest

_TRACE = itertools.count()


@dataclass(frozen=True)
class Moment:
    """A call, how long after the one before it comes, and how long its caller can wait."""

    wait_us: int
    plan: Plan
    patience_us: int | None = None


def replay(trace: Sequence[Moment], stores: Mapping[str, StoreUnderTest]) -> None:
    """Every answer of every store is the textbook's, to the microsecond.

    Each trace has keys of its own and begins at the same moment, so that a failure can be played again.
    """
    oracle = Oracle()
    prefix = b"%d:" % next(_TRACE)
    now_us = START_US
    for moment in trace:
        now_us += moment.wait_us
        expected = oracle.decide(moment.plan, now_us, moment.patience_us)
        plan = moment.plan._replace(keys=tuple(prefix + key for key in moment.plan.keys))
        for name, store in stores.items():
            store.now_us = now_us
            assert store.spend(plan, patience_us=moment.patience_us) == [expected], name
