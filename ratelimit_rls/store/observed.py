"""A store whose every batch is timed, and told of in the trace that it belongs to.

It stands directly before the counters: what leases and remembered refusals answer by themselves is no batch of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic

from ratelimit_rls.core.model import Answer, Plan
from ratelimit_rls.core.refund import Refund
from ratelimit_rls.errors import StoreError
from ratelimit_rls.store.base import Prepared, Store
from ratelimit_rls.telemetry.collected import Durations
from ratelimit_rls.telemetry.metrics import Metrics
from ratelimit_rls.telemetry.traces import store_span

_ALL_ANSWERED = {Answer}


class Observed:
    def __init__(self, store: Store, name: str, metrics: Metrics) -> None:
        """`name` says which store it is: `redis` or `embedded`."""
        self._store = store
        self._name = name
        self._times = metrics.store_times
        self._times_answered = self._times.setdefault((name, ""), Durations())
        self.decides_here = store.decides_here

    def prepare(self, plan: Plan) -> Prepared:
        return self._store.prepare(plan)

    def opposite(self, prepared: Prepared, refund: Refund) -> Prepared:
        return self._store.opposite(prepared, refund)

    async def spend(self, batch: Sequence[Prepared]) -> list[Answer | StoreError]:
        span = store_span(self._name, len(batch))
        begun_s = monotonic()
        answers = await self._store.spend(batch)
        lasted_s = monotonic() - begun_s
        error = None if set(map(type, answers)) == _ALL_ANSWERED else _error_of(answers)
        if error is None:
            self._times_answered.observe(lasted_s)
        else:
            self._times.setdefault((self._name, error), Durations()).observe(lasted_s)
        if span is not None:
            span.end(error)
        return answers

    async def close(self) -> None:
        await self._store.close()


def _error_of(answers: Sequence[Answer | StoreError]) -> str | None:
    """The name of the first fault among them."""
    return next((type(answer).__name__ for answer in answers if isinstance(answer, StoreError)), None)
