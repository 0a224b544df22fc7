"""Observes the calls of one method: decisions, durations, status codes, denials and the spans of sampled calls.

This is the only place on the path of a batch that records decisions and responses. `RateLimiter.check` records the
calls of the admin API and of simulations; errors are counted where they occur. Calls are answered in batches, so a
batch is measured as one; only calls answered early are measured separately.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from time import monotonic, time_ns
from typing import Any

import structlog

from ratelimit_rls.core.decision import decision_of
from ratelimit_rls.core.model import Decision, Outcome
from ratelimit_rls.errors import StoreError
from ratelimit_rls.h2.status import RpcError
from ratelimit_rls.pipeline.batch import Batch, DelayedResponse, Response
from ratelimit_rls.pipeline.limiter import PlannedCall
from ratelimit_rls.pipeline.pending_batch import PendingBatch
from ratelimit_rls.telemetry.decision_recorder import DecisionRecorder
from ratelimit_rls.telemetry.denial_log import DenialLog
from ratelimit_rls.telemetry.metrics import CallTimes, Metrics
from ratelimit_rls.telemetry.traces import TracedBatch, Traces

_ALL_ANSWERED = {bytes}

_log = structlog.get_logger()


class Observer:
    """Records the calls of one method."""

    def __init__(
        self,
        method: str | None,
        metrics: Metrics,
        recorder: DecisionRecorder,
        denial_log: DenialLog | None = None,
        traces: Traces | None = None,
    ) -> None:
        """`method` is the full name of the gRPC method; None if the calls are not gRPC calls, and have no durations."""
        self._method = method or ""
        self._times = CallTimes() if method is None else metrics.calls.setdefault(method, CallTimes())
        self._recorder = recorder
        self._denial_log = denial_log
        self._traces = traces
        self._tracing_failed = False

    @property
    def wants_metadata(self) -> bool:
        return self._traces is not None

    def begin(self, batch: Batch) -> TracedBatch | None:
        """Begin the spans of a batch, in the task that decides it; None if there are no traces."""
        if self._traces is None:
            return None
        received_ns = time_ns() - int((monotonic() - batch.received_s) * 1e9)
        try:
            return self._traces.batch(self._method, batch.metadata, received_ns)
        except Exception:
            if not self._tracing_failed:  # once: it may concern every batch
                self._tracing_failed = True
                _log.exception("tracing_failed", method=self._method)
            return None

    def decided(self, pending: PendingBatch[Any], outcomes: Sequence[Outcome | StoreError]) -> None:
        """Record the outcomes of a batch, except those of calls that were answered before."""
        self._recorder.record(pending.calls, outcomes, pending.begun_s, pending.answered)
        if pending.traced is not None or self._denial_log is not None:
            self._record_decisions(pending.traced, pending.numbers, pending.calls, outcomes, pending.answered)

    def decided_without_store(
        self,
        traced: TracedBatch | None,
        numbers: Sequence[int],
        calls: Sequence[PlannedCall],
        decisions: Sequence[Decision | StoreError],
    ) -> None:
        """Record the decisions of calls that did not wait for the store. `numbers` are their indexes in the batch."""
        self._recorder.record_without_store(calls, decisions)
        self._record_decisions(traced, numbers, calls, decisions)

    def responded(self, batch: Batch, responses: Sequence[tuple[int, Response]], traced: TracedBatch | None) -> None:
        """Record responses, by the index of their calls."""
        elapsed_s = monotonic() - batch.received_s
        for number, response in responses:
            self._count(response, elapsed_s)
            self._end_span(traced, number, response)

    def responded_all(self, batch: Batch, responses: Sequence[Response], traced: TracedBatch | None) -> None:
        """Record the responses of a batch of which no call was answered before."""
        elapsed_s = monotonic() - batch.received_s
        if set(map(type, responses)) == _ALL_ANSWERED:
            self._times.answered(elapsed_s, len(responses))
        else:
            for response in responses:
                self._count(response, elapsed_s)
        if traced is not None:
            for number in traced.spans:
                self._end_span(traced, number, responses[number])

    def _record_decisions(
        self,
        traced: TracedBatch | None,
        numbers: Sequence[int],
        calls: Sequence[PlannedCall],
        outcomes: Sequence[Outcome | StoreError],
        skipped: Collection[int] = (),
    ) -> None:
        """Record outcomes in their spans, and some denials in the log. `skipped` are indexes into `numbers`."""
        log = self._denial_log if self._denial_log is not None and self._denial_log.has_lines_left else None
        if (traced is None or not traced.spans) and log is None:
            return
        recorded = [
            (number, call, outcome)
            for index, (number, call, outcome) in enumerate(zip(numbers, calls, outcomes, strict=True))
            if not isinstance(outcome, StoreError) and index not in skipped
        ]
        if traced is not None:
            for number, call, outcome in recorded:
                if number in traced.spans:
                    decision = outcome if isinstance(outcome, Decision) else decision_of(call.template, outcome)
                    traced.decided(number, decision)
        if log is not None:
            decisions = [(number, outcome) for number, _, outcome in recorded if isinstance(outcome, Decision)]
            log.record(decisions, traced.ids if traced is not None else lambda _: None)

    def _count(self, response: Response, elapsed_s: float) -> None:
        if isinstance(response, RpcError):
            self._times.failed(elapsed_s, response.code.name)
        elif isinstance(response, DelayedResponse):
            self._times.answered(elapsed_s + response.wait_s, 1)
        else:
            self._times.answered(elapsed_s, 1)

    @staticmethod
    def _end_span(traced: TracedBatch | None, number: int, response: Response) -> None:
        if traced is None:
            return
        if isinstance(response, RpcError):
            traced.ended(number, response.code.name, response.message)
        elif isinstance(response, DelayedResponse):
            traced.ended(number, in_s=response.wait_s)
        else:
            traced.ended(number)
