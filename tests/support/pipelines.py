"""Pipelines for tests, and batches that record their responses."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from time import monotonic
from typing import Any

from ratelimit_rls.h2.status import RpcError
from ratelimit_rls.pipeline.batch import Response
from ratelimit_rls.pipeline.codec import Codec
from ratelimit_rls.pipeline.deadlines import Deadlines
from ratelimit_rls.pipeline.observer import Observer
from ratelimit_rls.pipeline.pipeline import Pipeline
from ratelimit_rls.pipeline.throttle_queue import ThrottleQueue
from ratelimit_rls.telemetry.denial_log import DenialLog
from ratelimit_rls.telemetry.metrics import Metrics
from ratelimit_rls.telemetry.traces import Traces


def new_pipeline(
    codec: Codec[Any],
    metrics: Metrics | None = None,
    throttle_queue: ThrottleQueue | None = None,
    *,
    method: str | None = None,
    deadlines: Deadlines | None = None,
    denial_log: DenialLog | None = None,
    traces: Traces | None = None,
) -> Pipeline[Any]:
    metrics = metrics or Metrics()
    observer = Observer(method, metrics, codec.limiter.recorder, denial_log, traces)
    return Pipeline(codec, metrics, throttle_queue or ThrottleQueue(10, 0.003), deadlines or Deadlines(), observer)


class RecordedBatch:
    """Batch that keeps the response of each call."""

    def __init__(
        self,
        messages: Sequence[bytes],
        deadlines_s: Sequence[float] | None = None,
        request_ids: Sequence[bytes | None] | None = None,
    ) -> None:
        self.messages = messages
        self.deadlines_s = [inf] * len(messages) if deadlines_s is None else deadlines_s
        self.request_ids = request_ids
        self.metadata = [()] * len(messages)
        self.received_s = monotonic()
        self.responses: dict[int, Response] = {}

    def respond(self, number: int, response: Response) -> None:
        assert number not in self.responses, "a call gets one response"
        self.responses[number] = response

    def respond_all(self, responses: Sequence[Response]) -> None:
        assert not self.responses, "a call gets one response"
        self.responses = dict(enumerate(responses))

    def respond_rest(self, error: RpcError) -> Sequence[int]:
        rest = [number for number in range(len(self.messages)) if number not in self.responses]
        self.responses |= dict.fromkeys(rest, error)
        return rest

    def in_order(self) -> list[Response]:
        assert len(self.responses) == len(self.messages), "every call gets a response"
        return [self.responses[number] for number in range(len(self.messages))]


async def responses(
    pipeline: Pipeline[Any],
    messages: Sequence[bytes],
    deadlines_s: Sequence[float] | None = None,
    request_ids: Sequence[bytes | None] | None = None,
) -> list[Response]:
    """Run a batch and return the response of each call."""
    batch = RecordedBatch(messages, deadlines_s, request_ids)
    await pipeline.run(batch)
    return batch.in_order()
