"""The pipeline with a slow store: immediate responses, expired deadlines, and late results."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from datetime import UTC, datetime
from math import inf
from typing import Any

import pytest
from structlog.testing import capture_logs

from ratelimit_rls.api.rls.codec import RlsCodec
from ratelimit_rls.core.model import OnStoreFailure, Plan, StoreResult
from ratelimit_rls.core.plan import Policy
from ratelimit_rls.core.refund import Refund
from ratelimit_rls.errors import StoreError, StoreUnavailable
from ratelimit_rls.h2.status import RpcError, StatusCode
from ratelimit_rls.pipeline import pipeline as pipeline_module
from ratelimit_rls.pipeline.batch import DelayedResponse, Response
from ratelimit_rls.pipeline.deadlines import Deadlines
from ratelimit_rls.pipeline.fallback import Fallback
from ratelimit_rls.pipeline.limiter import RateLimiter
from ratelimit_rls.pipeline.pending_batch import PendingBatch
from ratelimit_rls.pipeline.throttle_queue import ThrottleQueue
from ratelimit_rls.protos.messages import RateLimitRequest, RateLimitResponse
from ratelimit_rls.rules.active_rules import ActiveRules
from ratelimit_rls.rules.compile import compile_documents
from ratelimit_rls.store.base import PreparedPlan
from ratelimit_rls.store.embedded import EmbeddedStore
from ratelimit_rls.telemetry.denial_log import DenialLog
from ratelimit_rls.telemetry.metrics import Metrics
from tests.support.pipelines import RecordedBatch, new_pipeline, responses

OK, OVER_LIMIT = 1, 2
MARGIN_S = 0.003
NOW_S = 50.0
START_US = 1_786_000_000_000_000

RULES = b"""
domain: edge
descriptors:
  - key: user
    rate_limit: {unit: hour, requests_per_unit: 2}
  - key: lax
    on_store_failure: allow
    rate_limit: {unit: hour, requests_per_unit: 2}
  - key: strict
    on_store_failure: deny
    rate_limit: {unit: hour, requests_per_unit: 2}
  - key: local
    on_store_failure: local
    rate_limit: {unit: hour, requests_per_unit: 2}
  - key: slow
    on_store_failure: allow
    action: throttle
    max_delay: 1m
    rate_limit: {unit: minute, requests_per_unit: 60, algorithm: leaky_bucket, burst: 1}
  - key: free
    rate_limit: {unlimited: true}
