"""Traces of calls with an explicit clock, replayed on stores and on the oracle."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ratelimit_rls.core.model import Plan, StoreResult
from tests.support.oracle import Oracle
from tests.support.stores import START_US

_TRACE = itertools.count()


@dataclass(frozen=True)
class Moment:
    """A call, its delay after the previous one, and how long its caller can wait."""

    wait_us: int
    plan: Plan
    max_wait_us: int | None = None


class ReplayingStore(Protocol):
    """A store with a manual clock."""

    now_us: int

    def spend(self, plan: Plan, /, *, max_wait_us: int | None = None) -> list[StoreResult]: ...


def replay(trace: Sequence[Moment], stores: Mapping[str, ReplayingStore]) -> None:
    """Assert that every result of every store equals the oracle's, to the microsecond.

    Each trace has its own keys and starts at the same time, so that a failure can be reproduced.
    """
    oracle = Oracle()
    prefix = b"%d:" % next(_TRACE)
    now_us = START_US
    for moment in trace:
        now_us += moment.wait_us
        expected = oracle.decide(moment.plan, now_us, moment.max_wait_us)
        plan = moment.plan._replace(keys=tuple(prefix + key for key in moment.plan.keys))
        for name, store in stores.items():
            store.now_us = now_us
            assert store.spend(plan, max_wait_us=moment.max_wait_us) == [expected], name
