"""The calls of a batch that wait for the store, and which of them were answered meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from time import monotonic
from typing import Generic, TypeVar

from ratelimit_rls.pipeline.batch import Batch
from ratelimit_rls.pipeline.limiter import PlannedCall
from ratelimit_rls.pipeline.request_cache import PreparedRequest
from ratelimit_rls.telemetry.traces import TracedBatch

T = TypeVar("T")


class PendingBatch(Generic[T]):
    """Calls that were admitted to the store. All sequences have one element per admitted call.

    A call that is late gets the fallback decision of its rules. The batch still waits for the store: if it admitted the
    call, its hits stay charged, since that is unknown when the fallback decides. Only a throttling slot is refunded.
    """

    __slots__ = (
        "answered",
        "batch",
        "begun_s",
        "calls",
        "due_s",
        "numbers",
        "request_ids",
        "requests",
        "traced",
        "waits_us",
    )

    def __init__(
        self,
        batch: Batch,
        requests: Sequence[PreparedRequest[T]],
        calls: Sequence[PlannedCall],
        begun_s: float,
        due_s: float,
        traced: TracedBatch | None,
        numbers: Sequence[int] | None = None,
        request_ids: Sequence[bytes | None] | None = None,
    ) -> None:
        self.batch = batch
        self.requests = requests
        self.calls = calls
        self.begun_s = begun_s  # when it was decoded, on the monotonic clock
        self.due_s = due_s  # when the first call becomes late; inf: never
        self.traced = traced
        self.numbers = range(len(requests)) if numbers is None else numbers  # indexes in the batch
        self.request_ids = request_ids
        self.waits_us: Sequence[int | None] | None = None  # how long each can be throttled; None: nothing throttles
        self.answered: set[int] = set()  # indexes of calls that were late and have their response

    def wait_left_us(self, index: int) -> int | None:
        """Return how long a call can still be throttled; None: as long as its rules allow."""
        wait_us = self.waits_us[index] if self.waits_us is not None else None
        return None if wait_us is None else max(0, wait_us - int((monotonic() - self.begun_s) * 1e6))

    def take_late(self, now_s: float, margin_s: float) -> list[int]:
        """Return the indexes of calls whose deadline is less than `margin_s` away, and mark them as answered."""
        late: list[int] = []
        self.due_s = inf
        deadlines_s = self.batch.deadlines_s
        for index, number in enumerate(self.numbers):
            if index in self.answered:
                continue
            due_s = deadlines_s[number] - margin_s
            if due_s <= now_s:
                late.append(index)
            elif due_s < self.due_s:
                self.due_s = due_s
        self.answered.update(late)
        return late
