"""Store wrapper that measures the duration of every batch and records it in the trace that the batch belongs to.

It wraps the counters directly: calls that leases and the denial cache answer by themselves are not part of its batches.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from time import monotonic

from ratelimit_rls.core.model import Plan, StoreResult
from ratelimit_rls.core.refund import Refund
from ratelimit_rls.errors import StoreError
from ratelimit_rls.store.base import PreparedPlan, Store
from ratelimit_rls.telemetry.metrics import Metrics
from ratelimit_rls.telemetry.series import Durations
from ratelimit_rls.telemetry.traces import store_span

_ALL_ANSWERED = {StoreResult}


class InstrumentedStore:
    """A store whose batches are timed and traced."""

    def __init__(self, store: Store, name: str, metrics: Metrics, *, has_traces: bool) -> None:
        """`name` is the kind of store: `redis` or `embedded`."""
        self._store = store
        self._name = name
        self._has_traces = has_traces
        self._times = metrics.store_times
        self._times_answered = self._times.setdefault((name, ""), Durations())
        self.is_synchronous = store.is_synchronous

    def prepare(self, plan: Plan) -> PreparedPlan:
        return self._store.prepare(plan)

    def refund_of(self, prepared: PreparedPlan, refund: Refund) -> PreparedPlan:
        return self._store.refund_of(prepared, refund)

    async def spend(self, batch: Sequence[PreparedPlan]) -> list[StoreResult | StoreError]:
        span = store_span(self._name, len(batch)) if self._has_traces else None
        started_s = monotonic()
        results = await self._store.spend(batch)
        elapsed_s = monotonic() - started_s
        error = None if set(map(type, results)) == _ALL_ANSWERED else _first_error_type(results)
        if error is None:
            self._times_answered.observe(elapsed_s)
        else:
            self._times.setdefault((self._name, error), Durations()).observe(elapsed_s)
        if span is not None:
            span.end(error)
        return results

    def decode_key(self, key: Hashable) -> bytes:
        return self._store.decode_key(key)

    async def close(self) -> None:
        await self._store.close()


def _first_error_type(results: Sequence[StoreResult | StoreError]) -> str | None:
    """Return the type name of the first error."""
    return next((type(result).__name__ for result in results if isinstance(result, StoreError)), None)
