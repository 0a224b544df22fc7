"""What is measured of calls: how long they took, how they ended, and the spans of those that are sampled.

Calls are answered in batches, so a batch is measured at once; only whoever was answered apart is counted apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic, time_ns

from ratelimit_rls.telemetry.metrics import CallTimes, Metrics
from ratelimit_rls.telemetry.traces import Metadata, TracedBatch, Traces
from ratelimit_rls.transport.grpc.door import Answered, Failure, Held

_ALL_ANSWERED = {bytes}


class Observer:
    """Of the calls of one method."""

    def __init__(self, method: str, metrics: Metrics, traces: Traces | None) -> None:
        self._method = method
        self._times = metrics.calls.setdefault(method, CallTimes())
        self._traces = traces

    @property
    def wants_metadata(self) -> bool:
        return self._traces is not None

    def batch(self, received_s: float, metadata: Sequence[Metadata]) -> ObservedBatch:
        """To be called in the task that answers it. `metadata` is each call's, where it is wanted."""
        traced = None
        if self._traces is not None:
            received_ns = time_ns() - int((monotonic() - received_s) * 1e9)
            traced = self._traces.batch(self._method, metadata, received_ns)
        return ObservedBatch(self._times, received_s, traced)


class ObservedBatch:
    __slots__ = ("_received_s", "_times", "traced")

    def __init__(self, times: CallTimes, received_s: float, traced: TracedBatch | None) -> None:
        self._times = times
        self._received_s = received_s
        self.traced = traced

    def answered(self, answers: Sequence[Answered | None]) -> None:
        """The calls of the batch have their answers; those with None had them before."""
        lasted_s = monotonic() - self._received_s
        if set(map(type, answers)) == _ALL_ANSWERED:
            self._times.answered(lasted_s, len(answers))
        else:
            for answer in answers:
                self._count(answer, lasted_s)
        if self.traced is not None:
            for number in self.traced.spans:
                self._end_span(number, answers[number])
            self.traced.over()

    def answered_apart(self, number: int, answer: bytes | Failure) -> None:
        """One of the batch, before the others."""
        self._count(answer, monotonic() - self._received_s)
        self._end_span(number, answer)

    def _count(self, answer: Answered | None, lasted_s: float) -> None:
        if isinstance(answer, Failure):
            self._times.failed(lasted_s, answer.code.name)
        elif isinstance(answer, Held):
            self._times.answered(lasted_s + answer.wait_s, 1)
        elif answer is not None:
            self._times.answered(lasted_s, 1)

    def _end_span(self, number: int, answer: Answered | None) -> None:
        if self.traced is None or answer is None:
            return
        if isinstance(answer, Failure):
            self.traced.ended(number, answer.code.name, answer.message)
        else:
            self.traced.ended(number, in_s=answer.wait_s if isinstance(answer, Held) else 0.0)
