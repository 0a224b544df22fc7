"""The pipeline: the way of a batch of calls from request messages to responses. `Pipeline.run` shows all of it.

    bytes ─► decode ─► admit ─► spend ─► decide ─► observe ─► encode ─► bytes
                          └──► respond at once             invalid, needs no store, has no time left, over capacity
                                 └──► respond when due     the store is late: the fallback decides

Every exception becomes a status here and nowhere else, and an error of one call never affects another.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from math import inf
from time import monotonic
from typing import Generic, TypeVar

import structlog

from ratelimit_rls.core.model import Decision, Outcome, StoreResult
from ratelimit_rls.errors import (
    BadRequest,
    CallerDeadlineExceeded,
    NotReady,
    Overloaded,
    StoreError,
    TooComplex,
)
from ratelimit_rls.h2.status import RpcError, StatusCode, message_too_large
from ratelimit_rls.pipeline.batch import Batch, BatchOfOne, DelayedResponse, Response
from ratelimit_rls.pipeline.codec import Codec
from ratelimit_rls.pipeline.deadlines import Deadlines
from ratelimit_rls.pipeline.limiter import PlannedCall, plans_to_spend
from ratelimit_rls.pipeline.observer import Observer
from ratelimit_rls.pipeline.pending_batch import PendingBatch
from ratelimit_rls.pipeline.request_cache import PreparedRequest
from ratelimit_rls.pipeline.request_id import validate_request_id
from ratelimit_rls.pipeline.throttle_queue import ThrottleQueue
from ratelimit_rls.telemetry.abuse import Abuse
from ratelimit_rls.telemetry.metrics import Metrics
from ratelimit_rls.telemetry.traces import TracedBatch

_log = structlog.get_logger()

_STORE_NOT_NEEDED = StoreError("the store is not needed for this call")

T = TypeVar("T")


class Pipeline(Generic[T]):
    """Decides the calls of one method. T is what its codec precomputes for the response to a request."""

    def __init__(
        self,
        codec: Codec[T],
        metrics: Metrics,
        throttle_queue: ThrottleQueue,
        deadlines: Deadlines,
        observer: Observer,
    ) -> None:
        self._codec = codec
        self._limiter = codec.limiter
        self._counters = metrics.service
        self._throttle_queue = throttle_queue
        self._deadlines = deadlines
        self._store_may_be_late = not self._limiter.is_synchronous
        self._observer = observer

    @property
    def max_message_bytes(self) -> int:
        """Longer messages are rejected, so that a transport need not receive or decompress more."""
        return self._codec.max_message_bytes

    @property
    def wants_metadata(self) -> bool:
        """Return True if a batch must have the metadata of its calls."""
        return self._observer.wants_metadata

    async def run(self, batch: Batch) -> None:
        """Decide a batch, and respond to each of its calls exactly once. Never raises."""
        try:
            traced = self._observer.begin(batch)
            requests = self._decode(batch.messages)
            pending = self._admit(batch, requests, traced)
            if self._store_may_be_late:
                self._deadlines.watch(pending, self._respond_late)
            places = self._reserve_throttling(pending) if self._codec.may_throttle else 0
            try:
                plans = plans_to_spend(pending.calls, pending.waits_us, pending.request_ids)
                results = await self._limiter.spend(plans)
                outcomes = self._limiter.decide(pending.calls, results, pending.wait_left_us, pending.answered)
                self._observer.decided(pending, outcomes)
                responses = self._encode(pending, outcomes)
            finally:
                if self._store_may_be_late:
                    self._deadlines.forget(pending)
                if places:
                    self._throttle_queue.release(places)
            self._respond(pending, responses)
        except Exception as error:
            # It is unknown whether the batch was counted, so its calls are not retried one by one.
            self._respond_rest(batch, self._to_error(error))

    async def check(self, message: bytes) -> Response:
        """Decide a single call without a deadline, and return its response."""
        call = BatchOfOne(message)
        await self.run(call)
        assert call.response is not None
        return call.response

    # ── decode ──

    def _decode(self, messages: Sequence[bytes]) -> list[PreparedRequest[T] | RpcError]:
        """Return the prepared request of each message, from the codec's cache or decoded now."""
        self._codec.refresh()
        lookup, decode = self._codec.lookup, self._decode_one
        return [lookup(message) or decode(message) for message in messages]

    def _decode_one(self, message: bytes) -> PreparedRequest[T] | RpcError:
        if len(message) > self._codec.max_message_bytes:
            self._counters.service_error += 1
            return message_too_large(self._codec.max_message_bytes)
        try:
            request = self._codec.decode(message)
        except Exception as error:
            return self._to_error(error)
        call = request.call
        if call.template.can_wait:
            self._codec.may_throttle = True
        if call.prepared is None:
            self._codec.may_skip_store = True
        return request

    # ── admit ──

    def _admit(
        self, batch: Batch, requests: list[PreparedRequest[T] | RpcError], traced: TracedBatch | None
    ) -> PendingBatch[T]:
        """Return the calls that wait for the store. The others get their response immediately."""
        begun_s = monotonic()
        due_s = min(batch.deadlines_s, default=inf) - self._throttle_queue.margin_s
        if traced is not None:
            for number in traced.spans:
                request = requests[number]
                if isinstance(request, PreparedRequest):
                    traced.planned(number, request.call.template)
        calls = [request.call for request in requests if isinstance(request, PreparedRequest)]
        if (
            len(calls) == len(requests) <= self._limiter.remaining_capacity
            and due_s > begun_s
            and batch.request_ids is None
            and not self._codec.messages_carry_request_ids
            and (not self._codec.may_skip_store or self._limiter.is_synchronous or _all_need_store(calls))
        ):
            return PendingBatch(batch, requests, calls, begun_s, due_s, traced)  # type: ignore[arg-type]  # no RpcError
        return self._admit_each(batch, requests, begun_s, traced)

    def _admit_each(
        self,
        batch: Batch,
        requests: list[PreparedRequest[T] | RpcError],
        begun_s: float,
        traced: TracedBatch | None,
    ) -> PendingBatch[T]:
        """Admit the calls of a batch one by one, and collect their request ids."""
        capacity = self._limiter.remaining_capacity
        sent_ids = batch.request_ids or [None] * len(requests)
        admitted: list[PreparedRequest[T]] = []
        numbers: list[int] = []
        ids: list[bytes | None] = []
        errors: list[tuple[int, Response]] = []
        without: list[tuple[int, PreparedRequest[T], StoreError]] = []
        for number, (request, sent_id) in enumerate(zip(requests, sent_ids, strict=True)):
            if isinstance(request, RpcError):
                errors.append((number, request))
            elif (id_error := self._check_id(sent_id)) is not None:
                errors.append((number, id_error))
            elif request.call.prepared is None:
                without.append((number, request, _STORE_NOT_NEEDED))
            elif (reason := self._skip_reason(batch.deadlines_s[number], begun_s, capacity)) is not None:
                without.append((number, request, reason))
            else:
                admitted.append(request)
                numbers.append(number)
                ids.append(request.request_id or sent_id)
                capacity -= 1
        self._respond_early(batch, [*errors, *self._decide_without_store(without, traced)], traced)
        deadlines_s = [batch.deadlines_s[number] for number in numbers]
        due_s = min(deadlines_s, default=inf) - self._throttle_queue.margin_s
        calls = [request.call for request in admitted]
        return PendingBatch(batch, admitted, calls, begun_s, due_s, traced, numbers, ids)

    def _check_id(self, sent_id: bytes | None) -> RpcError | None:
        try:
            if sent_id is not None:
                validate_request_id(sent_id)
        except BadRequest as error:
            return self._to_error(error)
        return None

    def _skip_reason(self, deadline_s: float, begun_s: float, capacity: int) -> StoreError | None:
        """Return why the store is not asked about a call that needs it; None if it is asked."""
        if deadline_s - self._throttle_queue.margin_s <= begun_s and not self._limiter.is_synchronous:
            return CallerDeadlineExceeded("the call arrived too late to be answered before its deadline")
        return Overloaded("too many calls wait for the store; try again later") if capacity <= 0 else None

    # ── decide without the store ──

    def _decide_without_store(
        self, without: Sequence[tuple[int, PreparedRequest[T], StoreError]], traced: TracedBatch | None
    ) -> list[tuple[int, Response]]:
        """Return the responses of calls that cannot wait for the store. None is delayed: there is no time for it."""
        if not without:
            return []
        calls = [request.call for _, request, _ in without]
        numbers = [number for number, _, _ in without]
        try:
            decisions = self._limiter.decide_without_store([(request.call, error) for _, request, error in without])
            self._observer.decided_without_store(traced, numbers, calls, decisions)
        except Exception as error:
            failed = self._to_error(error)
            return [(number, failed) for number in numbers]
        return [
            (number, self._encode_one(request, decision))
            for (number, request, _), decision in zip(without, decisions, strict=True)
        ]

    def _respond_late(self, pending: PendingBatch[T], now_s: float) -> None:
        """Respond to calls for which the store is late, before their deadlines."""
        late = pending.take_late(now_s, self._throttle_queue.margin_s)
        error = CallerDeadlineExceeded("the store did not answer before the caller's deadline")
        without = [(pending.numbers[index], pending.requests[index], error) for index in late]
        responses = self._decide_without_store(without, pending.traced)
        self._respond_early(pending.batch, responses, pending.traced)

    # ── throttle ──

    def _reserve_throttling(self, pending: PendingBatch[T]) -> int:
        """Set how long each call can be delayed. Return the number of reserved places in the throttle queue."""
        waits_us: list[int | None] = []
        places = 0
        for number, request in zip(pending.numbers, pending.requests, strict=True):
            wait_us = None
            if request.call.template.can_wait:
                deadline_s = pending.batch.deadlines_s[number]
                wait_us = self._throttle_queue.reserve(None if deadline_s == inf else deadline_s - pending.begun_s)
                places += wait_us != 0
            waits_us.append(wait_us)
        pending.waits_us = waits_us
        return places

    # ── encode ──

    def _encode(self, pending: PendingBatch[T], outcomes: Sequence[Outcome | StoreError]) -> list[Response]:
        encode = self._encode_one
        responses: list[Response] = [
            encode(request, outcome) for request, outcome in zip(pending.requests, outcomes, strict=True)
        ]
        if pending.waits_us is not None:
            for index, outcome in enumerate(outcomes):
                if isinstance(outcome, Decision) and outcome.wait_us:
                    responses[index] = self._delay(pending, index, outcome, responses[index])
        return responses

    def _encode_one(self, request: PreparedRequest[T], outcome: Outcome | StoreError) -> bytes | RpcError:
        try:
            if isinstance(outcome, StoreResult):
                return self._codec.encode_pass(request.call.template, outcome, request.response_template)
            if isinstance(outcome, StoreError):
                return self._to_error(outcome)
            return self._codec.encode(outcome, request.response_template)
        except Exception as error:
            return self._to_error(error)

    def _delay(self, pending: PendingBatch[T], index: int, decision: Decision, response: Response) -> Response:
        """Delay the response of a throttled call. The wait is counted from now.

        The store counts it from its own time, which is between sending and now. Later is the safe side: counted from
        sending, a call could be answered before its slot. This lateness must not cost a caller its deadline, so the
        elapsed time is subtracted from the longest wait.

        A call with a request id keeps its slot if its caller disconnects: a retry is not charged again, and uses it.
        """
        if not isinstance(response, bytes):
            return response
        assert pending.waits_us is not None
        max_us, elapsed_s = pending.waits_us[index], monotonic() - pending.begun_s
        latest_s = inf if max_us is None else max_us / 1e6 - elapsed_s
        wait_s = min(decision.wait_us / 1e6, latest_s)
        call = pending.calls[index]
        has_id = pending.request_ids is not None and pending.request_ids[index] is not None
        if has_id and decision.without_store is None:  # a local decision is not stored under the id
            return DelayedResponse(response, wait_s, object(), _no_refund, latest_s)
        give_back = partial(self._limiter.give_back, call, decision)
        return DelayedResponse(response, wait_s, _queue_key(call, decision), give_back, latest_s)

    # ── respond ──

    def _respond(self, pending: PendingBatch[T], responses: Sequence[Response]) -> None:
        """Send the responses of a batch, except to calls that were answered meanwhile."""
        batch, traced, answered = pending.batch, pending.traced, pending.answered
        if not answered and len(responses) == len(batch.messages):
            batch.respond_all(responses)
            self._observer.responded_all(batch, responses, traced)
        else:
            sent: list[tuple[int, Response]] = []
            for index, (number, response) in enumerate(zip(pending.numbers, responses, strict=True)):
                if index not in answered:
                    sent.append((number, response))
                elif isinstance(response, DelayedResponse):
                    self._throttle_queue.decline(response)
            self._respond_early(batch, sent, traced)
        if traced is not None:
            traced.detach()

    def _respond_early(
        self, batch: Batch, responses: Sequence[tuple[int, Response]], traced: TracedBatch | None
    ) -> None:
        for number, response in responses:
            batch.respond(number, response)
        self._observer.responded(batch, responses, traced)

    def _respond_rest(self, batch: Batch, error: RpcError) -> None:
        """Fail all calls that have no response yet."""
        numbers = batch.respond_rest(error)
        self._observer.responded(batch, [(number, error) for number in numbers], None)

    def _to_error(self, error: Exception) -> RpcError:
        match error:
            case Overloaded():  # a StoreError was counted as redis_error where it occurred
                return RpcError(StatusCode.RESOURCE_EXHAUSTED, str(error))
            case StoreError():
                return RpcError(StatusCode.UNAVAILABLE, str(error))
            case TooComplex():
                self._counters.service_error += 1
                return RpcError(StatusCode.INVALID_ARGUMENT, str(error), Abuse.MESSAGE_TOO_COMPLEX)
            case BadRequest():
                code, message = StatusCode.INVALID_ARGUMENT, str(error)
            case NotReady():
                code, message = StatusCode.UNAVAILABLE, str(error)
            case _:
                _log.error("rate_limit_call_failed", exc_info=error)
                code, message = StatusCode.INTERNAL, "internal error"
        self._counters.service_error += 1
        return RpcError(code, message)


async def _no_refund() -> None: ...


def _all_need_store(calls: Sequence[PlannedCall]) -> bool:
    return all(call.prepared is not None for call in calls)


def _queue_key(call: PlannedCall, decision: Decision) -> Hashable:
    """Return the queue of calls that wait for slots of one limit with the same cost: their slots are interchangeable.

    A call that waits for several limits has a queue of its own, since moving up for one may be too early for another.
    """
    assert call.prepared is not None
    sizes = [
        step.cost
        for status in decision.statuses
        for step, reading in zip(status.descriptor_plan.steps, status.readings, strict=True)
        if reading.wait_us
    ]
    return (call.prepared.keys[decision.delayed_by], sizes[0]) if len(sizes) == 1 else object()
