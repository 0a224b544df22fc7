"""The door with rules that throttle: which answers it wants held, for how long, and in which queue."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from math import inf

import pytest

from ratelimit_rls.core.model import Decision
from ratelimit_rls.core.plan import Policy
from ratelimit_rls.errors import StoreError, StoreUnavailable
from ratelimit_rls.rules.compile import compile_documents
from ratelimit_rls.rules.snapshot import Rules
from ratelimit_rls.service import Call, RateLimiter
from ratelimit_rls.store.embedded import EmbeddedStore
from ratelimit_rls.telemetry.metrics import Metrics
from ratelimit_rls.transport.grpc import asked
from ratelimit_rls.transport.grpc.door import Answered, Failure, Held
from ratelimit_rls.transport.grpc.messages import RateLimitRequest, RateLimitResponse
from ratelimit_rls.transport.grpc.rls import RlsDoor
from ratelimit_rls.transport.grpc.waiting import WaitingRoom

OK, OVER_LIMIT = 1, 2
MARGIN_S = 0.003
START_US = 1_786_000_000_000_000

# A slot a second, and one of ten seconds.
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
    """On a clock that stands still; notes how long it was told that calls can wait."""

    def __init__(self) -> None:
        self.now_us = START_US
        self.snapshot, self.metrics = Rules(), Metrics()
        super().__init__(self.snapshot, EmbeddedStore(clock=lambda: self.now_us), self.metrics, Policy())
        self.told: list[Sequence[int | None] | None] = []
        self.fault: Exception | None = None
        self.load(RULES)

    def load(self, document: bytes) -> None:
        tree = compile_documents({"rules.yaml": document}).tree
        self.snapshot.swap(tree, digest="", files=1, loaded_at=datetime.now(UTC))

    async def check(
        self,
        calls: Sequence[Call],
        waits_us: Sequence[int | None] | None = None,
        request_ids: Sequence[bytes | None] | None = None,
        answered: Collection[int] = (),
    ) -> list[Decision | StoreError]:
        self.told.append(waits_us)
        if self.fault is not None:
            raise self.fault
        return await super().check(calls, waits_us, request_ids, answered)


class House:
    def __init__(self, most: int = 100) -> None:
        self.limiter = Limiter()
        self.room = WaitingRoom(most, MARGIN_S)
        self.door = RlsDoor(self.limiter, self.limiter.metrics, room=self.room)

    async def ask(self, *messages: bytes, left_s: float = inf) -> list[Answered | None]:
        return list(await self.door.ask(messages, [left_s] * len(messages)).answers())

    async def one(self, message: bytes, left_s: float = inf) -> Answered | None:
        (answer,) = await self.ask(message, left_s=left_s)
        return answer


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> House:
    monkeypatch.setattr(asked, "monotonic", lambda: 0.0)  # the store takes no time
    return House()


def message(*descriptors: dict[str, str], hits: int = 0) -> bytes:
    request = RateLimitRequest(domain="edge", hits_addend=hits)
    for descriptor in descriptors:
        entries = request.descriptors.add().entries
        for key, value in descriptor.items():
            entries.add(key=key, value=value)
    return bytes(request.SerializeToString())


USER = message({"user": "a"})


def code(answer: Answered | None) -> int:
    assert isinstance(answer, bytes)
    return int(RateLimitResponse.FromString(answer).overall_code)


def held(answer: Answered | None) -> Held:
    assert isinstance(answer, Held)
    assert RateLimitResponse.FromString(answer.answer).overall_code == OK
    return answer


async def test_a_burst_is_given_one_slot_after_another_in_one_queue(house: House) -> None:
    first, *others = await house.ask(*[USER] * 4)
    assert code(first) == OK
    assert [held(other).wait_s for other in others] == [1, 2, 3]
    assert len({held(other).queue for other in others}) == 1
    assert all(held(other).latest_s == inf for other in others)


async def test_what_is_given_back_is_the_next_ones(house: House) -> None:
    _, *others = await house.ask(*[USER] * 4)
    await held(others[1]).give_back()
    assert held(await house.one(USER)).wait_s == 3


async def test_other_values_and_other_sizes_wait_elsewhere(house: House) -> None:
    await house.ask(USER, message({"user": "b"}), message({"wide": "a"}, hits=5))
    queues = {held(answer).queue for answer in await house.ask(USER, message({"user": "b"}), message({"wide": "a"}))}
    assert len(queues) == 3
    pair = await house.ask(message({"wide": "a"}), message({"wide": "a"}, hits=2))
    assert held(pair[0]).queue != held(pair[1]).queue
    assert held(pair[0]).queue in queues


async def test_who_waits_for_several_limits_stands_alone_and_for_the_longest(house: House) -> None:
    both = message({"user": "a"}, {"team": "a"})
    await house.ask(both)
    waiting = [held(answer) for answer in await house.ask(both, both)]
    assert [one.wait_s for one in waiting] == [10, 20]
    assert len({one.queue for one in waiting}) == 2


async def test_a_deadline_bounds_the_wait_and_nothing_is_charged_beyond_it(house: House) -> None:
    await house.ask(USER)
    assert code(await house.one(USER, left_s=1.0)) == OVER_LIMIT  # less the margin, it is not enough
    assert code(await house.one(USER, left_s=0.001)) == OVER_LIMIT
    waiting = held(await house.one(USER, left_s=1.01))
    assert (waiting.wait_s, waiting.latest_s) == (1, pytest.approx(1.007))
    assert house.limiter.told[-3:] == [[997_000], [0], [1_007_000]]


async def test_time_under_way_is_the_caller_s_loss_only_where_its_deadline_says_so(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    await house.ask(USER)
    clock = iter([0.0, 0.5] * 2)
    monkeypatch.setattr(asked, "monotonic", lambda: next(clock))
    assert held(await house.one(USER)).wait_s == 1
    waiting = held(await house.one(USER, left_s=2.303))
    assert waiting.wait_s == waiting.latest_s == pytest.approx(1.8)


async def test_calls_that_cannot_be_read_leave_the_others_in_step(house: House) -> None:
    plain, team = message({"plain": "a"}), message({"team": "a"})
    batch = [b"\xff", USER, plain, USER, b"\xff", team, team]
    answers = await house.door.ask(batch, [inf, inf, inf, 0.5, inf, inf, 20.0]).answers()
    assert [type(answer) for answer in answers] == [Failure, bytes, bytes, bytes, Failure, bytes, Held]
    assert [code(answers[number]) for number in (1, 2, 3, 5)] == [OK, OK, OVER_LIMIT, OK]
    assert house.limiter.told == [[None, None, 497_000, None, 19_997_000]]


async def test_rules_that_hold_nobody_are_asked_without_a_word_about_waiting(house: House) -> None:
    house.limiter.load(b"domain: edge\ndescriptors: [{key: user, rate_limit: {unit: hour, requests_per_unit: 2}}]")
    await house.ask(USER, left_s=0.02)
    house.limiter.load(RULES)
    await house.ask(USER, left_s=0.02)
    house.limiter.load(b"domain: edge\ndescriptors: [{key: user, rate_limit: {unit: hour, requests_per_unit: 2}}]")
    await house.ask(USER, left_s=0.02)
    assert house.limiter.told == [None, [17_000], None]


async def test_nobody_waits_where_there_is_no_room() -> None:
    house = House(most=2)
    codes = [OK if isinstance(answer, Held) else code(answer) for answer in await house.ask(*[USER] * 4)]
    assert codes == [OK, OK, OVER_LIMIT, OVER_LIMIT]  # a place for two, one of whom need not wait


@pytest.mark.parametrize("fault", [StoreUnavailable("away"), ZeroDivisionError()])
async def test_places_are_free_again_whatever_happened(fault: Exception) -> None:
    house = House(most=2)
    house.limiter.fault = fault
    for _ in range(3):
        assert all(isinstance(answer, Failure) for answer in await house.ask(USER, USER))
    house.limiter.fault = None
    assert house.room.reserve(None) is None
    assert house.room.reserve(None) is None


async def test_a_caller_with_an_id_leaves_its_slot_to_nobody_for_it_may_come_again(house: House) -> None:
    async def ask(*ids: bytes | None) -> list[Answered | None]:
        return list(await house.door.ask([USER] * len(ids), [inf] * len(ids), ids).answers())

    await ask(None)
    (first,) = map(held, await ask(b"mine"))
    await first.give_back()  # as when its caller leaves
    again, other = map(held, await ask(b"mine", None))

    assert [first.wait_s, again.wait_s, other.wait_s] == [1.0, 1.0, 2.0]
    assert len({first.queue, again.queue, other.queue}) == 3
