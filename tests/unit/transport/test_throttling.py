"""Pipeline with `action: throttle`: which responses are delayed, for how long, and in which queue."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from math import inf

import pytest

from ratelimit_rls.api.rls.codec import RlsCodec
from ratelimit_rls.core.model import StoreResult
from ratelimit_rls.core.plan import Policy
from ratelimit_rls.errors import StoreError, StoreUnavailable
from ratelimit_rls.h2.status import RpcError
from ratelimit_rls.pipeline import pipeline as pipeline_module
from ratelimit_rls.pipeline.batch import DelayedResponse, Response
from ratelimit_rls.pipeline.limiter import RateLimiter
from ratelimit_rls.pipeline.throttle_queue import ThrottleQueue
from ratelimit_rls.protos.messages import RateLimitRequest, RateLimitResponse
from ratelimit_rls.rules.active_rules import ActiveRules
from ratelimit_rls.rules.compile import compile_documents
from ratelimit_rls.store.base import PreparedPlan
from ratelimit_rls.store.embedded import EmbeddedStore
from ratelimit_rls.store.script_codec import EncodedPlan
from ratelimit_rls.telemetry.metrics import Metrics
from tests.support.pipelines import new_pipeline, responses

OK, OVER_LIMIT = 1, 2
MARGIN_S = 0.003
START_US = 1_786_000_000_000_000

# One slot per second, and one per ten seconds.
RULES = b"""
domain: edge
descriptors:
  - key: user
    rate_limit: {unit: minute, requests_per_unit: 60, algorithm: leaky_bucket, burst: 1}
    action: throttle
    max_delay: 30s
  - key: team
    rate_limit: {unit: minute, requests_per_unit: 6, algorithm: leaky_bucket, burst: 1}
    action: throttle
    max_delay: 30s
  - key: wide
    rate_limit: {unit: minute, requests_per_unit: 60, algorithm: token_bucket, burst: 5}
    action: throttle
    max_delay: 30s
  - key: plain
    rate_limit: {unit: minute, requests_per_unit: 5}
