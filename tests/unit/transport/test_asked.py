"""A batch on its way: who is answered at once, who is late, and what becomes of the store's word for them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from math import inf

import pytest
from structlog.testing import capture_logs

from ratelimit_rls.core.model import Answer, OnStoreFailure, Plan
from ratelimit_rls.core.plan import Policy
from ratelimit_rls.core.refund import Refund
from ratelimit_rls.errors import StoreError, StoreUnavailable
from ratelimit_rls.failure import Fallback
from ratelimit_rls.rules.compile import compile_documents
from ratelimit_rls.rules.snapshot import Rules
from ratelimit_rls.service import RateLimiter
from ratelimit_rls.store.base import Prepared
from ratelimit_rls.store.embedded import EmbeddedStore
from ratelimit_rls.telemetry.metrics import Metrics
from ratelimit_rls.telemetry.refusals import RefusalLog
from ratelimit_rls.transport.grpc import asked as asked_module
from ratelimit_rls.transport.grpc.asked import AskedLimiter
from ratelimit_rls.transport.grpc.door import Answered, Failure, FailureCode, Held
from ratelimit_rls.transport.grpc.encode import Wording
from ratelimit_rls.transport.grpc.messages import RateLimitRequest, RateLimitResponse
from ratelimit_rls.transport.grpc.rls import RlsDoor
from ratelimit_rls.transport.grpc.waiting import WaitingRoom

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
    """Counters elsewhere: batches wait until the test lets them through."""

    decides_here = False

    def __init__(self) -> None:
        self.near = EmbeddedStore(clock=lambda: START_US)
        self.gate = asyncio.Event()
        self.fault: StoreError | None = None
        self.asked = 0

    def prepare(self, plan: Plan) -> Prepared:
        return self.near.prepare(plan)

    def opposite(self, prepared: Prepared, refund: Refund) -> Prepared:
        return self.near.opposite(prepared, refund)

    async def spend(self, batch: Sequence[Prepared]) -> list[Answer | StoreError]:
        self.asked += len(batch)
        await self.gate.wait()
        return [self.fault] * len(batch) if self.fault else await self.near.spend(batch)

    async def close(self) -> None: ...


class House:
    def __init__(self, most_in_flight: int = 100) -> None:
        self.store = FarStore()
        self.metrics = Metrics()
        self.rules = Rules()
        tree = compile_documents({"rules.yaml": RULES}).tree
        self.rules.swap(tree, digest="", files=1, loaded_at=datetime.now(UTC))
        self.limiter = RateLimiter(
            self.rules,
            self.store,
            self.metrics,
            Policy(on_store_failure=OnStoreFailure.ERROR),
            Fallback(self.metrics, clock=lambda: START_US),
            most_in_flight=most_in_flight,
        )
        self.room = WaitingRoom(10, MARGIN_S)
        self.door = RlsDoor(self.limiter, self.metrics, room=self.room, refusal_log=RefusalLog(100))

    def ask(self, *messages: bytes, left_s: float | Sequence[float] = inf) -> AskedLimiter[Wording]:
        lefts_s = [left_s] * len(messages) if isinstance(left_s, float) else left_s
        return self.door.ask(messages, [NOW_S + left for left in lefts_s])

    async def under_way(self, asked: AskedLimiter[Wording]) -> asyncio.Task[Sequence[Answered | None]]:
        """Sent, and not answered."""
        task = asyncio.ensure_future(asked.answers())
        await asyncio.sleep(0)
        return task

    def stat(self, name: str) -> int:
        return self.metrics.names()[f"ratelimit.{name}"]

    def gauge(self) -> int:
        return dict(self.limiter.gauges())["ratelimit.store.calls_in_flight"]


@pytest.fixture(autouse=True)
def _moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asked_module, "monotonic", lambda: NOW_S)


def message(*keys: str) -> bytes:
    request = RateLimitRequest(domain="edge")
    for key in keys:
        request.descriptors.add().entries.add(key=key, value="v")
    return bytes(request.SerializeToString())


USER, LAX, STRICT, LOCAL, SLOW, FREE = (message(key) for key in ("user", "lax", "strict", "local", "slow", "free"))


def told(answer: Answered | None) -> int | FailureCode | None:
    """The overall code, or the status, of an answer."""
    if answer is None:
        return None
    if isinstance(answer, Failure):
        return answer.code
    assert isinstance(answer, bytes)
    return int(RateLimitResponse.FromString(answer).overall_code)


def due(asked: AskedLimiter[Wording], after_s: float) -> dict[int, int | FailureCode | None]:
    return {number: told(answer) for number, answer in asked.due(NOW_S + after_s)}


async def test_who_is_late_is_told_what_its_rules_say_while_the_others_wait_on() -> None:
    house = House()
    asked = house.ask(USER, LAX, STRICT, LOCAL, USER, LAX, left_s=[0.02, 0.02, 0.02, 0.02, 1.0, inf])
    waiting = await house.under_way(asked)
    assert asked.due_s == pytest.approx(NOW_S + 0.017)
    assert due(asked, 0.016) == {}
    assert due(asked, 0.018) == {0: FailureCode.UNAVAILABLE, 1: OK, 2: OVER_LIMIT, 3: OK}
    assert asked.due_s == pytest.approx(NOW_S + 0.997)
    assert house.gauge() == 6  # the store is still asked about all of them
    house.store.gate.set()
    assert [told(answer) for answer in await waiting] == [None, None, None, None, OK, OK]
    assert (house.gauge(), house.stat("service.call.should_rate_limit.late")) == (0, 4)
    assert [house.stat(f"store_failure.{policy}") for policy in ("error", "allow", "deny", "local")] == [1, 1, 1, 1]


async def test_the_log_of_refusals_has_what_callers_were_told_and_not_what_the_store_said_later() -> None:
    house = House()
    house.store.fault = None
    for _ in range(2):
        house.store.gate.set()
        await house.ask(LAX, STRICT).answers()  # used up
    house.store.gate.clear()
    with capture_logs() as lines:
        asked = house.ask(LAX, STRICT, LAX, left_s=[0.02, 0.02, inf])
        waiting = await house.under_way(asked)
        assert due(asked, 0.018) == {0: OK, 1: OVER_LIMIT}
        house.store.gate.set()
        assert [told(answer) for answer in await waiting] == [None, None, OVER_LIMIT]
    assert [line["rule"] for line in lines if line["event"] == "refused"] == ["edge.strict", "edge.lax"]


async def test_who_has_no_deadline_is_never_due() -> None:
    asked = House().ask(USER, LAX)
    assert asked.due_s == inf
    assert due(asked, 1e9) == {}


async def test_a_late_call_is_counted_once_in_metrics_and_decided_once_here_whatever_the_store_says() -> None:
    for fault in (None, StoreUnavailable("gone")):
        house = House()
        house.store.fault = fault
        asked = house.ask(LOCAL, left_s=0.02)
        waiting = await house.under_way(asked)
        assert due(asked, 0.02) == {0: OK}
        house.store.gate.set()
        assert await waiting == [None]
        assert house.metrics.limit("edge.local", "edge", "edge.local").total_hits == 1
        assert house.stat("service.call.should_rate_limit.redis_error") == 1


async def test_what_the_store_admitted_too_late_stays_charged() -> None:
    house = House()
    asked = house.ask(LAX, left_s=0.02)
    waiting = await house.under_way(asked)
    due(asked, 0.02)
    house.store.gate.set()
    await waiting
    answers = await house.ask(LAX, LAX).answers()
    assert [told(answer) for answer in answers] == [OK, OVER_LIMIT]


async def test_a_slot_for_which_nobody_waits_any_more_is_given_back() -> None:
    house = House()
    house.store.gate.set()
    assert told((await house.ask(SLOW).answers())[0]) == OK
    house.store.gate.clear()
    asked = house.ask(SLOW, left_s=5.0)
    waiting = await house.under_way(asked)
    assert due(asked, 5.0) == {0: OK}
    house.store.gate.set()
    assert await waiting == [None]
    await house.room.close()
    (held,) = await house.ask(SLOW).answers()
    assert isinstance(held, Held)
    assert held.wait_s == 1  # the first slot, again


@pytest.mark.parametrize("left_s", [0.002, 0.0, -1.0])
async def test_who_comes_with_too_little_time_is_answered_at_once_and_the_store_is_not_asked(left_s: float) -> None:
    house = House()
    asked = house.ask(USER, LAX, USER, left_s=[left_s, left_s, 1.0])
    assert asked.due_s < 0
    assert due(asked, 0) == {0: FailureCode.UNAVAILABLE, 1: OK}
    assert due(asked, 0) == {}
    waiting = await house.under_way(asked)
    assert house.store.asked == 1
    house.store.gate.set()
    assert [told(answer) for answer in await waiting] == [None, None, OK]


async def test_a_store_in_this_process_is_asked_however_little_time_is_left() -> None:
    house = House()
    limiter = RateLimiter(house.rules, house.store.near, house.metrics, Policy())
    door = RlsDoor(limiter, house.metrics, room=house.room)
    (answer,) = await door.ask([USER], [NOW_S + 0.001]).answers()
    assert told(answer) == OK


async def test_who_needs_no_store_does_not_wait_for_those_who_do() -> None:
    house = House()
    asked = house.ask(USER, FREE)
    assert due(asked, 0) == {1: OK}
    waiting = await house.under_way(asked)
    house.store.gate.set()
    assert [told(answer) for answer in await waiting] == [OK, None]


async def test_one_too_many_is_answered_at_once_and_the_store_is_not_asked() -> None:
    house = House(most_in_flight=3)
    waiting = await house.under_way(house.ask(USER, LAX))
    asked = house.ask(FREE, USER, LAX, STRICT, LOCAL, USER, FREE)
    assert due(asked, 0) == {0: OK, 2: OK, 3: OVER_LIMIT, 4: OK, 5: FailureCode.RESOURCE_EXHAUSTED, 6: OK}
    others = await house.under_way(asked)
    assert (house.store.asked, house.gauge()) == (3, 3)
    assert house.stat("service.call.should_rate_limit.overloaded") == 4
    house.store.gate.set()
    assert [told(answer) for answer in await waiting] == [OK, OK]
    assert [told(answer) for answer in await others] == [None, OK, None, None, None, None, None]
    assert (house.gauge(), house.limiter.places_left) == (0, 3)


async def test_who_is_late_keeps_its_place_until_the_store_is_done_with_it() -> None:
    house = House(most_in_flight=1)
    asked = house.ask(LAX, left_s=0.02)
    waiting = await house.under_way(asked)
    assert due(asked, 0.02) == {0: OK}
    assert told(house.ask(USER).due(NOW_S)[0][1]) == FailureCode.RESOURCE_EXHAUSTED
    house.store.gate.set()
    await waiting
    assert house.limiter.places_left == 1


async def test_what_cannot_be_read_is_told_at_once_and_once() -> None:
    house = House()
    asked = house.ask(b"\xff", USER, left_s=[1.0, 1.0])
    assert due(asked, 0) == {0: FailureCode.INVALID_ARGUMENT}
    house.store.gate.set()
    assert [told(answer) for answer in await asked.answers()] == [None, OK]
    assert house.stat("service.call.should_rate_limit.service_error") == 1


async def test_a_caller_who_never_asks_what_is_due_is_told_all_in_the_end() -> None:
    house = House(most_in_flight=1)
    house.store.gate.set()
    answers = await house.ask(b"\xff", USER, LAX, FREE).answers()
    assert [told(answer) for answer in answers] == [FailureCode.INVALID_ARGUMENT, OK, OK, OK]


async def test_a_store_that_fails_is_the_rules_affair_call_by_call() -> None:
    house = House()
    house.store.fault = StoreUnavailable("gone")
    house.store.gate.set()
    answers = await house.ask(USER, LAX, STRICT, LOCAL, LOCAL, LOCAL, FREE).answers()
    expected = [FailureCode.UNAVAILABLE, OK, OVER_LIMIT, OK, OK, OVER_LIMIT, OK]
    assert [told(answer) for answer in answers] == expected
    assert answers[0] == Failure(FailureCode.UNAVAILABLE, "gone")
