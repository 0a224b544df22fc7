"""Records finished decisions, whichever API asked for them: metrics, hot keys and usage."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from time import monotonic
from typing import Protocol

from ratelimit_rls.core.model import Decision, Outcome, StoreResult
from ratelimit_rls.errors import StoreError
from ratelimit_rls.telemetry.hot_keys import HotKeys, ObservedCall
from ratelimit_rls.telemetry.metrics import MetricCounters, Metrics
from ratelimit_rls.telemetry.usage_recorder import UsageEntry, UsageRecorder


class RecordedCall(ObservedCall, Protocol):
    """A call with the counters of its template, and where its usage is recorded."""

    @property
    def metric_counters(self) -> MetricCounters: ...
    @property
    def usage_entry(self) -> UsageEntry | None: ...


class DecisionRecorder:
    """Passes each decision to everything that counts decisions."""

    def __init__(self, metrics: Metrics, hot_keys: HotKeys | None, usage_recorder: UsageRecorder | None) -> None:
        self._metrics = metrics
        self._hot_keys = hot_keys
        self._usage_recorder = usage_recorder

    def record(
        self,
        calls: Sequence[RecordedCall],
        outcomes: Sequence[Outcome | StoreError],
        begun_s: float,
        answered: Collection[int] = (),
    ) -> None:
        """Record a batch that was begun at `begun_s` of the monotonic clock.

        Calls in `answered`, by index, got another decision, which was recorded before.
        """
        record, record_pass = self._metrics.record, self._metrics.record_pass
        for index, (call, outcome) in enumerate(zip(calls, outcomes, strict=True)):
            if answered and index in answered:
                continue
            if outcome.__class__ is StoreResult:
                record_pass(call.template, outcome, call.metric_counters)
            elif outcome.__class__ is Decision:
                record(outcome, call.metric_counters)
        if self._hot_keys is not None:
            self._hot_keys.observe(calls, outcomes)
        if self._usage_recorder is not None:
            elapsed_s = monotonic() - begun_s
            self._usage_recorder.note([call.usage_entry for call in calls], outcomes, elapsed_s, answered)

    def record_without_store(self, calls: Sequence[RecordedCall], decisions: Sequence[Decision | StoreError]) -> None:
        """Record calls that did not wait for the store. Hot keys are those of the store, so these do not count."""
        for call, decision in zip(calls, decisions, strict=True):
            if isinstance(decision, Decision):
                self._metrics.record(decision, call.metric_counters)
        if self._usage_recorder is not None:
            self._usage_recorder.note([call.usage_entry for call in calls], decisions, 0.0)