"""


class Limiter(RateLimiter):
    """Limiter with a fixed clock that records the maximum waits it was given."""

    def __init__(self) -> None:
        self.now_us = START_US
        self.snapshot, self.metrics = ActiveRules(), Metrics()
        super().__init__(self.snapshot, EmbeddedStore(clock=lambda: self.now_us), self.metrics, Policy())
        self.waits: list[Sequence[int | None]] = []
        self.fault: Exception | None = None
        self.load(RULES)

    def load(self, document: bytes) -> None:
        tree = compile_documents({"rules.yaml": document}).tree
        self.snapshot.swap(tree, digest="", files=1, loaded_at=datetime.now(UTC))

    async def spend(self, plans: Sequence[PreparedPlan]) -> Sequence[StoreResult | StoreError]:
        self.waits.append([plan.max_wait_us for plan in plans if isinstance(plan, EncodedPlan)])
        if self.fault is not None:
            raise self.fault
        return await super().spend(plans)


class Harness:
    def __init__(self, most: int = 100) -> None:
        self.limiter = Limiter()
        self.throttle_queue = ThrottleQueue(most, MARGIN_S)
        self.pipeline = new_pipeline(RlsCodec(self.limiter), self.limiter.metrics, self.throttle_queue)

    async def ask(self, *messages: bytes, left_s: float = inf) -> list[Response]:
        return await responses(self.pipeline, messages, [left_s] * len(messages))

    async def one(self, message: bytes, left_s: float = inf) -> Response:
        (answer,) = await self.ask(message, left_s=left_s)
        return answer


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Harness:
    monkeypatch.setattr(pipeline_module, "monotonic", lambda: 0.0)  # the store responds instantly
    return Harness()


def message(*descriptors: dict[str, str], hits: int = 0) -> bytes:
    request = RateLimitRequest(domain="edge", hits_addend=hits)
    for descriptor in descriptors:
        entries = request.descriptors.add().entries
        for key, value in descriptor.items():
            entries.add(key=key, value=value)
    return bytes(request.SerializeToString())


USER = message({"user": "a"})


def code(answer: Response) -> int:
    assert isinstance(answer, bytes)
    return int(RateLimitResponse.FromString(answer).overall_code)


def delayed(answer: Response) -> DelayedResponse:
    assert isinstance(answer, DelayedResponse)
    assert RateLimitResponse.FromString(answer.message).overall_code == OK
    return answer


async def test_burst_gets_consecutive_slots_in_one_queue(harness: Harness) -> None:
    first, *others = await harness.ask(*[USER] * 4)
    assert code(first) == OK
    assert [delayed(other).wait_s for other in others] == [1, 2, 3]
    assert len({delayed(other).queue for other in others}) == 1
    assert all(delayed(other).latest_s == inf for other in others)


async def test_refunded_slot_goes_to_the_next_call(harness: Harness) -> None:
    _, *others = await harness.ask(*[USER] * 4)
    await delayed(others[1]).give_back()
    assert delayed(await harness.one(USER)).wait_s == 3


async def test_other_values_and_costs_use_other_queues(harness: Harness) -> None:
    await harness.ask(USER, message({"user": "b"}), message({"wide": "a"}, hits=5))
    queues = {
        delayed(answer).queue for answer in await harness.ask(USER, message({"user": "b"}), message({"wide": "a"}))
    }
    assert len(queues) == 3
    pair = await harness.ask(message({"wide": "a"}), message({"wide": "a"}, hits=2))
    assert delayed(pair[0]).queue != delayed(pair[1]).queue
    assert delayed(pair[0]).queue in queues


async def test_call_with_several_limits_waits_for_the_longest(harness: Harness) -> None:
    both = message({"user": "a"}, {"team": "a"})
    await harness.ask(both)
    waiting = [delayed(answer) for answer in await harness.ask(both, both)]
    assert [one.wait_s for one in waiting] == [10, 20]
    assert len({one.queue for one in waiting}) == 2


async def test_wait_beyond_the_deadline_is_denied_and_not_charged(harness: Harness) -> None:
    await harness.ask(USER)
    assert code(await harness.one(USER, left_s=1.0)) == OVER_LIMIT  # too short after subtracting the margin
    assert code(await harness.one(USER, left_s=0.001)) == OVER_LIMIT
    waiting = delayed(await harness.one(USER, left_s=1.01))
    assert (waiting.wait_s, waiting.latest_s) == (1, pytest.approx(1.007))
    assert harness.limiter.waits[-3:] == [[997_000], [0], [1_007_000]]


async def test_store_time_counts_against_the_deadline_only(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    await harness.ask(USER)
    clock = iter([0.0, 0.5] * 2)
    monkeypatch.setattr(pipeline_module, "monotonic", lambda: next(clock))
    assert delayed(await harness.one(USER)).wait_s == 1
    waiting = delayed(await harness.one(USER, left_s=2.303))
    assert waiting.wait_s == waiting.latest_s == pytest.approx(1.8)


async def test_undecodable_calls_do_not_shift_the_others(harness: Harness) -> None:
    plain, team = message({"plain": "a"}), message({"team": "a"})
    batch = [b"\xff", USER, plain, USER, b"\xff", team, team]
    answers = await responses(harness.pipeline, batch, [inf, inf, inf, 0.5, inf, inf, 20.0])
    assert [type(answer) for answer in answers] == [RpcError, bytes, bytes, bytes, RpcError, bytes, DelayedResponse]
    assert [code(answers[number]) for number in (1, 2, 3, 5)] == [OK, OK, OVER_LIMIT, OK]
    assert harness.limiter.waits == [[None, None, 497_000, None, 19_997_000]]


async def test_rules_without_throttle_pass_no_wait_to_the_limiter(harness: Harness) -> None:
    harness.limiter.load(b"domain: edge\ndescriptors: [{key: user, rate_limit: {unit: hour, requests_per_unit: 2}}]")
    await harness.ask(USER, left_s=0.02)
    harness.limiter.load(RULES)
    await harness.ask(USER, left_s=0.02)
    harness.limiter.load(b"domain: edge\ndescriptors: [{key: user, rate_limit: {unit: hour, requests_per_unit: 2}}]")
    await harness.ask(USER, left_s=0.02)
    assert harness.limiter.waits == [[None], [17_000], [None]]


async def test_full_queue_denies_instead_of_delaying() -> None:
    harness = Harness(most=2)
    codes = [OK if isinstance(answer, DelayedResponse) else code(answer) for answer in await harness.ask(*[USER] * 4)]
    assert codes == [OK, OK, OVER_LIMIT, OVER_LIMIT]  # room for two, one of which need not wait


@pytest.mark.parametrize("fault", [StoreUnavailable("away"), ZeroDivisionError()])
async def test_reserved_places_are_always_released(fault: Exception) -> None:
    harness = Harness(most=2)
    harness.limiter.fault = fault
    for _ in range(3):
        assert all(isinstance(answer, RpcError) for answer in await harness.ask(USER, USER))
    harness.limiter.fault = None
    assert harness.throttle_queue.reserve(None) is None
    assert harness.throttle_queue.reserve(None) is None


async def test_cancelled_call_with_a_request_id_keeps_its_slot(harness: Harness) -> None:
    async def ask(*ids: bytes | None) -> list[Response]:
        return await responses(harness.pipeline, [USER] * len(ids), request_ids=ids)

    await ask(None)
    (first,) = map(delayed, await ask(b"mine"))
    await first.give_back()  # as when the call is cancelled
    again, other = map(delayed, await ask(b"mine", None))

    assert [first.wait_s, again.wait_s, other.wait_s] == [1.0, 1.0, 2.0]
    assert len({first.queue, again.queue, other.queue}) == 3