"""


class FarStore:
    """Remote store whose batches wait until the test releases them."""

    is_synchronous = False

    def __init__(self) -> None:
        self.near = EmbeddedStore(clock=lambda: START_US)
        self.gate = asyncio.Event()
        self.fault: StoreError | None = None
        self.sent = 0

    def prepare(self, plan: Plan) -> PreparedPlan:
        return self.near.prepare(plan)

    def refund_of(self, prepared: PreparedPlan, refund: Refund) -> PreparedPlan:
        return self.near.refund_of(prepared, refund)

    async def spend(self, batch: Sequence[PreparedPlan]) -> list[StoreResult | StoreError]:
        self.sent += len(batch)
        await self.gate.wait()
        return [self.fault] * len(batch) if self.fault else await self.near.spend(batch)

    def decode_key(self, key: Hashable) -> bytes:
        return self.near.decode_key(key)

    async def close(self) -> None: ...


class ManualDeadlines(Deadlines):
    """Deadlines without a timer: a test makes calls due."""

    def __init__(self) -> None:
        super().__init__()
        self.last: PendingBatch[Any] | None = None  # that was watched

    def watch(self, pending: Any, on_due: Callable[[Any, float], None]) -> None:
        self.last = pending
        self._pending[pending] = on_due

    def expire(self, pending: PendingBatch[Any], now_s: float) -> None:
        if pending in self._pending:
            self._pending[pending](pending, now_s)


class Sent:
    """A batch in the pipeline."""

    def __init__(self, batch: RecordedBatch, task: asyncio.Future[None], deadlines: ManualDeadlines) -> None:
        self._batch = batch
        self._task = task
        self._deadlines = deadlines
        assert deadlines.last is not None
        self._pending = deadlines.last
        self._seen: set[int] = set()

    @property
    def due_s(self) -> float:
        return self._pending.due_s

    def due(self, after_s: float) -> dict[int, int | StatusCode]:
        """Return the responses since the last look, at a later time."""
        self._deadlines.expire(self._pending, NOW_S + after_s)
        return self._new()

    async def rest(self) -> list[int | StatusCode | None]:
        """Wait for the store. Return the response of each call, None for those that were returned before."""
        await self._task
        new = self._new()
        assert len(self._seen) == len(self._batch.messages)
        return [new.get(number) for number in range(len(self._batch.messages))]

    def _new(self) -> dict[int, int | StatusCode]:
        new = {number: response for number, response in self._batch.responses.items() if number not in self._seen}
        self._seen |= new.keys()
        return {number: outcome(response) for number, response in sorted(new.items())}


class Harness:
    def __init__(self, max_in_flight: int = 100) -> None:
        self.store = FarStore()
        self.metrics = Metrics()
        self.rules = ActiveRules()
        tree = compile_documents({"rules.yaml": RULES}).tree
        self.rules.swap(tree, digest="", files=1, loaded_at=datetime.now(UTC))
        self.limiter = RateLimiter(
            self.rules,
            self.store,
            self.metrics,
            Policy(on_store_failure=OnStoreFailure.ERROR),
            Fallback(self.metrics, clock=lambda: START_US),
            max_in_flight=max_in_flight,
        )
        self.throttle_queue = ThrottleQueue(10, MARGIN_S)
        self.deadlines = ManualDeadlines()
        self.pipeline = new_pipeline(
            RlsCodec(self.limiter),
            self.metrics,
            self.throttle_queue,
            deadlines=self.deadlines,
            denial_log=DenialLog(100),
        )

    async def ask(self, *messages: bytes, left_s: float | Sequence[float] = inf) -> Sent:
        """Begin a batch; it waits for the store, unless the gate is open."""
        lefts_s = [left_s] * len(messages) if isinstance(left_s, float) else left_s
        batch = RecordedBatch(messages, [NOW_S + left for left in lefts_s])
        task = asyncio.ensure_future(self.pipeline.run(batch))
        await asyncio.sleep(0)
        return Sent(batch, task, self.deadlines)

    async def answers(self, *messages: bytes) -> list[Response]:
        """Run a batch to its end; the gate must be open."""
        return await responses(self.pipeline, messages)

    def stat(self, name: str) -> int:
        return self.metrics.names()[f"ratelimit.{name}"]

    def gauge(self) -> int:
        return dict(self.limiter.gauges())["ratelimit.store.calls_in_flight"]


@pytest.fixture(autouse=True)
def _moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_module, "monotonic", lambda: NOW_S)


def message(*keys: str) -> bytes:
    request = RateLimitRequest(domain="edge")
    for key in keys:
        request.descriptors.add().entries.add(key=key, value="v")
    return bytes(request.SerializeToString())


USER, LAX, STRICT, LOCAL, SLOW, FREE = (message(key) for key in ("user", "lax", "strict", "local", "slow", "free"))


def outcome(response: Response) -> int | StatusCode:
    """Return the overall code, or the status, of a response."""
    if isinstance(response, RpcError):
        return response.code
    assert isinstance(response, bytes)
    return int(RateLimitResponse.FromString(response).overall_code)


async def test_expired_call_gets_its_fallback_while_others_wait() -> None:
    harness = Harness()
    sent = await harness.ask(USER, LAX, STRICT, LOCAL, USER, LAX, left_s=[0.02, 0.02, 0.02, 0.02, 1.0, inf])
    assert sent.due_s == pytest.approx(NOW_S + 0.017)
    assert sent.due(0.016) == {}
    assert sent.due(0.018) == {0: StatusCode.UNAVAILABLE, 1: OK, 2: OVER_LIMIT, 3: OK}
    assert sent.due_s == pytest.approx(NOW_S + 0.997)
    assert harness.gauge() == 6  # all of them still wait for the store
    harness.store.gate.set()
    assert await sent.rest() == [None, None, None, None, OK, OK]
    assert (harness.gauge(), harness.stat("store.failures.deadline_exceeded")) == (0, 4)
    assert [harness.stat(f"fallback.decisions.{policy}") for policy in ("error", "allow", "deny", "local")] == [
        1,
        1,
        1,
        1,
    ]


async def test_denial_log_records_the_response_and_not_the_late_decision() -> None:
    harness = Harness()
    harness.store.fault = None
    for _ in range(2):
        harness.store.gate.set()
        await harness.answers(LAX, STRICT)  # exhausted
    harness.store.gate.clear()
    with capture_logs() as lines:
        sent = await harness.ask(LAX, STRICT, LAX, left_s=[0.02, 0.02, inf])
        assert sent.due(0.018) == {0: OK, 1: OVER_LIMIT}
        harness.store.gate.set()
        assert await sent.rest() == [None, None, OVER_LIMIT]
    assert [line["rule"] for line in lines if line["event"] == "call_denied"] == ["edge.strict", "edge.lax"]


async def test_call_without_deadline_is_never_due() -> None:
    sent = await Harness().ask(USER, LAX)
    assert sent.due_s == inf
    assert sent.due(1e9) == {}


async def test_expired_call_is_counted_and_decided_once() -> None:
    for fault in (None, StoreUnavailable("gone")):
        harness = Harness()
        harness.store.fault = fault
        sent = await harness.ask(LOCAL, left_s=0.02)
        assert sent.due(0.02) == {0: OK}
        harness.store.gate.set()
        assert await sent.rest() == [None]
        assert harness.metrics.limit("edge.local", "edge", "edge.local").total_hits == 1
        assert harness.stat("service.call.should_rate_limit.redis_error") == 1


async def test_late_admission_stays_charged() -> None:
    harness = Harness()
    sent = await harness.ask(LAX, left_s=0.02)
    sent.due(0.02)
    harness.store.gate.set()
    await sent.rest()
    answers = await harness.answers(LAX, LAX)
    assert [outcome(answer) for answer in answers] == [OK, OVER_LIMIT]


async def test_slot_of_an_expired_call_is_refunded() -> None:
    harness = Harness()
    harness.store.gate.set()
    assert outcome((await harness.answers(SLOW))[0]) == OK
    harness.store.gate.clear()
    sent = await harness.ask(SLOW, left_s=5.0)
    assert sent.due(5.0) == {0: OK}
    harness.store.gate.set()
    assert await sent.rest() == [None]
    await harness.throttle_queue.close()
    (delayed,) = await harness.answers(SLOW)
    assert isinstance(delayed, DelayedResponse)
    assert delayed.wait_s == 1  # the first slot again


@pytest.mark.parametrize("left_s", [0.002, 0.0, -1.0])
async def test_call_with_too_little_time_skips_the_store(left_s: float) -> None:
    harness = Harness()
    sent = await harness.ask(USER, LAX, USER, left_s=[left_s, left_s, 1.0])
    assert sent.due_s == pytest.approx(NOW_S + 0.997)
    assert sent.due(0) == {0: StatusCode.UNAVAILABLE, 1: OK}
    assert sent.due(0) == {}
    assert harness.store.sent == 1
    harness.store.gate.set()
    assert await sent.rest() == [None, None, OK]


async def test_synchronous_store_is_used_despite_a_short_deadline() -> None:
    harness = Harness()
    limiter = RateLimiter(harness.rules, harness.store.near, harness.metrics, Policy())
    pipeline = new_pipeline(RlsCodec(limiter), harness.metrics, harness.throttle_queue, deadlines=harness.deadlines)
    (answer,) = await responses(pipeline, [USER], [NOW_S + 0.001])
    assert outcome(answer) == OK
    assert harness.deadlines.last is None  # nothing waits, so no timer is needed


async def test_batch_on_a_synchronous_store_ends_without_suspending() -> None:
    harness = Harness()
    limiter = RateLimiter(harness.rules, harness.store.near, harness.metrics, Policy())
    pipeline = new_pipeline(RlsCodec(limiter), harness.metrics, harness.throttle_queue)
    batch = RecordedBatch([USER, message("slow"), message("slow"), message("free"), b"\xff", message("local", "user")])

    with pytest.raises(StopIteration):
        pipeline.run(batch).send(None)
    assert len(batch.responses) == len(batch.messages)


async def test_call_without_limits_does_not_wait_for_the_store() -> None:
    harness = Harness()
    sent = await harness.ask(USER, FREE)
    assert sent.due(0) == {1: OK}
    harness.store.gate.set()
    assert await sent.rest() == [OK, None]


async def test_call_over_the_in_flight_limit_skips_the_store() -> None:
    harness = Harness(max_in_flight=3)
    waiting = await harness.ask(USER, LAX)
    sent = await harness.ask(FREE, USER, LAX, STRICT, LOCAL, USER, FREE)
    assert sent.due(0) == {0: OK, 2: OK, 3: OVER_LIMIT, 4: OK, 5: StatusCode.RESOURCE_EXHAUSTED, 6: OK}
    assert (harness.store.sent, harness.gauge()) == (3, 3)
    assert harness.stat("store.failures.overloaded") == 4
    harness.store.gate.set()
    assert await waiting.rest() == [OK, OK]
    assert await sent.rest() == [None, OK, None, None, None, None, None]
    assert (harness.gauge(), harness.limiter.remaining_capacity) == (0, 3)


async def test_expired_call_stays_in_flight_until_the_store_responds() -> None:
    harness = Harness(max_in_flight=1)
    sent = await harness.ask(LAX, left_s=0.02)
    assert sent.due(0.02) == {0: OK}
    assert (await harness.ask(USER)).due(0) == {0: StatusCode.RESOURCE_EXHAUSTED}
    harness.store.gate.set()
    await sent.rest()
    assert harness.limiter.remaining_capacity == 1


async def test_undecodable_call_gets_one_immediate_error() -> None:
    harness = Harness()
    sent = await harness.ask(b"\xff", USER, left_s=[1.0, 1.0])
    assert sent.due(0) == {0: StatusCode.INVALID_ARGUMENT}
    harness.store.gate.set()
    assert await sent.rest() == [None, OK]
    assert harness.stat("service.call.should_rate_limit.service_error") == 1


async def test_all_responses_are_returned_without_calling_due() -> None:
    harness = Harness(max_in_flight=1)
    harness.store.gate.set()
    answers = await harness.answers(b"\xff", USER, LAX, FREE)
    assert [outcome(answer) for answer in answers] == [StatusCode.INVALID_ARGUMENT, OK, OK, OK]


async def test_store_error_applies_the_policy_of_each_call() -> None:
    harness = Harness()
    harness.store.fault = StoreUnavailable("gone")
    harness.store.gate.set()
    answers = await harness.answers(USER, LAX, STRICT, LOCAL, LOCAL, LOCAL, FREE)
    expected = [StatusCode.UNAVAILABLE, OK, OVER_LIMIT, OK, OK, OVER_LIMIT, OK]
    assert [outcome(answer) for answer in answers] == expected
    assert answers[0] == RpcError(StatusCode.UNAVAILABLE, "gone")


async def test_every_call_gets_a_response_if_the_pipeline_itself_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness()
    harness.store.gate.set()
    monkeypatch.setattr(harness.pipeline._codec, "refresh", lambda: 1 / 0)
    with capture_logs() as lines:
        answers = await harness.answers(USER, FREE)
    assert [outcome(answer) for answer in answers] == [StatusCode.INTERNAL] * 2
    assert [line["event"] for line in lines] == ["rate_limit_call_failed"]


async def test_calls_answered_before_a_failure_get_no_second_response(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness()
    harness.store.gate.set()
    assert await harness.answers(FREE)  # from now on, the pipeline looks for calls that need no store
    monkeypatch.setattr(harness.deadlines, "watch", lambda *_: 1 / 0)
    with capture_logs():
        answers = await harness.answers(USER, FREE, LAX)
    assert [outcome(answer) for answer in answers] == [StatusCode.INTERNAL, OK, StatusCode.INTERNAL]
